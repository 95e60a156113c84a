"""Contact sheets of what goes into training and what comes out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from carpus.models.data.coco import CocoDataset
from carpus.models.data.store import decode
from carpus.models.predict import ModelDetector

__all__ = ["detections_sheet", "draw_boxes", "targets_sheet"]

_GOLDEN = 0.61803398875  # successive classes get hues far apart


def targets_sheet(
    images: Tensor, targets: Sequence[dict[str, Tensor]], names: Sequence[str], *, count: int = 9
) -> NDArray[np.uint8]:
    """Training images with their targets, as the model gets them.

    Args:
        images: (B, 3, H, W) float in 0..1.
        targets: per image ``labels`` (n,) and ``boxes`` (n, 4) cxcywh in 0..1.
        names: class names.
        count: most images shown.

    Returns:
        (H', W', 3) uint8 RGB.
    """
    tiles = []
    for image, target in zip(images[:count], targets[:count], strict=True):
        pixels = (image.detach().float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
        boxes = target["boxes"].detach().float().cpu().numpy() * np.tile([pixels.shape[1], pixels.shape[0]], 2)
        corners = np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], axis=1)
        tiles.append(draw_boxes(pixels, corners, target["labels"].cpu().numpy(), names))
    return _sheet(tiles)


def detections_sheet(
    detector: ModelDetector, dataset: CocoDataset, *, count: int = 9, score: float = 0.4
) -> NDArray[np.uint8]:
    """Validation images, spread over the split, with what is detected in them: (H, W, 3) uint8 RGB."""
    tiles = []
    for record in dataset.subset(count):
        image = decode(record)
        found = detector([image])[0].filter(score=score)
        tiles.append(draw_boxes(image, found.xyxy, found.class_id, found.class_names, found.score))
    return _sheet(tiles)


def draw_boxes(
    image: NDArray[np.uint8],
    boxes: NDArray[np.floating],
    labels: NDArray[np.integer],
    names: Sequence[str],
    scores: NDArray[np.floating] | None = None,
) -> NDArray[np.uint8]:
    """A copy of an image with labelled boxes.

    Args:
        image: (H, W, 3) uint8 RGB.
        boxes: (N, 4) corners [px].
        labels: (N,) class ids.
        names: class names.
        scores: (N,) scores to print.
    """
    canvas = Image.fromarray(image)
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(size=max(image.shape[0] / 32, 11))
    for index, (box, label) in enumerate(zip(boxes.tolist(), labels.tolist(), strict=True)):
        colour = _colour(label)
        draw.rectangle(box, outline=colour, width=2)
        text = names[label] if scores is None else f"{names[label]} {scores[index]:.2f}"
        left, top = box[0], max(box[1] - draw.textbbox((0, 0), text, font=font)[3] - 2, 0)
        draw.rectangle(draw.textbbox((left, top), text, font=font), fill=colour)
        draw.text((left, top), text, fill=(0, 0, 0), font=font)
    return np.asarray(canvas)


def _colour(label: int) -> tuple[int, int, int]:
    hsv = np.array([[[(label * _GOLDEN) % 1.0 * 179, 170, 255]]], dtype=np.uint8)
    red, green, blue = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)[0, 0]
    return int(red), int(green), int(blue)


def _sheet(tiles: Sequence[NDArray[np.uint8]], width: int = 400) -> NDArray[np.uint8]:
    """Tiles side by side, each scaled to one width, on black."""
    scaled = [
        np.asarray(cv2.resize(tile, (width, max(round(tile.shape[0] * width / tile.shape[1]), 1)))) for tile in tiles
    ]
    columns = max(math.ceil(math.sqrt(len(scaled))), 1)
    height = max(tile.shape[0] for tile in scaled)
    rows = math.ceil(len(scaled) / columns)
    sheet = np.zeros((rows * height, columns * width, 3), dtype=np.uint8)
    for index, tile in enumerate(scaled):
        top, left = index // columns * height, index % columns * width
        sheet[top : top + tile.shape[0], left : left + width] = tile
    return sheet
