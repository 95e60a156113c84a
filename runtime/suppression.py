"""Class-aware non-maximum suppression of one image: exact, vectorised, and quick on tens of thousands of boxes.

Boxes of different classes are kept apart by comparing class ids. The common alternative moves the boxes of class ``c``
by ``c`` times 7680 px, where float32 has steps of up to 1/16 px, so that the IoU of small boxes is wrong there.
"""

from __future__ import annotations

import numpy as np

__all__ = ["suppress"]

_FIRST_BLOCK = 128
_LAST_BLOCK = 1024


def suppress(
    boxes_xyxy: np.ndarray, class_id: np.ndarray, iou_threshold: float, max_kept: int | None = None
) -> np.ndarray:
    """Greedy suppression: a box is dropped when its IoU with a kept one of its class is greater than the threshold.

    Boxes come in blocks: a block meets the boxes kept before it in one array operation, and then itself. Work ends as
    soon as ``max_kept`` are found, so that its cost is at most n * (max_kept + a block).

    Args:
        boxes_xyxy: (n, 4) float32, best first. A box without area overlaps none.
        class_id: (n,) class of each.
        iou_threshold: greatest IoU of two boxes of one class that both stay, 0..1.
        max_kept: stop after this many; None keeps all that stay.

    Returns:
        (k,) int64 indices of the kept boxes, ascending, which is best first.
    """
    total = len(boxes_xyxy)
    limit = total if max_kept is None else min(max_kept, total)
    kept = np.zeros(0, np.int64)
    start, size = 0, _FIRST_BLOCK
    while start < total and len(kept) < limit:
        block = np.arange(start, min(start + size, total))
        start, size = start + size, min(2 * size, _LAST_BLOCK)
        if len(kept):
            hit = _overlaps(boxes_xyxy, class_id, kept, block, iou_threshold).any(0)
            block = block[~hit]
        kept = np.concatenate([kept, _within(boxes_xyxy, class_id, block, iou_threshold, limit - len(kept))])
    return kept


def _within(
    boxes_xyxy: np.ndarray, class_id: np.ndarray, block: np.ndarray, iou_threshold: float, limit: int
) -> np.ndarray:
    """The members of a block that stay when only the block counts."""
    overlaps = _overlaps(boxes_xyxy, class_id, block, block, iou_threshold)
    alive = np.ones(len(block), bool)
    chosen: list[int] = []
    at = 0
    while len(chosen) < limit:
        left = alive[at:]
        step = int(left.argmax()) if len(left) else 0
        if not len(left) or not left[step]:
            break
        at += step
        chosen.append(at)
        alive &= ~overlaps[at]
        at += 1
    return block[chosen]


def _overlaps(
    boxes_xyxy: np.ndarray, class_id: np.ndarray, rows: np.ndarray, columns: np.ndarray, iou_threshold: float
) -> np.ndarray:
    """(len(rows), len(columns)) bool: same class and IoU above the threshold."""
    a, b = boxes_xyxy[rows].T[:, :, None], boxes_xyxy[columns].T[:, None, :]
    width = np.minimum(a[2], b[2])
    width -= np.maximum(a[0], b[0])
    height = np.minimum(a[3], b[3])
    height -= np.maximum(a[1], b[1])
    np.maximum(width, 0, out=width)
    np.maximum(height, 0, out=height)
    width *= height
    # In the order in which runtimes compute it, so that a tie with the threshold falls the same way.
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    union -= width
    ratio = np.divide(width, union, out=np.zeros_like(width), where=union > 0)
    found = ratio > np.asarray(iou_threshold, ratio.dtype)
    found &= class_id[rows][:, None] == class_id[columns][None]
    return found
