"""Detections drawn on their image."""

from __future__ import annotations

import colorsys
import glob
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from carpus.runtime.detections import Detections
from carpus.runtime.errors import DataError

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

__all__ = ["annotate", "class_colour"]

_GOLDEN = 0.6180339887498949
# The first that exists is used for names beyond ASCII, which Pillow's own font does not have.
_FONTS = (
    "/usr/share/fonts/opentype/noto/NotoSansCJK-Regular.ttc",
    "/usr/share/fonts/truetype/droid/DroidSansFallback*.ttf",
    "/usr/share/fonts/**/NotoSans*CJK*.tt*",
    "/usr/share/fonts/**/DejaVuSans.ttf",
    "/System/Library/Fonts/Supplemental/Arial Unicode.ttf",
    "C:/Windows/Fonts/msyh.ttc",
)


def class_colour(class_id: int) -> tuple[int, int, int]:
    """RGB 0..255 of a class: always the same for an id, and far apart for neighbours."""
    hue = (0.08 + class_id * _GOLDEN) % 1.0
    value = (1.0, 0.8, 0.9)[class_id % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def annotate(image: np.ndarray, detections: Detections, *, scores: bool = True) -> np.ndarray:
    """Draw boxes with class names and scores.

    Args:
        image: (h, w, 3) uint8 RGB, the image that the detections are of.
        detections: what to draw; the best is drawn last, on top.
        scores: whether the label ends with the score.

    Returns:
        A new (h, w, 3) uint8 RGB image.

    Raises:
        DataError: the image is not of the size that the detections state.
    """
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise DataError(f"image to draw on: expected (h, w, 3) uint8, got {image.dtype} of shape {image.shape}")
    if image.shape[:2] != detections.image_size:
        raise DataError(
            f"image to draw on: is {image.shape[1]} x {image.shape[0]}, the detections are of one of "
            f"{detections.image_size[1]} x {detections.image_size[0]}"
        )
    from PIL import Image, ImageDraw

    canvas = Image.fromarray(np.ascontiguousarray(image))
    draw = ImageDraw.Draw(canvas)
    height, width = image.shape[:2]
    line = max(1, round(min(height, width) / 240))
    font_size = max(10, round(min(height, width) / 36))
    font = _font(font_size, all(name.isascii() for name in detections.names))
    ascent, descent = font.getmetrics()
    label_height = ascent + descent + 2
    for box, score, class_id, name in reversed(list(detections)):
        colour = class_colour(class_id)
        left, top, right, bottom = (round(float(value)) for value in box)
        right, bottom = max(left, right - 1), max(top, bottom - 1)
        draw.rectangle((left, top, right, bottom), outline=colour, width=line)
        label = f"{name} {score:.2f}" if scores else name
        label_width = round(font.getlength(label)) + 6
        x = max(0, min(left, width - label_width))
        y = top - label_height if top >= label_height else max(0, min(top, height - label_height))
        draw.rectangle((x, y, x + label_width - 1, y + label_height - 1), fill=colour)
        luminance = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
        ink = (0, 0, 0) if luminance > 120 else (255, 255, 255)
        draw.text((x + 3, y + 1), label, fill=ink, font=font)
    return np.array(canvas)


@lru_cache(maxsize=16)
def _font(size: int, ascii_only: bool) -> FreeTypeFont:
    from PIL import ImageFont

    if not ascii_only:
        for pattern in _FONTS:
            for path in sorted(glob.glob(pattern, recursive=True)):
                try:
                    return ImageFont.truetype(path, size)
                except OSError:  # a font that FreeType cannot read: the next may do
                    continue
    return ImageFont.load_default(size)  # type: ignore[return-value]
