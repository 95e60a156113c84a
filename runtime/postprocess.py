"""The graph's outputs to detections in pixels of the source image."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from carpus.runtime.detections import Detections
from carpus.runtime.errors import BackendError
from carpus.runtime.iospec import DETECTION_OUTPUTS, Postprocess
from carpus.runtime.suppression import suppress
from carpus.runtime.transform import ImageTransform

__all__ = ["activate", "cxcywh_to_xyxy", "postprocess", "postprocess_outputs", "select_top", "suppress_queries"]

_LOGIT_MARGIN = 1e-3  # candidates are cut a little low in logits, then exactly in scores


def postprocess(
    logits: np.ndarray,
    boxes: np.ndarray,
    transform: ImageTransform,
    spec: Postprocess,
    class_names: tuple[str, ...],
    *,
    score_threshold: float | None = None,
    iou_threshold: float | None = None,
    classes: np.ndarray | None = None,
) -> Detections:
    """Turn one image's outputs into detections, in the way that ``spec.kind`` names.

    Sigmoid and box arithmetic touch only those that pass the threshold.

    Args:
        logits: (Q, C) float32.
        boxes: (Q, 4) float32, cxcywh in 0..1 of the model's input.
        transform: the map that preprocessing made for this image.
        spec: how to read the outputs.
        class_names: C names.
        score_threshold: least score; the spec's when None.
        iou_threshold: greatest IoU of two detections of one class, for "nms"; the spec's when None.
        classes: (K,) int64 class ids to look among, or None for all. Others do not take part at all.

    Returns:
        Detections, best first, boxes clipped to the image.

    Raises:
        BackendError: the outputs hold NaN or infinity.
    """
    _check_finite(logits, boxes, spec)
    threshold = spec.score_threshold if score_threshold is None else score_threshold
    considered = logits if classes is None else logits[:, classes]
    if spec.kind == "nms":
        iou = spec.iou_threshold if iou_threshold is None else iou_threshold
        query, class_id, score = suppress_queries(considered, boxes, transform.model_size, spec, threshold, iou)
    else:
        query, class_id, score = _best_pairs(considered, spec, threshold)
    if classes is not None:
        class_id = classes[class_id]
    model_height, model_width = transform.model_size
    xyxy = cxcywh_to_xyxy(boxes[query].astype(np.float64))
    if spec.kind == "nms":
        xyxy[:, 2:] = np.maximum(xyxy[:, 2:], xyxy[:, :2])
    xyxy *= (model_width, model_height, model_width, model_height)
    return _in_source(xyxy, score, class_id.astype(np.int64), transform, class_names)


def postprocess_outputs(
    outputs: Mapping[str, np.ndarray],
    index: int,
    transform: ImageTransform,
    spec: Postprocess,
    class_names: tuple[str, ...],
    *,
    score_threshold: float,
    iou_threshold: float,
    classes: np.ndarray | None = None,
) -> Detections:
    """Turn a graph's outputs for one image of a batch into detections.

    A graph that suppresses itself is believed, unless there is a choice of classes: the others would have taken part.

    Args:
        outputs: the graph's outputs, computed with these thresholds.
        index: the image.
        transform: the map that preprocessing made for this image.
        spec: how to read the outputs.
        class_names: C names.
        score_threshold: see :func:`postprocess`.
        iou_threshold: see :func:`postprocess`.
        classes: see :func:`postprocess`.

    Raises:
        BackendError: the outputs hold NaN or infinity.
    """
    logits, boxes = outputs[spec.logits][index], outputs[spec.boxes][index]
    if not spec.in_graph or classes is not None:
        return postprocess(
            logits,
            boxes,
            transform,
            spec,
            class_names,
            score_threshold=score_threshold,
            iou_threshold=iou_threshold,
            classes=classes,
        )
    # NaN is above no threshold: without this a broken model would see an empty scene.
    _check_finite(logits, boxes, spec)
    count, xyxy, score, class_id = (outputs[name][index] for name in DETECTION_OUTPUTS)
    found = int(count)
    return _in_source(
        xyxy[:found].astype(np.float64), score[:found].copy(), class_id[:found].copy(), transform, class_names
    )


def _check_finite(logits: np.ndarray, boxes: np.ndarray, spec: Postprocess) -> None:
    for name, values in ((spec.logits, logits), (spec.boxes, boxes)):
        # One not finite makes the sum so; one pass without an array of answers.
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(np.add.reduce(values, axis=None))
        if not math.isfinite(total) and not np.isfinite(values).all():
            raise BackendError(
                f"output {name!r}: {np.count_nonzero(~np.isfinite(values))} of {values.size} values are NaN or "
                "infinite; no detections were made from them. Check the model with `carpus verify`"
            )


def _in_source(
    xyxy: np.ndarray, score: np.ndarray, class_id: np.ndarray, transform: ImageTransform, class_names: tuple[str, ...]
) -> Detections:
    """Detections of boxes (n, 4) float64 in pixels of the model's input."""
    xyxy = transform.to_source(xyxy)
    height, width = transform.source_size
    np.clip(xyxy, 0.0, (width, height, width, height), out=xyxy)
    return Detections.trusted(xyxy.astype(np.float32), score, class_id, class_names, transform.source_size)


def suppress_queries(
    logits: np.ndarray,
    boxes: np.ndarray,
    model_size: tuple[int, int],
    spec: Postprocess,
    score_threshold: float,
    iou_threshold: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The (query, class) pairs that remain after non-maximum suppression.

    Args:
        logits: (Q, C) float32.
        boxes: (Q, 4) float32, cxcywh in 0..1 of the model's input.
        model_size: (height, width) of the model's input [px].
        spec: of kind "nms".
        score_threshold: only scores greater than this count.
        iou_threshold: greatest IoU of two boxes of one class.

    Returns:
        (k,) query, (k,) class and (k,) float32 score, best first; equal scores in the order of query, then class.
    """
    queries, width = logits.shape
    if logits.size == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)
    if spec.multi_label or width == 1:
        flat = np.ascontiguousarray(logits, np.float32).reshape(-1)
    else:
        best = logits.argmax(1)
        flat = logits[np.arange(queries), best].astype(np.float32)
    index = (flat >= _least_value(score_threshold, spec)).nonzero()[0]
    score = _scores(flat[index], spec)
    above = score > np.float32(score_threshold)
    index, score = index[above], score[above]
    order = select_top(score, spec.max_candidates)
    index, score = index[order], score[order]
    if spec.multi_label or width == 1:
        query, class_id = np.divmod(index, width)
    else:
        query, class_id = index, best[index]
    height_px, width_px = model_size
    found = np.asarray(boxes[query], np.float32) * np.array([width_px, height_px, width_px, height_px], np.float32)
    np.maximum(found[:, 2:], 0, out=found[:, 2:])
    kept = suppress(cxcywh_to_xyxy(found), class_id, iou_threshold, spec.top_k)
    return query[kept], class_id[kept], score[kept]


def _best_pairs(
    logits: np.ndarray, spec: Postprocess, score_threshold: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(query, class, score) of the pairs of greatest logit, equal ones in the order of their index."""
    flat = np.ascontiguousarray(logits, np.float32).reshape(-1)
    index = select_top(flat, spec.top_k, _least_value(score_threshold, spec))
    score = _scores(flat[index], spec)
    keep = score >= np.float32(score_threshold)
    index, score = index[keep], score[keep]
    query, class_id = np.divmod(index, max(logits.shape[1], 1))
    return query, class_id, score


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


def activate(logits: np.ndarray, spec: Postprocess) -> np.ndarray:
    """Scores in 0..1, float64, of an output of any shape."""
    wide = logits.astype(np.float64)
    return wide if spec.activation == "none" else 1.0 / (1.0 + np.exp(-np.maximum(wide, -700.0)))


def _scores(logits: np.ndarray, spec: Postprocess) -> np.ndarray:
    return activate(logits, spec).astype(np.float32)


def _least_value(score: float, spec: Postprocess) -> float:
    """A value of the graph's output that is surely not above what gives this score."""
    return score if spec.activation == "none" else _logit(score) - _LOGIT_MARGIN


def _logit(score: float) -> float:
    if score <= 0.0:
        return -math.inf
    return math.log(score / (1.0 - score)) if score < 1.0 - 1e-7 else 15.0
