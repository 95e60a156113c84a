"""Source images to the model's input: the one implementation in the project.

Resize, colour order, layout and scale happen in one pass over small planes into a buffer that is used again.
"""

from __future__ import annotations

from typing import Any, Literal

import cv2
import numpy as np
from carpus.runtime.antialias import resize_antialias
from carpus.runtime.errors import DataError
from carpus.runtime.image import load_image
from carpus.runtime.iospec import Preprocess
from carpus.runtime.transform import ImageTransform

__all__ = ["Preprocessor"]

_CV_LIMIT = 32767  # cv2.resize with INTER_LINEAR and INTER_AREA keeps positions in 16 bits


class Preprocessor:
    """Runs a :class:`~carpus.runtime.spec.Preprocess`, keeping its scratch buffers between calls.

    Not for use from several threads at once; make one a thread.

    Args:
        spec: what to do.
    """

    def __init__(self, spec: Preprocess) -> None:
        self.spec = spec
        scale = np.array([spec.scale / std for std in spec.std], np.float64)
        shift = np.array([-mean / std for mean, std in zip(spec.mean, spec.std, strict=True)], np.float64)
        self._scale = scale.astype(np.float32)
        self._shift = shift.astype(np.float32)
        self._padding = (spec.pad_value * scale + shift).astype(np.float32)
        self._planes: list[np.ndarray] = []

    def __call__(
        self, images: Any, out: np.ndarray | None = None, *, color: Literal["rgb", "bgr"] = "rgb"
    ) -> tuple[np.ndarray, list[ImageTransform]]:
        """Preprocess one image or a list of images.

        Args:
            images: what :func:`~carpus.runtime.image.load_image` takes, or a list or tuple of it.
            out: (N, 3, H, W) float32, C-contiguous, to write into; allocated when None.
            color: channel order of the arrays given.

        Returns:
            The tensor (N, 3, H, W) float32, which is ``out`` when that was given, and one transform an image.

        Raises:
            DataError: an image cannot be used, or ``out`` does not fit.
        """
        batch = images if isinstance(images, (list, tuple)) else [images]
        shape = (len(batch), 3, *self.spec.size)
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise DataError(
                f"out: expected C-contiguous float32 of shape {shape}, got {out.dtype} of shape {out.shape}"
                f"{'' if out.flags.c_contiguous else ', not contiguous'}"
            )
        transforms = []
        for index, image in enumerate(batch):
            try:
                rgb = load_image(image, color=color)
            except DataError as error:
                if len(batch) == 1:
                    raise
                raise DataError(f"images[{index}]: {error}") from None
            transforms.append(self.run(rgb, out[index]))
        return out, transforms

    def run(self, image: np.ndarray, out: np.ndarray) -> ImageTransform:
        """Preprocess one image that is already uint8 RGB.

        Args:
            image: (h, w, 3) uint8 RGB.
            out: (3, H, W) float32 to fill, C-contiguous.

        Returns:
            The transform between source and model pixels.
        """
        transform = ImageTransform.fit(self.spec, (image.shape[0], image.shape[1]))
        height, width = transform.content_size
        left, top = transform.offset
        resized = _resize(image, transform.content_size, self.spec.interpolation)
        if not self._planes or self._planes[0].shape != (height, width):
            self._planes = [np.empty((height, width), np.uint8) for _ in range(3)]
        cv2.split(resized, self._planes)
        planes = self._planes if self.spec.color == "rgb" else self._planes[::-1]
        window = out[:, top : top + height, left : left + width]
        for channel in range(3):
            target = window[channel]
            np.multiply(planes[channel], self._scale[channel], out=target, dtype=np.float32)
            if self._shift[channel]:
                target += self._shift[channel]
            if (height, width) != self.spec.size:
                for border in (
                    out[channel, :top],
                    out[channel, top + height :],
                    out[channel, :, :left],
                    out[channel, :, left + width :],
                ):
                    border[...] = self._padding[channel]
        return transform


def _resize(image: np.ndarray, size: tuple[int, int], interpolation: str) -> np.ndarray:
    height, width = image.shape[:2]
    if (height, width) == size:
        return image if image.strides[2] == 1 and image.strides[1] == 3 else np.ascontiguousarray(image)
    if interpolation == "bilinear_antialias":
        return resize_antialias(image, size)
    method = cv2.INTER_LINEAR if interpolation == "bilinear" else cv2.INTER_AREA
    if max(height, width) >= _CV_LIMIT:
        raise DataError(
            f"image: {width} x {height} pixels is beyond {_CV_LIMIT} on a side, which {interpolation!r} cannot resize"
        )
    return cv2.resize(np.ascontiguousarray(image), (size[1], size[0]), interpolation=method)
