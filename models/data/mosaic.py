"""Mosaic of four images, turned, moved and scaled as a whole.

Each image is resized so that its shorter side fills its half of a 2 x 2 canvas, which then goes through one affine map
and to the training size. Here the tiles are resized straight to their place in the output, and the affine map works
there. Source: DEIM (Huang et al., 2024), Dense O2O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from carpus.models.data.augment_config import AugmentConfig
from carpus.models.data.viewport import resize_image

__all__ = ["Sample", "affine_matrix", "mosaic", "transform_boxes"]

Sample = tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.int64]]
"""Image `(h, w, 3)` uint8 RGB, boxes `(n, 4)` float32 xyxy [px], labels `(n,)` int64."""


def affine_matrix(
    angle: float, shift: tuple[float, float], scale: float, canvas: tuple[float, float], size: tuple[int, int]
) -> NDArray[np.float64]:
    """Rotation, scale and shift about the centre of a canvas, seen in pixels of the output that shows it stretched.

    Args:
        angle: rotation [rad].
        shift: (x, y) as a share of the canvas' width and height.
        scale: factor.
        canvas: (width, height) of the canvas, in any unit.
        size: (height, width) of the output [px].

    Returns:
        `(2, 3)` map from unmoved to moved output positions, in continuous pixel coordinates.
    """
    height, width = size
    stretch_x, stretch_y = width / canvas[0], height / canvas[1]
    c, s = scale * math.cos(angle), scale * math.sin(angle)
    linear = np.array([[c, -s * stretch_x / stretch_y], [s * stretch_y / stretch_x, c]])
    centre = np.array([width / 2, height / 2])
    offset = centre + np.array(shift) * (width, height) - linear @ centre
    return np.concatenate((linear, offset[:, None]), axis=1)


def transform_boxes(
    boxes: NDArray[np.float32], matrix: NDArray[np.float64], size: tuple[int, int]
) -> NDArray[np.float32]:
    """Upright boxes around the mapped `(n, 4)` xyxy boxes, clipped to an output of (height, width)."""
    x1, y1, x2, y2 = boxes.astype(np.float64).T
    corners_x, corners_y = np.stack((x1, x2, x2, x1)), np.stack((y1, y1, y2, y2))
    moved_x = matrix[0, 0] * corners_x + matrix[0, 1] * corners_y + matrix[0, 2]
    moved_y = matrix[1, 0] * corners_x + matrix[1, 1] * corners_y + matrix[1, 2]
    moved_x, moved_y = np.clip(moved_x, 0, size[1]), np.clip(moved_y, 0, size[0])
    return np.stack((moved_x.min(0), moved_y.min(0), moved_x.max(0), moved_y.max(0)), axis=1).astype(np.float32)


def mosaic(samples: Sequence[Sample], size: tuple[int, int], config: AugmentConfig, rng: np.random.Generator) -> Sample:
    """Join four samples into one.

    Args:
        samples: top left, top right, bottom left, bottom right.
        size: (height, width) of the output [px].
        config: ranges of the affine map.
        rng: source of randomness.

    Returns:
        The joined sample at the output size; boxes are clipped to it but not yet sorted out by size.
    """
    height, width = size
    # Tile sizes with the shorter side 1; a cell is as large as the largest tile.
    tiles = [(image.shape[1] / min(image.shape[:2]), image.shape[0] / min(image.shape[:2])) for image, _, _ in samples]
    cell_width, cell_height = max(w for w, _ in tiles), max(h for _, h in tiles)
    if config.keep_aspect:
        cell_width, cell_height = (
            max(cell_width, cell_height * width / height),
            max(cell_height, cell_width * height / width),
        )
    stretch_x, stretch_y = width / (2 * cell_width), height / (2 * cell_height)

    canvas = np.full((height, width, 3), config.fill, dtype=np.uint8)
    all_boxes, all_labels = [], []
    for i, ((image, boxes, labels), (tile_width, tile_height)) in enumerate(zip(samples, tiles, strict=True)):
        left, top = (i % 2) * (width // 2), (i // 2) * (height // 2)
        right = min(left + max(round(tile_width * stretch_x), 1), width)
        bottom = min(top + max(round(tile_height * stretch_y), 1), height)
        canvas[top:bottom, left:right] = resize_image(image, right - left, bottom - top)
        factor = np.array([(right - left) / image.shape[1], (bottom - top) / image.shape[0]] * 2)
        all_boxes.append(boxes * factor + (left, top, left, top))
        all_labels.append(labels)

    angle = math.radians(rng.uniform(-config.mosaic_rotation, config.mosaic_rotation))
    limit_x, limit_y = config.mosaic_translation
    shift = (rng.uniform(-limit_x, limit_x), rng.uniform(-limit_y, limit_y))
    scale = rng.uniform(*config.mosaic_scale)
    matrix = affine_matrix(angle, shift, scale, (2 * cell_width, 2 * cell_height), size)
    # cv2 counts positions from the middle of the first pixel.
    centred = matrix.copy()
    centred[:, 2] += (matrix[:, :2] - np.eye(2)) @ np.array([0.5, 0.5])
    moved = cv2.warpAffine(
        canvas,
        centred,
        (width, height),
        flags=cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=(config.fill,) * 3,
    )
    boxes = transform_boxes(np.concatenate(all_boxes).astype(np.float32), matrix, size)
    return np.asarray(moved, dtype=np.uint8), boxes, np.concatenate(all_labels)
