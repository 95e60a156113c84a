"""Zoom-out and crop as one rectangle in the source image, rendered straight to the training size.

A `Viewport` may reach beyond the image; what lies outside is of one grey. No canvas larger than the output is built.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from carpus.models.data.augment_config import AugmentConfig
from carpus.models.data.photometric import apply_colour

__all__ = ["Viewport", "framed", "iou_crop", "large_enough", "render", "resize_image", "zoom_out"]

_CROP_OVERLAPS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
_CROP_SCALE = (0.3, 1.0)
_CROP_ASPECT = (0.5, 2.0)
_CROP_TRIALS = 40


@dataclass(frozen=True)
class Viewport:
    """A rectangle in source pixels: left, top, width, height, whole numbers."""

    left: int
    top: int
    width: int
    height: int


def large_enough(boxes: NDArray[np.float32], min_size: float) -> NDArray[np.bool_]:
    """Which of the `(n, 4)` xyxy boxes have no side shorter than `min_size` and some area."""
    sides = boxes[:, 2:] - boxes[:, :2]
    return np.asarray(((sides >= min_size) & (sides > 0)).all(axis=1))


def zoom_out(width: int, height: int, config: AugmentConfig, rng: np.random.Generator) -> Viewport:
    """A viewport of the image's aspect, `config.zoom_out_sides` times its size, with the image somewhere inside."""
    if rng.random() >= config.zoom_out_prob:
        return Viewport(0, 0, width, height)
    side = rng.uniform(*config.zoom_out_sides)
    canvas_width, canvas_height = int(width * side), int(height * side)
    left = int((canvas_width - width) * rng.random())
    top = int((canvas_height - height) * rng.random())
    return Viewport(-left, -top, canvas_width, canvas_height)


def iou_crop(
    view: Viewport, boxes: NDArray[np.float32], config: AugmentConfig, rng: np.random.Generator
) -> tuple[Viewport, NDArray[np.bool_]]:
    """A part of the viewport that overlaps some object by a random minimum (SSD, Liu et al., 2016, section 2.2).

    Args:
        view: the viewport so far.
        boxes: `(n, 4)` xyxy in source pixels.
        config: probability of a crop.
        rng: source of randomness.

    Returns:
        The new viewport, and which boxes have their centre in it `(n,)`.
    """
    everything = np.ones(len(boxes), dtype=np.bool_)
    if rng.random() >= config.crop_prob or len(boxes) == 0:
        return view, everything
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    while True:
        overlap = _CROP_OVERLAPS[int(rng.integers(len(_CROP_OVERLAPS)))]
        if overlap >= 1.0:
            return view, everything
        # All trials of this overlap at once; the first that fits is taken.
        draws = rng.random((_CROP_TRIALS, 4))
        low, high = _CROP_SCALE
        sizes = (draws[:, :2] * (high - low) + low) * (view.width, view.height)
        sizes = sizes.astype(np.int64)
        corners = (draws[:, 2:] * ((view.width, view.height) - sizes)).astype(np.int64)
        corners += np.array((view.left, view.top))
        crops = np.concatenate((corners, corners + sizes), axis=1)[:, None, :]
        inside = np.asarray(((centres > crops[..., :2]) & (centres < crops[..., 2:])).all(axis=-1))
        common = np.clip(np.minimum(crops[..., 2:], boxes[:, 2:]) - np.maximum(crops[..., :2], boxes[:, :2]), 0, None)
        intersection = common.prod(-1)
        crop_areas = sizes.prod(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            aspect = sizes[:, 0] / sizes[:, 1]
            iou = np.where(inside, intersection / (crop_areas[:, None] + areas - intersection), -1.0)
        good = (sizes > 0).all(1) & (aspect >= _CROP_ASPECT[0]) & (aspect <= _CROP_ASPECT[1])
        good &= inside.any(axis=1) & (iou.max(1) >= overlap)
        if good.any():
            pick = int(good.argmax())
            x, y, w, h = (int(value) for value in (*corners[pick], *sizes[pick]))
            return Viewport(x, y, w, h), inside[pick]


def framed(view: Viewport, size: tuple[int, int]) -> Viewport:
    """The smallest viewport around `view`, with it in the middle, of the aspect of an output (height, width)."""
    height, width = size
    wide = max(view.width, round(view.height * width / height))
    tall = max(view.height, round(view.width * height / width))
    return Viewport(view.left - (wide - view.width) // 2, view.top - (tall - view.height) // 2, wide, tall)


def resize_image(image: NDArray[np.uint8], width: int, height: int, *, fine: bool = False) -> NDArray[np.uint8]:
    """Resize to `(height, width, 3)`.

    Pixels are averaged by area where two or more merge, else interpolated; halving first makes that cheap. With `fine`
    any merging is an average by area, which is nearer to the smoothing resize of evaluation and takes longer.
    """
    while image.shape[0] >= 2 * height and image.shape[1] >= 2 * width and not (image.shape[0] | image.shape[1]) & 1:
        half = (image.shape[1] // 2, image.shape[0] // 2)
        image = np.asarray(cv2.resize(image, half, interpolation=cv2.INTER_AREA), dtype=np.uint8)
    if image.shape[:2] == (height, width):
        return image
    shrink = max(image.shape[0] / height, image.shape[1] / width)
    method = cv2.INTER_AREA if shrink > (1.0 if fine else 2.0) else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(image, (width, height), interpolation=method), dtype=np.uint8)


def render(
    image: NDArray[np.uint8],
    boxes: NDArray[np.float32],
    view: Viewport,
    size: tuple[int, int],
    colour: NDArray[np.float64] | None = None,
    *,
    fine: bool = False,
    fill: int = 0,
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Show a viewport at the output size.

    Args:
        image: `(h, w, 3)` uint8 RGB.
        boxes: `(n, 4)` xyxy in source pixels.
        view: what to show.
        size: (height, width) of the output [px].
        colour: colour map of the image (not of what is around it).
        fine: smooth as in evaluation (see `resize_image`).
        fill: grey level outside the image.

    Returns:
        `(height, width, 3)` uint8 and the boxes in its pixels, clipped to it.
    """
    out_height, out_width = size
    x0, x1 = max(view.left, 0), min(view.left + view.width, image.shape[1])
    y0, y1 = max(view.top, 0), min(view.top + view.height, image.shape[0])
    scale_x, scale_y = out_width / view.width, out_height / view.height
    left, right = _span((x0 - view.left) * scale_x, (x1 - view.left) * scale_x, out_width)
    top, bottom = _span((y0 - view.top) * scale_y, (y1 - view.top) * scale_y, out_height)
    part = image[y0:y1, x0:x1]
    # Colours change where there are fewer pixels.
    before = part.shape[0] * part.shape[1] < (right - left) * (bottom - top)
    if before:
        part = apply_colour(part, colour)
    part = resize_image(part, right - left, bottom - top, fine=fine)
    if not before:
        part = apply_colour(part, colour)
    if (bottom - top, right - left) == size:
        canvas = part if part.flags.c_contiguous and part.base is None else np.array(part)
    else:
        canvas = np.full((out_height, out_width, 3), fill, dtype=np.uint8)
        canvas[top:bottom, left:right] = part
    # Boxes follow the whole pixels that the part really fills.
    factor = np.array([(right - left) / (x1 - x0), (bottom - top) / (y1 - y0)] * 2)
    moved = (boxes - (x0, y0, x0, y0)) * factor + (left, top, left, top)
    moved = np.clip(moved, (left, top, left, top), (right, bottom, right, bottom))
    return canvas, moved.astype(np.float32)


def _span(low: float, high: float, limit: int) -> tuple[int, int]:
    """Whole-pixel range nearest to (low, high), at least one pixel, within 0..limit."""
    start = min(round(low), limit - 1)
    return start, min(max(round(high), start + 1), limit)
