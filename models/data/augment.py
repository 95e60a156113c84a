"""Augmentation of single training samples: mosaic or zoom-out and crop, colours, mirror, resize.

The sequence is that of DEIMv2 (arXiv:2509.20787): mosaic, photometric distortion, zoom-out, crop with required overlap,
mirror, resize. Mosaic excludes zoom-out and crop. Strong augmentation happens in a range of epochs only. Geometry is
composed first and rendered once at the training size, which keeps a sample at a millisecond or two.
"""

from __future__ import annotations

from collections.abc import Callable

import cv2
import numpy as np
from numpy.typing import NDArray

from carpus.models.data.augment_config import AUGMENTS, AugmentConfig, get_augment_config
from carpus.models.data.mosaic import Sample, mosaic
from carpus.models.data.photometric import apply_colour, photometric_distort
from carpus.models.data.viewport import Viewport, framed, iou_crop, large_enough, render, zoom_out
from carpus.runtime.errors import DataError

__all__ = ["AUGMENTS", "AugmentConfig", "Augmenter", "PickOther", "Sample", "get_augment_config"]

PickOther = Callable[[np.random.Generator], Sample]
"""Fetches another random sample, for mosaics."""


class Augmenter:
    """Turns a stored sample into a training sample of fixed size. The same generator state gives the same bytes.

    Args:
        config: what is done, how often and when.
        size: (height, width) of the output [px].

    Raises:
        DataError: a size below 2 px.
    """

    def __init__(self, config: AugmentConfig, size: tuple[int, int]) -> None:
        if min(size) < 2:
            raise DataError(f"augmentation size must be (height, width) of at least 2 px, got {size}")
        self.config = config
        self.size = size

    def __call__(
        self,
        image: NDArray[np.uint8],
        boxes: NDArray[np.float32],
        labels: NDArray[np.int64],
        rng: np.random.Generator,
        epoch: int,
        pick_other: PickOther | None = None,
    ) -> Sample:
        """Augment one sample.

        Args:
            image: `(h, w, 3)` uint8 RGB; not changed.
            boxes: `(n, 4)` float32 xyxy [px of the image].
            labels: `(n,)` int64.
            rng: source of all randomness.
            epoch: epoch, from 0.
            pick_other: fetches other samples; without it there are no mosaics.

        Returns:
            `(height, width, 3)` uint8 RGB, `(m, 4)` float32 boxes cxcywh in 0..1, and `(m,)` int64 labels of the
            boxes that remain large enough.
        """
        config = self.config
        boxes = np.asarray(boxes, dtype=np.float32).reshape(-1, 4)
        strong = config.strong(epoch)
        if config.mosaic(epoch) and pick_other is not None and rng.random() < config.mosaic_prob:
            samples = [(image, boxes, labels), *(pick_other(rng) for _ in range(3))]
            image, boxes, labels = mosaic(samples, self.size, config, rng)
            image = apply_colour(image, photometric_distort(_mean_colour(image), config, rng))
        else:
            view = Viewport(0, 0, image.shape[1], image.shape[0])
            colour, keep = None, np.ones(len(boxes), dtype=np.bool_)
            if strong:
                colour = photometric_distort(_mean_colour(image), config, rng)
                view = zoom_out(view.width, view.height, config, rng)
                view, keep = iou_crop(view, boxes, config, rng)
            if config.keep_aspect:
                view = framed(view, self.size)  # more may come into sight
                keep = _centres_inside(boxes, view)
            visible = np.clip(
                boxes,
                (view.left, view.top, view.left, view.top),
                np.array([view.left + view.width, view.top + view.height] * 2),
            )
            keep = keep & large_enough(visible, config.min_box_size)
            # Letterboxes of evaluation do not smooth either.
            fine = not strong and not config.keep_aspect
            image, boxes = render(image, boxes[keep], view, self.size, colour, fine=fine, fill=config.fill)
            labels = labels[keep]
        keep = large_enough(boxes, config.min_box_size)
        boxes, labels = boxes[keep], labels[keep]
        if rng.random() < config.flip_prob:
            image = np.asarray(cv2.flip(image, 1), dtype=np.uint8)
            boxes = np.stack((self.size[1] - boxes[:, 2], boxes[:, 1], self.size[1] - boxes[:, 0], boxes[:, 3]), axis=1)
        return image, _to_cxcywh(boxes, self.size), labels


def _centres_inside(boxes: NDArray[np.float32], view: Viewport) -> NDArray[np.bool_]:
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2 - (view.left, view.top)
    return np.asarray(((centres > 0) & (centres < (view.width, view.height))).all(axis=1))


def _mean_colour(image: NDArray[np.uint8]) -> NDArray[np.float64]:
    return np.array(cv2.mean(image)[:3])


def _to_cxcywh(boxes: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    height, width = size
    relative = boxes / np.array([width, height, width, height], dtype=np.float32)
    centre, extent = (relative[:, :2] + relative[:, 2:]) / 2, relative[:, 2:] - relative[:, :2]
    return np.concatenate((centre, extent), axis=1).astype(np.float32)
