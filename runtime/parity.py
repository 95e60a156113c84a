"""How far one run of a detector lies from another, in pixels of the source image and in scores.

Both sides are compared twice: query by query, as the graph gives them, and as the final detections that a user sees.
Where detections are suppressed, a near-equal rival may take a detection's place; see ``_lacking``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from carpus.runtime.detections import Detections
from carpus.runtime.errors import CarpusError
from carpus.runtime.postprocess import activate, cxcywh_to_xyxy, postprocess
from carpus.runtime.spec import ParityRecord, Postprocess
from carpus.runtime.thresholds import ParityLimits, parity_limits
from carpus.runtime.transform import ImageTransform

__all__ = ["Answer", "ImageErrors", "ParityError", "compare", "failure", "make_answer", "summarise"]

_DETECTION_FLOOR = 0.05  # least score of the detections that are compared
_ALTERNATIVES = 64  # nearest candidates looked at for a query that is not at its own index


class ParityError(CarpusError):
    """An exported model does not compute what the trained one did.

    Attributes:
        records: what was measured of every artefact, where all were run.
    """

    exit_code = 1

    def __init__(self, message: str, records: Sequence[ParityRecord] = ()) -> None:
        super().__init__(message)
        self.records = tuple(records)


@dataclass(frozen=True)
class Answer:
    """What one side said about one image.

    Attributes:
        scores: (Q, C) float64 in 0..1.
        xyxy: (Q, 4) float64, boxes in pixels of the source image, not clipped.
        detections: the final detections, down to a low score.
        image_size: (height, width) of the source image [px].
        iou_threshold: of the suppression, or None where nothing is suppressed.
        most: most detections an image.
    """

    scores: np.ndarray
    xyxy: np.ndarray
    detections: Detections
    image_size: tuple[int, int]
    iou_threshold: float | None = None
    most: int = 300


def make_answer(
    logits: np.ndarray, boxes: np.ndarray, transform: ImageTransform, spec: Postprocess, class_names: tuple[str, ...]
) -> Answer:
    """Bring a graph's outputs for one image into comparable form.

    Args:
        logits: (Q, C).
        boxes: (Q, 4) cxcywh in 0..1 of the model's input.
        transform: the map that preprocessing made for this image.
        spec: how this side reads its outputs.
        class_names: C names.

    Raises:
        BackendError: the outputs hold NaN or infinity.
    """
    detections = postprocess(logits, boxes, transform, spec, class_names, score_threshold=_DETECTION_FLOOR)
    height, width = transform.model_size
    xyxy = transform.to_source(cxcywh_to_xyxy(boxes.astype(np.float64)) * (width, height, width, height))
    iou = spec.iou_threshold if spec.kind == "nms" else None
    return Answer(activate(logits, spec), xyxy, detections, transform.source_size, iou, spec.top_k)


@dataclass(frozen=True)
class ImageErrors:
    """Differences found on one image.

    Attributes:
        image: its name and size, for messages.
        max_box_px: greatest difference of a box edge over the queries compared [px].
        box_query: the query it was found at, by its index in the reference.
        max_score: greatest difference of a score over the queries compared.
        score_query: the query it was found at.
        queries: queries compared.
        reordered: queries that stand at another index on the other side (near-equal scores sort either way).
        replaced: weak queries that are others on the other side, few enough to be left out (see ``ParityLimits``).
        detections: final detections compared.
        detections_differ: final detections without a counterpart on the other side.
        suppression_differs: detections of the graph that the runtime would not make of the graph's own scores and
            boxes; None for a graph that does not suppress.
    """

    image: str
    max_box_px: float
    box_query: int
    max_score: float
    score_query: int
    queries: int
    reordered: int
    replaced: int
    detections: int
    detections_differ: int
    suppression_differs: int | None = None


def compare(
    reference: Answer,
    candidate: Answer,
    limits: ParityLimits,
    image: str = "image",
    *,
    suppression_differs: int | None = None,
) -> ImageErrors:
    """Compare two answers about the same image.

    Queries are paired by index. Those that do not fit there within the limits are paired anew among themselves,
    because the encoder's selection orders near-equal scores by their last bits, and the decoder treats its queries
    alike in any order. Where detections are suppressed, queries are places in the image and stay where they are.

    Args:
        reference: what the trained module said.
        candidate: what the backend said.
        limits: how far apart two queries may lie to count as the same.
        image: name for messages.
        suppression_differs: see :class:`ImageErrors`.

    Raises:
        ParityError: the two sides have different numbers of queries or classes.
    """
    if reference.scores.shape != candidate.scores.shape:
        raise ParityError(
            f"{image}: the trained model gives (queries, classes) = {reference.scores.shape}, the backend "
            f"{candidate.scores.shape}; the artefact is of another model"
        )
    fixed = reference.iou_threshold is not None
    order = np.arange(len(reference.scores)) if fixed else _pair(reference, candidate, limits)
    box = np.abs(reference.xyxy - candidate.xyxy[order]).max(1)
    score = np.abs(reference.scores - candidate.scores[order]).max(1)
    best = np.maximum(reference.scores.max(1), candidate.scores[order].max(1))
    compared = best >= limits.score_floor
    compared[np.argsort(-best, kind="stable")[: limits.min_queries]] = True
    replaced = compared & ((box > limits.max_box_px) | (score > limits.max_score)) & (best < limits.weak_score)
    if fixed or replaced.sum() > limits.replaced_share * len(best):
        replaced[:] = False
    compared &= ~replaced
    box, score = np.where(compared, box, 0.0), np.where(compared, score, 0.0)
    floor = max(limits.score_floor, _DETECTION_FLOOR)
    differ = _lacking(reference, candidate, limits, floor) + _lacking(candidate, reference, limits, floor)
    height, width = reference.image_size
    return ImageErrors(
        image=f"{image} ({width}x{height})",
        max_box_px=float(box.max(initial=0.0)),
        box_query=int(box.argmax()),
        max_score=float(score.max(initial=0.0)),
        score_query=int(score.argmax()),
        queries=int(compared.sum()),
        reordered=int((compared & (order != np.arange(len(order)))).sum()),
        replaced=int(replaced.sum()),
        detections=int((reference.detections.score >= floor).sum()),
        detections_differ=differ,
        suppression_differs=suppression_differs,
    )


def summarise(
    errors: Sequence[ImageErrors],
    *,
    backend: str,
    backend_version: str,
    precision: Literal["fp32", "fp16", "int8"],
) -> ParityRecord:
    """The errors of all images as one record, with the verdict and the worst output in words.

    Raises:
        ParityError: no image was compared.
        BundleError: there are no limits for the precision.
    """
    if not errors:
        raise ParityError(f"{backend} {precision}: no image was compared, so parity is not known")
    limits = parity_limits(precision)
    metrics = {
        "max_box_px": max(item.max_box_px for item in errors),
        "max_score": max(item.max_score for item in errors),
        "detections_differ": float(sum(item.detections_differ for item in errors)),
        "queries": float(sum(item.queries for item in errors)),
        "reordered": float(sum(item.reordered for item in errors)),
        "replaced": float(sum(item.replaced for item in errors)),
        "detections": float(sum(item.detections for item in errors)),
    }
    thresholds = limits.as_mapping()
    if any(item.suppression_differs is not None for item in errors):
        metrics["suppression_differs"] = float(sum(item.suppression_differs or 0 for item in errors))
        thresholds["suppression_differs"] = 0.0
    passed = all(metrics[name] <= limit for name, limit in thresholds.items())
    return ParityRecord(
        backend=backend,
        backend_version=backend_version,
        precision=precision,
        images=len(errors),
        metrics=metrics,
        thresholds=thresholds,
        passed=passed,
        worst=_worst(errors, limits),
    )


def failure(record: ParityRecord) -> str:
    """One line that says what a failed record failed on."""
    return f"{record.backend} {record.backend_version}, {record.precision}: parity not met: {record.worst}"


def _worst(errors: Sequence[ImageErrors], limits: ParityLimits) -> str:
    box = max(errors, key=lambda item: item.max_box_px)
    score = max(errors, key=lambda item: item.max_score)
    differ = max(errors, key=lambda item: item.detections_differ)
    found = [
        (
            box.max_box_px / limits.max_box_px,
            f"pred_boxes differ by {box.max_box_px:.4g} px (limit {limits.max_box_px:g} px) at query {box.box_query} "
            f"of {box.image}",
        ),
        (
            score.max_score / limits.max_score,
            f"scores of pred_logits differ by {score.max_score:.4g} (limit {limits.max_score:g}) at query "
            f"{score.score_query} of {score.image}",
        ),
    ]
    if differ.detections_differ > limits.detections_differ:
        found.append(
            (
                1.0 + 1e-9,
                f"{differ.detections_differ} detections have no counterpart (limit {limits.detections_differ}) in "
                f"{differ.image}",
            )
        )
    wrong = max(errors, key=lambda item: item.suppression_differs or 0)
    if wrong.suppression_differs:
        found.append(
            (
                math.inf,
                f"suppression in the graph makes {wrong.suppression_differs} detections of its own scores and boxes "
                f"that the runtime's does not, in {wrong.image}",
            )
        )
    return max(found)[1]


def _pair(reference: Answer, candidate: Answer, limits: ParityLimits) -> np.ndarray:
    """(Q,) index of the candidate's query that belongs to each of the reference's."""
    order = np.arange(len(reference.scores))
    box = np.abs(reference.xyxy - candidate.xyxy).max(1) / limits.max_box_px
    score = np.abs(reference.scores - candidate.scores).max(1) / limits.max_score
    loose = np.flatnonzero(np.maximum(box, score) > 1.0)
    free = np.ones(len(loose), bool)
    rows = loose[np.argsort(-reference.scores[loose].max(1), kind="stable")].tolist()
    # Those that fit first: a query without a counterpart must not take another one's.
    for greatest in (1.0, np.inf):
        left = []
        for row in rows:
            distance = np.abs(candidate.xyxy[loose] - reference.xyxy[row]).max(1) / limits.max_box_px
            distance[~free] = np.inf
            near = np.argsort(distance, kind="stable")[:_ALTERNATIVES]
            difference = np.abs(candidate.scores[loose[near]] - reference.scores[row]).max(1) / limits.max_score
            cost = np.maximum(distance[near], difference)
            nearest = int(np.argmin(cost))
            if cost[nearest] > greatest:
                left.append(row)
                continue
            free[near[nearest]] = False
            order[row] = loose[near[nearest]]
        rows = left
    return order


def _lacking(mine: Answer, other: Answer, limits: ParityLimits, floor: float) -> int:
    """How many of one side's detections, less those too near the floor to tell, have no counterpart on the other.

    Of two overlapping boxes with near-equal scores either may be the one that suppression keeps. A detection is not
    lacking when the other side has one of its class that overlaps it enough to have suppressed it. That alone would
    let a graph pass that suppresses nothing; ``ImageErrors.suppression_differs`` is what such a graph fails on.
    """
    these, those = mine.detections, other.detections
    edge = floor + limits.max_score
    if len(those) >= other.most:  # more would have been found
        edge = max(edge, float(those.score[-1]) + limits.max_score)
    count = 0
    for box, score, class_id in zip(these.xyxy, these.score, these.class_id, strict=True):
        if score < edge:
            continue
        same = those.class_id == class_id
        if mine.iou_threshold is not None and (same & _may_suppress(box, those, mine.iou_threshold, limits)).any():
            continue
        same &= np.abs(those.score - score) <= limits.max_score
        same &= np.abs(those.xyxy - box).max(1, initial=0.0) <= limits.max_box_px
        count += not same.any()
    return count


def _may_suppress(box: np.ndarray, those: Detections, iou_threshold: float, limits: ParityLimits) -> np.ndarray:
    """(N,) bool: whether the IoU with a box exceeds the threshold when edges may move by the limit."""
    slack = np.float32(limits.max_box_px)
    low = np.maximum(box[:2], those.xyxy[:, :2]) - slack
    high = np.minimum(box[2:], those.xyxy[:, 2:]) + slack
    overlap = np.clip(high - low, 0, None).prod(1)
    union = (box[2:] - box[:2]).prod() + (those.xyxy[:, 2:] - those.xyxy[:, :2]).prod(1) - overlap
    return np.asarray(overlap > iou_threshold * union)
