"""The comparison of two answers: what counts as the same, and what a verdict names."""

from __future__ import annotations

import numpy as np
import pytest

from carpus.runtime.errors import BackendError, BundleError
from carpus.runtime.parity import Answer, ParityError, compare, failure, make_answer, summarise
from carpus.runtime.spec import Postprocess, Preprocess
from carpus.runtime.thresholds import PARITY, parity_limits

NAMES = ("a", "b", "c")
SPEC = Postprocess()
QUERIES = 100


def outputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits (Q, C) from sure to weak, boxes (Q, 4) cxcywh."""
    rng = np.random.default_rng(seed)
    logits = np.linspace(3.0, -9.0, QUERIES)[:, None] + rng.normal(0, 0.3, (QUERIES, 3))
    boxes = np.concatenate((rng.uniform(0.2, 0.8, (QUERIES, 2)), rng.uniform(0.1, 0.3, (QUERIES, 2))), 1)
    return logits.astype(np.float32), boxes.astype(np.float32)


def answer(logits: np.ndarray, boxes: np.ndarray, size: tuple[int, int] = (480, 640)) -> Answer:
    return make_answer(logits, boxes, Preprocess((320, 320)).transform(size), SPEC, NAMES)


def test_same_answers_differ_by_nothing() -> None:
    found = compare(answer(*outputs()), answer(*outputs()), PARITY["fp32"], "cup.jpg")
    assert (found.max_box_px, found.max_score, found.detections_differ, found.reordered) == (0.0, 0.0, 0, 0)
    assert found.image == "cup.jpg (640x480)"
    assert found.queries == QUERIES
    assert found.detections > 10


def test_box_error_is_in_source_pixels() -> None:
    logits, boxes = outputs()
    moved = boxes.copy()
    moved[7, 0] += 0.01
    found = compare(answer(logits, boxes), answer(logits, moved), PARITY["fp32"])
    assert found.max_box_px == pytest.approx(6.4, abs=1e-3)
    assert found.box_query == 7
    assert found.detections_differ == 2 * int((1 / (1 + np.exp(-logits[7])) > 0.0501).sum())


def test_score_error_names_query() -> None:
    logits, boxes = outputs()
    changed = logits.copy()
    changed[4, 1] += 0.5
    found = compare(answer(logits, boxes), answer(changed, boxes), PARITY["fp32"])
    assert found.score_query == 4
    assert found.max_score > 0.01
    assert found.max_box_px == 0.0


def test_other_order_is_the_same_answer() -> None:
    logits, boxes = outputs()
    order = np.random.default_rng(3).permutation(QUERIES)
    found = compare(answer(logits, boxes), answer(logits[order], boxes[order]), PARITY["fp32"])
    assert (found.max_box_px, found.max_score, found.detections_differ) == (0.0, 0.0, 0)
    assert found.reordered == int((order != np.arange(QUERIES)).sum())


@pytest.mark.parametrize(("query", "count", "tolerated"), [(99, 1, True), (98, 2, True), (96, 4, False), (0, 1, False)])
def test_only_a_few_weak_queries_may_be_others(query: int, count: int, tolerated: bool) -> None:
    logits, boxes = outputs()
    other = boxes.copy()
    other[query : query + count, :2] = 0.95
    found = compare(answer(logits, boxes), answer(logits, other), PARITY["fp32"])
    assert (found.max_box_px <= PARITY["fp32"].max_box_px) is tolerated
    assert found.replaced == (count if tolerated else 0)


def test_half_precision_looks_at_sure_queries_only() -> None:
    logits, boxes = outputs()
    other = boxes.copy()
    other[60:] = 0.5
    found = compare(answer(logits, boxes), answer(logits, other), PARITY["fp16"])
    assert found.max_box_px == 0.0
    assert 0 < found.queries < 60


def test_half_precision_sees_a_spurious_detection() -> None:
    logits, boxes = outputs()
    spurious = logits.copy()
    spurious[95] = 2.0
    found = compare(answer(logits, boxes), answer(spurious, boxes), PARITY["fp16"])
    assert found.max_score > 0.5
    assert found.detections_differ == 3


def test_unsure_model_is_compared_all_the_same() -> None:
    logits, boxes = outputs()
    found = compare(answer(logits - 9, boxes), answer(logits - 9, boxes + 0.1), PARITY["fp16"])
    assert found.queries >= 1
    assert found.max_box_px > PARITY["fp16"].max_box_px


def test_other_model_is_refused() -> None:
    logits, boxes = outputs()
    with pytest.raises(ParityError, match=r"cup: the trained model gives \(queries, classes\) = \(100, 3\)"):
        compare(answer(logits, boxes), answer(logits[:50], boxes[:50]), PARITY["fp32"], "cup")


def test_nan_is_no_answer() -> None:
    logits, boxes = outputs()
    logits[3, 1] = np.nan
    with pytest.raises(BackendError, match="'pred_logits': 1 of 300 values are NaN"):
        answer(logits, boxes)


def test_summary_names_the_worst_output() -> None:
    logits, boxes = outputs()
    shifted = boxes + np.float32(0.001)
    good = compare(answer(logits, boxes), answer(logits, boxes), PARITY["fp32"], "fine.png")
    bad = compare(answer(logits, boxes), answer(logits, shifted), PARITY["fp32"], "bad.png")
    record = summarise([good, bad], backend="onnxruntime", backend_version="1.2", precision="fp32")
    assert not record.passed
    assert record.images == 2
    assert record.metrics["max_box_px"] == pytest.approx(0.96, abs=0.01)
    assert record.thresholds == PARITY["fp32"].as_mapping()
    text = failure(record)
    assert text.startswith(
        "onnxruntime 1.2, fp32: parity not met: pred_boxes differ by 0.96 px (limit 0.05 px) at query "
    )
    assert text.endswith("of bad.png (640x480)")


def test_nothing_compared_is_no_pass() -> None:
    with pytest.raises(ParityError, match="no image was compared"):
        summarise([], backend="openvino", backend_version="1", precision="fp32")


def test_limits() -> None:
    assert PARITY["fp32"].max_box_px == 0.05
    assert PARITY["fp32"].max_score == 1e-4
    assert parity_limits("fp16") is PARITY["fp16"]
    with pytest.raises(BundleError, match="no parity limits for precision 'int4'; there are limits for fp32, fp16"):
        parity_limits("int4")
