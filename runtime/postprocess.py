"""The graph's outputs to detections in pixels of the source image."""

from __future__ import annotations

import math

import numpy as np

from carpus.runtime.detections import Detections
from carpus.runtime.errors import BackendError
from carpus.runtime.iospec import Postprocess
from carpus.runtime.transform import ImageTransform

__all__ = ["cxcywh_to_xyxy", "postprocess", "select_top"]

_LOGIT_MARGIN = 1e-3  # candidates are cut a little low in logits, then exactly in scores


def postprocess(
    logits: np.ndarray,
    boxes: np.ndarray,
    transform: ImageTransform,
    spec: Postprocess,
    class_names: tuple[str, ...],
    *,
    score_threshold: float | None = None,
    classes: np.ndarray | None = None,
) -> Detections:
    """Turn one image's outputs into detections.

    The ``top_k`` (query, class) pairs of greatest logit are kept, equal ones in the order of their index, as the DETR
    family's postprocessor does; sigmoid and box arithmetic touch only those that pass the threshold.

    Args:
        logits: (Q, C) float32.
        boxes: (Q, 4) float32, cxcywh in 0..1 of the model's input.
        transform: the map that preprocessing made for this image.
        spec: how to read the outputs.
        class_names: C names.
        score_threshold: least score; the spec's when None.
        classes: (K,) int64 class ids to look among, or None for all. Others do not take part in the top-k.

    Returns:
        Detections, best first, boxes clipped to the image.

    Raises:
        BackendError: the outputs hold NaN or infinity.
    """
    for name, values in ((spec.logits, logits), (spec.boxes, boxes)):
        # One not finite makes the sum so; one pass without an array of answers.
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(np.add.reduce(values, axis=None))
        if not math.isfinite(total) and not np.isfinite(values).all():
            raise BackendError(
                f"output {name!r}: {np.count_nonzero(~np.isfinite(values))} of {values.size} values are NaN or "
                "infinite; no detections were made from them. Check the model with `carpus verify`"
            )
    threshold = spec.score_threshold if score_threshold is None else score_threshold
    considered = logits if classes is None else logits[:, classes]
    width = considered.shape[1]
    flat = np.ascontiguousarray(considered, np.float32).reshape(-1)
    index = select_top(flat, spec.top_k, _logit(threshold) - _LOGIT_MARGIN)
    score = (1.0 / (1.0 + np.exp(-np.maximum(flat[index].astype(np.float64), -700.0)))).astype(np.float32)
    keep = score >= np.float32(threshold)
    index, score = index[keep], score[keep]
    query, class_id = np.divmod(index, max(width, 1))
    if classes is not None:
        class_id = classes[class_id]
    model_height, model_width = transform.model_size
    xyxy = cxcywh_to_xyxy(boxes[query].astype(np.float64))
    xyxy *= (model_width, model_height, model_width, model_height)
    xyxy = transform.to_source(xyxy)
    height, width = transform.source_size
    np.clip(xyxy, 0.0, (width, height, width, height), out=xyxy)
    return Detections.trusted(
        xyxy.astype(np.float32), score, class_id.astype(np.int64), class_names, transform.source_size
    )


def select_top(values: np.ndarray, count: int, least: float = -math.inf) -> np.ndarray:
    """Indices (K,) of the ``count`` greatest values that are at least ``least``, greatest first, ties by index.

    Args:
        values: (M,) without NaN.
        count: most indices to return.
        least: lower bound.
    """
    candidates = (values >= least).nonzero()[0] if least > -math.inf else np.arange(len(values))
    found = values[candidates]
    if len(candidates) > count:
        cut = np.partition(found, len(found) - count)[len(found) - count]
        above = found > cut
        tied = np.flatnonzero(found == cut)[: count - np.count_nonzero(above)]
        above[tied] = True
        candidates, found = candidates[above], found[above]
    return candidates[(-found).argsort(kind="stable")]


def cxcywh_to_xyxy(boxes: np.ndarray) -> np.ndarray:
    """Boxes (N, 4) from centre and size to corners, in the same unit."""
    half = boxes[:, 2:] * 0.5
    xyxy = np.empty_like(boxes)
    np.subtract(boxes[:, :2], half, out=xyxy[:, :2])
    np.add(boxes[:, :2], half, out=xyxy[:, 2:])
    return xyxy


def _logit(score: float) -> float:
    if score <= 0.0:
        return -math.inf
    return math.log(score / (1.0 - score)) if score < 1.0 - 1e-7 else 15.0
