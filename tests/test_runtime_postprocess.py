"""Outputs to detections: the official postprocessor's answers, and a slow one written out in full."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpus.runtime.detections import Detections
from carpus.runtime.errors import BackendError, DataError
from carpus.runtime.postprocess import postprocess, select_top
from carpus.runtime.spec import Postprocess, Preprocess

NAMES = tuple(f"class {index}" for index in range(80))
GOLDENS = Path(os.environ.get("CARPUS_GOLDENS") or Path(__file__).parent / "data" / "goldens")


def test_deploy_case_of_the_official_implementation() -> None:
    path = GOLDENS / "deimv2" / "atto" / "deploy.npz"
    if not path.exists():
        pytest.skip(f"no {path}")
    stored = np.load(path)
    width, height = (int(value) for value in stored["orig_target_sizes"][0])
    found = postprocess(
        stored["deploy_pred_logits"][0],
        stored["deploy_pred_boxes"][0],
        Preprocess((320, 320)).transform((height, width)),
        Postprocess(top_k=300),
        NAMES,
        score_threshold=0.0,
    )
    assert len(found) == 300
    np.testing.assert_allclose(found.score, stored["scores"][0], atol=1e-6)
    np.testing.assert_array_equal(np.sort(found.class_id), np.sort(stored["labels"][0]))
    expected = np.clip(stored["boxes"][0], 0, (width, height, width, height))
    # Scores may swap where they are as good as equal, so rows are matched by class and box.
    order = np.lexsort((*expected.T, stored["labels"][0]))
    mine = np.lexsort((*found.xyxy.T, found.class_id))
    np.testing.assert_allclose(found.xyxy[mine], expected[order], atol=2e-3)


def slow_postprocess(logits: np.ndarray, boxes: np.ndarray, size: tuple[int, int], top_k: int, least: float) -> list:
    """The same by loops: every pair, sorted, cut, thresholded."""
    pairs = [(-float(value), q, c) for (q, c), value in np.ndenumerate(logits)]
    rows = []
    for negative, q, c in sorted(pairs)[:top_k]:
        score = np.float32(1 / (1 + np.exp(negative)))
        if score >= np.float32(least):
            x, y, w, h = boxes[q].astype(np.float64)
            box = np.array([x - w / 2, y - h / 2, x + w / 2, y + h / 2]) * (size[1], size[0], size[1], size[0])
            rows.append((np.clip(box, 0, (size[1], size[0]) * 2), score, c))
    return rows


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31 - 1),
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.001, 0.3, 0.5, 0.9, 1.0]),
    st.booleans(),
)
def test_against_the_slow_one(seed: int, queries: int, classes: int, top_k: int, least: float, coarse: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (queries, classes)).astype(np.float32)
    if coarse:  # many ties
        logits = np.round(logits)
    boxes = rng.random((queries, 4), dtype=np.float32)
    transform = Preprocess((64, 64)).transform((37, 211))
    names = NAMES[:classes]
    found = postprocess(logits, boxes, transform, Postprocess(top_k=top_k), names, score_threshold=least)
    expected = slow_postprocess(logits, boxes, (37, 211), top_k, least)
    assert len(found) == len(expected)
    for (box, score, class_id, _), (slow_box, slow_score, slow_class) in zip(found, expected, strict=True):
        assert (class_id, score) == (slow_class, pytest.approx(slow_score, abs=1e-7))
        np.testing.assert_allclose(box, slow_box, atol=1e-4)


def test_threshold_is_inclusive_and_exact() -> None:
    logits = np.array([[0.0], [np.nextafter(np.float32(0), np.float32(-1))], [-0.01]], np.float32)
    boxes = np.full((3, 4), 0.5, np.float32)
    transform = Preprocess((8, 8)).transform((8, 8))
    found = postprocess(logits, boxes, transform, Postprocess(), ("a",), score_threshold=0.5)
    assert len(found) == 2
    assert len(postprocess(logits, boxes, transform, Postprocess(), ("a",), score_threshold=1.0)) == 0
    sure = np.full((3, 1), 40.0, np.float32)
    assert len(postprocess(sure, boxes, transform, Postprocess(), ("a",), score_threshold=1.0)) == 3
    never = np.full((3, 1), -200.0, np.float32)
    assert (postprocess(never, boxes, transform, Postprocess(), ("a",), score_threshold=0.0).score == 0).all()


def test_chosen_classes_take_part_alone() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (20, 5)).astype(np.float32)
    boxes = rng.random((20, 4), dtype=np.float32)
    transform = Preprocess((8, 8)).transform((100, 100))
    names = NAMES[:5]
    chosen = np.array([1, 4])
    some = postprocess(logits, boxes, transform, Postprocess(top_k=1000), names, score_threshold=0.1, classes=chosen)
    every = postprocess(logits, boxes, transform, Postprocess(top_k=1000), names, score_threshold=0.1)
    expected = every.filter(classes=[1, 4])
    np.testing.assert_array_equal(some.class_id, expected.class_id)
    np.testing.assert_array_equal(some.xyxy, expected.xyxy)
    few = postprocess(logits, boxes, transform, Postprocess(top_k=3), names, score_threshold=0.0, classes=chosen)
    np.testing.assert_array_equal(few.score, every.filter(classes=[1, 4]).score[:3])
    none = postprocess(logits, boxes, transform, Postprocess(), names, classes=np.zeros(0, np.int64))
    assert len(none) == 0


def test_letterboxed_boxes_come_back_without_the_border() -> None:
    transform = Preprocess((320, 320), resize="letterbox").transform((480, 640))
    boxes = np.array([[0.5, 0.5, 1.0, 0.75], [0.5, 0.5, 1.0, 1.0]], np.float32)
    found = postprocess(np.array([[2.0], [1.0]], np.float32), boxes, transform, Postprocess(), ("a",))
    np.testing.assert_allclose(found.xyxy, [[0, 0, 640, 480]] * 2, atol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["pred_logits", "pred_boxes"])
def test_numbers_that_are_none_never_reach_the_robot(bad: float, name: str) -> None:
    outputs = {"pred_logits": np.zeros((4, 3), np.float32), "pred_boxes": np.full((4, 4), 0.5, np.float32)}
    outputs[name][2, 1] = bad
    transform = Preprocess((8, 8)).transform((8, 8))
    with pytest.raises(BackendError, match=rf"output '{name}': 1 of \d+ values are NaN or infinite"):
        postprocess(outputs["pred_logits"], outputs["pred_boxes"], transform, Postprocess(), NAMES[:3])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-5, 5), max_size=60), st.integers(1, 20), st.integers(-6, 6))
def test_select_top_is_a_stable_sort(values: list[int], count: int, least: int) -> None:
    array = np.array(values, np.float32)
    expected = sorted((index for index, value in enumerate(values) if value >= least), key=lambda i: (-values[i], i))
    assert select_top(array, count, float(least)).tolist() == expected[:count]


def detections() -> Detections:
    boxes = np.array([[0, 0, 4, 4], [1, 1, 2, 3], [2, 2, 3, 3]])
    return Detections(boxes, np.array([0.5, 0.9, 0.7]), np.array([0, 2, 1]), ("a", "b", "c"), (10, 20))


def test_detections_are_sorted_typed_and_frozen() -> None:
    found = detections()
    assert (found.xyxy.dtype, found.score.dtype, found.class_id.dtype) == (np.float32, np.float32, np.int64)
    assert found.score.tolist() == pytest.approx([0.9, 0.7, 0.5])
    assert found.names == ("c", "b", "a")
    np.testing.assert_array_equal(found.xywh[0], [1, 1, 1, 2])
    with pytest.raises(ValueError, match="read-only"):
        found.xyxy[0] = 0
    box, score, class_id, name = next(iter(found))
    assert (box.tolist(), round(score, 3), class_id, name) == ([1, 1, 2, 3], 0.9, 2, "c")


def test_detections_filter() -> None:
    found = detections()
    assert len(found.filter(score=0.7)) == 2
    assert found.filter(classes=["a", 1]).names == ("b", "a")
    assert len(found.filter(score=1.0, classes=[])) == 0
    assert len(Detections.empty(("a",), (3, 4)).filter(score=0.1)) == 0
    for wrong, message in (
        (["d"], "no class 'd'; it has a, b, c"),
        ([3], r"ids 0\.\.2, got 3"),
        ("a", r"write \['a'\]"),
    ):
        with pytest.raises(DataError, match=message):
            found.filter(classes=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("xyxy", "score", "class_id", "message"),
    [
        (np.zeros((2, 5)), np.zeros(2), np.zeros(2), r"xyxy: expected shape \(N, 4\)"),
        (np.zeros((2, 4)), np.zeros(3), np.zeros(2), r"score: expected shape \(2,\)"),
        (np.zeros((2, 4)), np.zeros(2), np.zeros((2, 1)), r"class_id: expected shape \(2,\)"),
        (np.full((1, 4), np.nan), np.zeros(1), np.zeros(1), "finite boxes and scores"),
        (np.zeros((1, 4)), np.zeros(1), np.array([7]), r"class_id: expected 0\.\.2, got 7"),
        (np.zeros((1, 4)), np.zeros(1), np.array([-1]), r"class_id: expected 0\.\.2, got -1"),
    ],
)
def test_wrong_detections_are_refused(xyxy: np.ndarray, score: np.ndarray, class_id: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Detections(xyxy, score, class_id, ("a", "b", "c"), (10, 20))
