"""Antialiased bilinear resize, equal to Pillow's within one grey level."""

from __future__ import annotations

import numpy as np

__all__ = ["resize_antialias"]


def resize_antialias(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize (h, w, 3) uint8 to ``size`` (height, width), the triangle filter widened by the reduction."""
    from PIL import Image

    resized = Image.fromarray(np.ascontiguousarray(image)).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(resized)
