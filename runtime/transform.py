"""The map between pixels of a source image and pixels of a model's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from carpus.runtime.errors import DataError

if TYPE_CHECKING:
    from carpus.runtime.iospec import Preprocess

__all__ = ["ImageTransform"]


@dataclass(frozen=True)
class ImageTransform:
    """``model = source * scale + offset`` on each axis, derived from a :class:`~carpus.runtime.spec.Preprocess`.

    Attributes:
        source_size: (height, width) of the source image [px].
        model_size: (height, width) of the model's input [px].
        content_size: (height, width) of the resized image inside the model's input [px].
        offset: (x, y) of the content's top left corner in the model's input [px].
    """

    source_size: tuple[int, int]
    model_size: tuple[int, int]
    content_size: tuple[int, int]
    offset: tuple[int, int]

    @classmethod
    def fit(cls, spec: Preprocess, source_size: tuple[int, int]) -> ImageTransform:
        """The transform that ``spec`` applies to an image of (height, width)."""
        height, width = source_size
        if height < 1 or width < 1:
            raise DataError(f"image size: expected at least 1 x 1 pixels, got {width} x {height}")
        model_height, model_width = spec.size
        if spec.resize == "stretch":
            return cls(source_size, spec.size, spec.size, (0, 0))
        ratio = min(model_height / height, model_width / width)
        content = (
            min(model_height, max(1, round(height * ratio))),
            min(model_width, max(1, round(width * ratio))),
        )
        offset = ((model_width - content[1]) // 2, (model_height - content[0]) // 2)
        return cls(source_size, spec.size, content, offset)

    @property
    def scale(self) -> tuple[float, float]:
        """(x, y) factors from source pixels to model pixels."""
        return self.content_size[1] / self.source_size[1], self.content_size[0] / self.source_size[0]

    def to_model(self, xyxy: np.ndarray) -> np.ndarray:
        """Boxes (..., 4) xyxy in source pixels to model pixels; float64 in, float64 out, else float32."""
        factor, shift = self._factors(xyxy)
        return xyxy * factor + shift

    def to_source(self, xyxy: np.ndarray) -> np.ndarray:
        """Boxes (..., 4) xyxy in model pixels to source pixels, not clipped; the inverse of :meth:`to_model`."""
        factor, shift = self._factors(xyxy)
        return (xyxy - shift) / factor

    def _factors(self, xyxy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if xyxy.shape[-1:] != (4,):
            raise DataError(f"boxes: expected shape (..., 4), got {xyxy.shape}")
        dtype = np.float64 if xyxy.dtype == np.float64 else np.float32
        return np.array(self.scale * 2, dtype), np.array(self.offset * 2, dtype)
