"""Class-aware non-maximum suppression, as a plain reference for the forms that bundles carry."""

from __future__ import annotations

import numpy as np

from carpus.runtime.errors import DataError

__all__ = ["CLASS_OFFSET", "box_iou", "non_maximum_suppression", "suppress"]

CLASS_OFFSET = 7680.0
"""Boxes of class c are moved by c times this [px], so that boxes of different classes never overlap."""
MAX_CLUSTER = 3000


def box_iou(a_xyxy: np.ndarray, b_xyxy: np.ndarray) -> np.ndarray:
    """IoU of all pairs; a pair without any area gives 0.

    Args:
        a_xyxy: (n, 4) boxes.
        b_xyxy: (m, 4) boxes.

    Returns:
        (n, m) of the boxes' dtype.
    """
    low = np.maximum(a_xyxy[:, None, :2], b_xyxy[None, :, :2])
    high = np.minimum(a_xyxy[:, None, 2:], b_xyxy[None, :, 2:])
    overlap = np.clip(high - low, 0, None).prod(-1)
    a_area = (a_xyxy[:, 2:] - a_xyxy[:, :2]).prod(-1)
    b_area = (b_xyxy[:, 2:] - b_xyxy[:, :2]).prod(-1)
    union = a_area[:, None] + b_area[None] - overlap
    return np.divide(overlap, union, out=np.zeros_like(overlap), where=union > 0)


def suppress(
    boxes_xyxy: np.ndarray, scores: np.ndarray, iou_threshold: float, max_kept: int | None = None
) -> np.ndarray:
    """Greedy suppression of one set of boxes.

    Args:
        boxes_xyxy: (n, 4) boxes.
        scores: (n,) scores; of equal ones the box that comes first wins.
        iou_threshold: a box is dropped when its IoU with a kept one is greater.
        max_kept: stop after this many.

    Returns:
        (k,) int64 indices of the kept boxes, best first.
    """
    order = np.argsort(-scores, kind="stable")
    kept: list[int] = []
    while order.size and (max_kept is None or len(kept) < max_kept):
        best, order = order[0], order[1:]
        kept.append(int(best))
        order = order[box_iou(boxes_xyxy[best : best + 1], boxes_xyxy[order])[0] <= iou_threshold]
    return np.asarray(kept, np.int64)


def non_maximum_suppression(
    boxes_xyxy: np.ndarray,
    scores: np.ndarray,
    *,
    score_threshold: float = 0.25,
    iou_threshold: float = 0.7,
    max_detections: int = 300,
    max_candidates: int = 30000,
    multi_label: bool = False,
    class_agnostic: bool = False,
    cluster_sigma: float | None = None,
) -> np.ndarray:
    """Detections of one image.

    Args:
        boxes_xyxy: (A, 4) float [px].
        scores: (A, C) probabilities.
        score_threshold: only scores greater than this count.
        iou_threshold: see ``suppress``.
        max_detections: most detections returned.
        max_candidates: best candidates that enter the suppression.
        multi_label: every class above the threshold makes a candidate, instead of the best class only.
        class_agnostic: boxes of different classes suppress each other.
        cluster_sigma: with a number, each kept box becomes the mean of the candidates that overlap it by more than
            ``iou_threshold`` (of the 3000 best, same class), weighted by score * exp(-(1 - IoU)^2 / sigma).

    Returns:
        (n, 6) float32 x1, y1, x2, y2, score, class; best first.

    Raises:
        DataError: shapes that do not belong together.
    """
    if boxes_xyxy.ndim != 2 or boxes_xyxy.shape[1] != 4 or scores.ndim != 2 or len(scores) != len(boxes_xyxy):
        raise DataError(f"suppression needs boxes (A, 4) and scores (A, C), got {boxes_xyxy.shape} and {scores.shape}")
    if scores.size == 0:
        return np.zeros((0, 6), np.float32)
    if multi_label:
        row, class_id = np.nonzero(scores > score_threshold)
    else:
        class_id = scores.argmax(1)
        row = np.nonzero(scores[np.arange(len(scores)), class_id] > score_threshold)[0]
        class_id = class_id[row]
    score = scores[row, class_id]
    order = np.argsort(-score, kind="stable")[:max_candidates]
    boxes, score, class_id = boxes_xyxy[row[order]], score[order], class_id[order]
    offset = 0.0 if class_agnostic else CLASS_OFFSET
    moved = boxes + (class_id * offset).astype(boxes.dtype)[:, None]
    kept = suppress(moved, score, iou_threshold, max_detections)
    result = boxes[kept]
    if cluster_sigma is not None and kept.size:
        iou = box_iou(moved[kept], moved[:MAX_CLUSTER])
        weight = (iou > iou_threshold) * score[:MAX_CLUSTER] * np.exp(-((1 - iou) ** 2) / cluster_sigma)
        result = (weight @ boxes[:MAX_CLUSTER]) / (weight.sum(1, keepdims=True) + 1e-6)
    return np.concatenate([result, score[kept, None], class_id[kept, None]], 1).astype(np.float32)
