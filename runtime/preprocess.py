"""Source images to the model's input: the one implementation in the project.

Resize, colour order, layout and scale happen in one pass over small planes into a buffer that is used again.
"""

from __future__ import annotations

from typing import Any, Literal

import cv2
import numpy as np

from carpus.runtime.antialias import PolyphaseResizer, pillow_resize
from carpus.runtime.errors import DataError
from carpus.runtime.image import load_image
from carpus.runtime.iospec import Preprocess
from carpus.runtime.transform import ImageTransform

__all__ = ["Preprocessor"]

_CV_LIMIT = 32767  # cv2.resize with INTER_LINEAR and INTER_AREA keeps positions in 16 bits
_MOST_RESIZERS = 4


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
        self._resizers: dict[tuple[tuple[int, int], tuple[int, int]], PolyphaseResizer | None] = {}

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
        window = out[:, top : top + height, left : left + width]
        self._fill(image, window, transform)
        for channel in range(3):
            if self._shift[channel]:
                window[channel] += self._shift[channel]
        if (height, width) != self.spec.size:
            for border in (
                out[:, :top],
                out[:, top + height :],
                out[:, :, :left],
                out[:, :, left + width :],
            ):
                border[...] = self._padding[:, None, None]
        return transform

    def _fill(self, image: np.ndarray, window: np.ndarray, transform: ImageTransform) -> None:
        """Resize, take channels apart and scale into (3, h, w) float32."""
        swap = self.spec.color == "bgr"
        if image.strides[2] == -1:  # a BGR array seen as RGB: read it as it lies and swap planes instead of pixels
            image, swap = image[:, :, ::-1], not swap
        ordered = window[::-1] if swap else window
        scale = self._scale[::-1] if swap else self._scale
        if self.spec.interpolation == "bilinear_antialias" and transform.source_size != transform.content_size:
            resizer = self._resizer(transform.source_size, transform.content_size)
            if resizer is not None:
                resizer(_packed(image), ordered, scale)
                return
        if not self._planes or self._planes[0].shape != transform.content_size:
            self._planes = [np.empty(transform.content_size, np.uint8) for _ in range(3)]
        cv2.split(_resize(_packed(image), transform.content_size, self.spec.interpolation), self._planes)
        for channel in range(3):
            np.multiply(self._planes[channel], scale[channel], out=ordered[channel], dtype=np.float32)

    def _resizer(self, source: tuple[int, int], target: tuple[int, int]) -> PolyphaseResizer | None:
        key = (source, target)
        if key not in self._resizers:
            while len(self._resizers) >= _MOST_RESIZERS:
                self._resizers.pop(next(iter(self._resizers)))
            self._resizers[key] = PolyphaseResizer.plan(source, target)
        return self._resizers[key]


def _packed(image: np.ndarray) -> np.ndarray:
    """The image with its pixels packed, as OpenCV needs them; rows may be apart."""
    return image if image.strides[2] == 1 and image.strides[1] == 3 else np.ascontiguousarray(image)


def _resize(image: np.ndarray, size: tuple[int, int], interpolation: str) -> np.ndarray:
    height, width = image.shape[:2]
    if (height, width) == size:
        return image
    if interpolation == "bilinear_antialias":
        return pillow_resize(image, size)
    method = cv2.INTER_LINEAR if interpolation == "bilinear" else cv2.INTER_AREA
    if max(height, width) >= _CV_LIMIT:
        raise DataError(
            f"image: {width} x {height} pixels is beyond {_CV_LIMIT} on a side, which {interpolation!r} cannot resize"
        )
    return cv2.resize(image, (size[1], size[0]), interpolation=method)
