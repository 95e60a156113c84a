"""Suppression in the runtime against the plain reference: ties, nothing at all, 30,000 boxes, one class and many."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpus.models.yolo.letterbox import yolo_postprocess, yolo_preprocess
from carpus.models.yolo.nms import non_maximum_suppression
from carpus.runtime.detections import Detections
from carpus.runtime.errors import BackendError, BundleError
from carpus.runtime.postprocess import postprocess, suppress_queries
from carpus.runtime.spec import Manifest, Postprocess
from carpus.runtime.suppression import suppress
from tests.tiny_detector import tiny_manifest

SIZE = (64, 96)
NAMES = tuple(f"class {index}" for index in range(80))


def make_outputs(
    rng: np.random.Generator, queries: int, classes: int, *, coarse: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Logits (Q, C) and boxes (Q, 4); coarse ones have many equal scores, boxes and overlaps."""
    logits = rng.normal(-1, 2, (queries, classes))
    boxes = np.concatenate([rng.uniform(-0.1, 1.1, (queries, 2)), rng.uniform(-0.02, 0.5, (queries, 2))], 1)
    if coarse:
        logits, boxes = np.round(logits), np.round(boxes * 8) / 8
    return logits.astype(np.float32), boxes.astype(np.float32)


def reference(
    logits: np.ndarray, boxes: np.ndarray, spec: Postprocess, score: float, iou: float, *, precise: bool = True
) -> np.ndarray:
    """(n, 6) rows of the plain reference, which keeps classes apart by an offset: in float64, where that is exact."""
    scores = (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
    scaled = boxes * np.array([SIZE[1], SIZE[0], SIZE[1], SIZE[0]], np.float32)
    half = np.maximum(scaled[:, 2:], 0) * np.float32(0.5)
    xyxy = np.concatenate([scaled[:, :2] - half, scaled[:, :2] + half], 1)
    return non_maximum_suppression(
        xyxy.astype(np.float64) if precise else xyxy,
        scores,
        score_threshold=score,
        iou_threshold=iou,
        max_detections=spec.top_k,
        max_candidates=spec.max_candidates,
        multi_label=spec.multi_label,
    )


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**31 - 1),
    st.integers(0, 300),
    st.sampled_from([1, 2, 7]),
    st.sampled_from([0.0, 0.001, 0.25, 0.5, 1.0]),
    st.sampled_from([0.0, 0.25, 0.45, 0.5, 0.7, 1.0]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 20, 300]),
    st.sampled_from([5, 30000]),
)
def test_against_the_reference(
    seed: int,
    queries: int,
    classes: int,
    score: float,
    iou: float,
    multi_label: bool,
    coarse: bool,
    top_k: int,
    candidates: int,
) -> None:
    logits, boxes = make_outputs(np.random.default_rng(seed), queries, classes, coarse=coarse)
    spec = Postprocess(kind="nms", multi_label=multi_label, top_k=top_k, max_candidates=candidates)
    query, class_id, found = suppress_queries(logits, boxes, SIZE, spec, score, iou)
    expected = reference(logits, boxes, spec, score, iou, precise=not coarse)
    np.testing.assert_array_equal(class_id, expected[:, 5].astype(int))
    np.testing.assert_array_equal(found, expected[:, 4])
    half = np.maximum(boxes[query, 2:], 0) / 2
    xyxy = np.concatenate([boxes[query, :2] - half, boxes[query, :2] + half], 1) * (SIZE[1], SIZE[0], SIZE[1], SIZE[0])
    np.testing.assert_allclose(xyxy, expected[:, :4], atol=1e-4)


@pytest.mark.parametrize(("classes", "multi_label"), [(1, False), (80, False), (5, True)])
def test_thirty_thousand_boxes(classes: int, multi_label: bool) -> None:
    rng = np.random.default_rng(classes)
    logits = rng.normal(0, 2, (30000, classes)).astype(np.float32)
    boxes = np.concatenate([rng.random((30000, 2)), rng.uniform(0.02, 0.3, (30000, 2))], 1).astype(np.float32)
    spec = Postprocess(kind="nms", multi_label=multi_label)
    _, class_id, found = suppress_queries(logits, boxes, SIZE, spec, 0.001, 0.5)
    expected = reference(logits, boxes, spec, 0.001, 0.5)
    assert len(found) == 300
    np.testing.assert_array_equal(found, expected[:, 4])
    np.testing.assert_array_equal(class_id, expected[:, 5].astype(int))


def test_equal_boxes_and_scores_keep_the_first_of_each_class() -> None:
    logits = np.full((500, 3), 1.0, np.float32)
    boxes = np.tile(np.array([0.5, 0.5, 0.25, 0.25], np.float32), (500, 1))
    spec = Postprocess(kind="nms", multi_label=True)
    query, class_id, _ = suppress_queries(logits, boxes, SIZE, spec, 0.25, 0.7)
    assert query.tolist() == [0, 0, 0]
    assert class_id.tolist() == [0, 1, 2]
    query, class_id, _ = suppress_queries(logits, boxes, SIZE, Postprocess(kind="nms"), 0.25, 0.7)
    assert (query.tolist(), class_id.tolist()) == ([0], [0])
    # An IoU that equals the threshold is not above it, and an IoU of 1 never is above 1.
    assert len(suppress(np.tile(np.array([[0.0, 0.0, 4.0, 4.0]], np.float32), (9, 1)), np.zeros(9, int), 1.0)) == 9


def test_small_boxes_of_a_late_class_are_not_rounded() -> None:
    """At class 79 the offset form works in steps of 1/16 px: two boxes 0.04 px apart become the same there."""
    xyxy = np.array([[10, 10, 10.1, 10.1], [10.04, 10, 10.14, 10.1]], np.float32)
    assert len(suppress(xyxy, np.array([79, 79]), 0.5)) == 2
    scores = np.zeros((2, 80), np.float32)
    scores[:, 79] = 0.9, 0.8
    exact = non_maximum_suppression(xyxy.astype(np.float64), scores, iou_threshold=0.5)
    assert len(exact) == 2


def detect(
    logits: np.ndarray,
    boxes: np.ndarray,
    *,
    score_threshold: float | None = None,
    iou_threshold: float | None = None,
    classes: np.ndarray | None = None,
) -> Detections:
    """The whole postprocessing with the published settings, for an image of 480 x 640."""
    return postprocess(
        logits,
        boxes,
        yolo_preprocess(SIZE).transform((480, 640)),
        yolo_postprocess(),
        NAMES[: logits.shape[1]],
        score_threshold=score_threshold,
        iou_threshold=iou_threshold,
        classes=classes,
    )


def test_thresholds_and_classes_of_one_call() -> None:
    rng = np.random.default_rng(5)
    logits, boxes = make_outputs(rng, 250, 4, coarse=True)
    usual = detect(logits, boxes)
    assert 0 < len(usual) < 300
    assert usual.score.min() > 0.25
    assert len(detect(logits, boxes, score_threshold=0.9)) < len(usual)
    assert len(detect(logits, boxes, iou_threshold=0.1)) < len(usual) < len(detect(logits, boxes, iou_threshold=1.0))
    some = detect(logits, boxes, classes=np.array([1, 3]))
    assert set(some.class_id.tolist()) == {1, 3}
    assert (usual.xyxy[:, 2:] >= usual.xyxy[:, :2]).all()
    assert len(detect(logits, boxes, classes=np.zeros(0, np.int64))) == 0
    assert len(detect(np.full((10, 4), -30, np.float32), boxes[:10])) == 0
    assert len(detect(np.zeros((0, 4), np.float32), boxes[:0])) == 0
    logits[3, 2] = np.nan
    with pytest.raises(BackendError, match="NaN"):
        detect(logits, boxes)


def test_published_settings() -> None:
    assert yolo_postprocess() == Postprocess(kind="nms", score_threshold=0.25, iou_threshold=0.7)
    evaluation = yolo_postprocess(evaluation=True)
    assert (evaluation.score_threshold, evaluation.iou_threshold, evaluation.multi_label) == (0.001, 0.7, True)
    assert (evaluation.top_k, evaluation.max_candidates) == (300, 30000)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("kind", "soft", "'top_k', 'nms'"),
        ("iou_threshold", 1.5, "iou_threshold: expected 0..1"),
        ("max_candidates", 0, "max_candidates: expected at least 1"),
        ("multi_label", 1, "true or false"),
    ],
)
def test_wrong_fields(name: str, value: object, problem: str) -> None:
    with pytest.raises(BundleError, match=problem):
        Postprocess(**{name: value})  # type: ignore[arg-type]


def test_manifests_from_before_suppression_still_load() -> None:
    data = json.loads(tiny_manifest().dumps())
    for name in ("kind", "iou_threshold", "multi_label", "max_candidates"):
        del data["postprocess"][name]
    assert Manifest.from_json(data).postprocess == Postprocess()
