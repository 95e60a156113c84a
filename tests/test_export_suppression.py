"""Suppression inside graphs: the same detections as the plain reference's, in the same order, on both runtimes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
from onnx import TensorProto, helper

from carpus.export.suppression import with_suppression
from carpus.models.yolo.nms import non_maximum_suppression
from carpus.runtime.errors import BackendError
from carpus.runtime.postprocess import suppress_queries
from carpus.runtime.spec import Postprocess

SIZE = (320, 640)
OUTPUTS = ("num_detections", "detection_boxes", "detection_scores", "detection_classes", "pred_scores", "pred_boxes")


def make_spec(*, multi_label: bool = False, max_candidates: int = 30000, top_k: int = 300) -> Postprocess:
    return Postprocess(
        kind="nms",
        in_graph=True,
        logits="pred_scores",
        activation="none",
        multi_label=multi_label,
        max_candidates=max_candidates,
        top_k=top_k,
    )


def passing_graph(positions: int | str, classes: int) -> onnx.ModelProto:
    """A "detector" that gives what it is given."""
    sizes = {"logits": ["N", positions, classes], "boxes": ["N", positions, 4]}
    graph = helper.make_graph(
        [helper.make_node("Identity", [name], [f"pred_{name}"]) for name in sizes],
        "detector",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in sizes.items()],
        [helper.make_tensor_value_info(f"pred_{name}", TensorProto.FLOAT, shape) for name, shape in sizes.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@functools.cache
def runners(positions: int, classes: int, spec: Postprocess) -> dict[str, Any]:
    """The graph on each runtime, by its name."""
    model = with_suppression(passing_graph(positions, classes), SIZE, spec).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    core = openvino.Core()
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(core.read_model(model), "CPU", options)
    return {
        "onnxruntime": lambda feed: dict(zip(OUTPUTS, session.run(list(OUTPUTS), feed), strict=True)),
        "openvino": lambda feed: {name: compiled(feed)[name] for name in OUTPUTS},
    }


def check(logits: np.ndarray, boxes: np.ndarray, spec: Postprocess, score: float, iou: float) -> list[int]:
    """Hold both runtimes to the reference from their own scores; the counts of detections.

    Args:
        logits: (N, A, C).
        boxes: (N, A, 4).
        spec: how to suppress.
        score: score threshold.
        iou: IoU threshold.
    """
    feed = {
        "logits": logits,
        "boxes": boxes,
        "score_threshold": np.array([score], np.float32),
        "iou_threshold": np.array([iou], np.float32),
    }
    counts: list[int] = []
    for name, run in runners(*logits.shape[1:], spec).items():
        found = run(feed)
        counts = [int(count) for count in found["num_detections"]]
        for index, count in enumerate(counts):
            scores = found["pred_scores"][index]
            query, class_id, expected = suppress_queries(scores, boxes[index], SIZE, spec, score, iou)
            where = f"{name}, image {index}"
            assert count == len(query), where
            np.testing.assert_array_equal(found["detection_scores"][index, :count], expected, where)
            np.testing.assert_array_equal(found["detection_classes"][index, :count], class_id, where)
            xyxy = corners(boxes[index])
            np.testing.assert_allclose(found["detection_boxes"][index, :count], xyxy[query], atol=1e-3, err_msg=where)
            assert (found["detection_classes"][index, count:] == -1).all()
            assert not found["detection_boxes"][index, count:].any()
            assert not found["detection_scores"][index, count:].any()
            rows = non_maximum_suppression(
                xyxy.astype(np.float64) if scores.shape[1] > 1 else xyxy,
                scores,
                score_threshold=float(np.float32(score)),
                iou_threshold=iou,
                max_detections=spec.top_k,
                max_candidates=spec.max_candidates,
                multi_label=spec.multi_label,
            )
            np.testing.assert_array_equal(rows[:, 4], expected, where)
            np.testing.assert_array_equal(rows[:, 5], class_id, where)
    return counts


def corners(boxes: np.ndarray) -> np.ndarray:
    """(A, 4) xyxy [px] in the arithmetic of the graph."""
    scaled = boxes * np.array([SIZE[1], SIZE[0], SIZE[1], SIZE[0]], np.float32)
    half = np.maximum(scaled[:, 2:], 0) * np.float32(0.5)
    return np.concatenate([scaled[:, :2] - half, scaled[:, :2] + half], 1)


def draw(images: int, positions: int, classes: int, *, coarse: bool = False) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(positions + classes)
    logits = rng.normal(-1, 2, (images, positions, classes)).astype(np.float32)
    extent = rng.uniform(0.02, 0.3, (images, positions, 2))
    boxes = np.concatenate([rng.random((images, positions, 2)), extent], 2).astype(np.float32)
    return (np.round(logits), np.round(boxes * 16) / 16) if coarse else (logits, boxes)


@pytest.mark.parametrize(("score", "iou"), [(0.25, 0.7), (0.001, 0.45), (0.6, 0.2), (0.25, 1.0), (0.25, 0.0)])
@pytest.mark.parametrize(("classes", "multi_label"), [(1, False), (6, False), (6, True)])
def test_thresholds_are_inputs(classes: int, multi_label: bool, score: float, iou: float) -> None:
    logits, boxes = draw(2, 500, classes)
    assert min(check(logits, boxes, make_spec(multi_label=multi_label), score, iou)) > 0


# IoU of boxes on a grid are ratios of small integers, so that many equal these thresholds; all are exact in float32
# or lie as far from a ratio as that.
@pytest.mark.parametrize("iou", [0.25, 0.5, 0.375])
@pytest.mark.parametrize(("classes", "multi_label"), [(1, False), (5, False), (5, True)])
def test_ties_of_scores_boxes_and_overlaps(classes: int, multi_label: bool, iou: float) -> None:
    logits, boxes = draw(3, 700, classes, coarse=True)
    spec = make_spec(multi_label=multi_label)
    check(logits, boxes, spec, 0.25, iou)
    check(logits, boxes, spec, 0.5, iou)  # equal to many a score


def test_everything_equal() -> None:
    boxes = np.tile(np.array([0.5, 0.5, 0.25, 0.25], np.float32), (2, 400, 1))
    logits = np.zeros((2, 400, 3), np.float32)
    assert check(logits, boxes, make_spec(), 0.25, 0.7) == [1, 1]
    assert check(logits, boxes, make_spec(multi_label=True), 0.25, 0.7) == [3, 3]
    assert check(logits, boxes, make_spec(), 0.25, 1.0) == [300, 300]
    assert check(logits, boxes, make_spec(), 0.5, 0.7) == [0, 0]  # greater than, not at least
    spread = np.stack([np.linspace(0, 1, 400), np.full(400, 0.5), np.full(400, 0.001), np.full(400, 0.1)], 1)
    assert check(logits[:1], spread[None].astype(np.float32), make_spec(), 0.25, 0.7) == [300]


def test_nothing_found_in_some_or_all_images() -> None:
    logits, boxes = draw(3, 500, 6)
    logits[1] = -50
    counts = check(logits, boxes, make_spec(), 0.25, 0.7)
    assert counts[1] == 0 < min(counts[0], counts[2])
    assert check(np.full_like(logits, -50), boxes, make_spec(), 0.25, 0.7) == [0, 0, 0]
    assert check(logits, boxes, make_spec(), 1.0, 0.7) == [0, 0, 0]


def test_boxes_without_area_overlap_nothing() -> None:
    logits, boxes = draw(1, 500, 1)
    boxes[:, ::2, 2] = 0.0
    boxes[:, 1::4, 3] = -0.1
    check(logits, boxes, make_spec(), 0.25, 0.0)


@pytest.mark.parametrize(("classes", "coarse"), [(1, False), (1, True), (20, False)])
def test_thirty_thousand_boxes(classes: int, coarse: bool) -> None:
    logits, boxes = draw(1, 30000, classes, coarse=coarse)
    assert check(logits, boxes, make_spec(), 0.001, 0.5) == [300]


@pytest.mark.parametrize(("classes", "multi_label", "coarse"), [(1, False, True), (4, True, True), (4, True, False)])
def test_only_the_best_candidates_enter(classes: int, multi_label: bool, coarse: bool) -> None:
    logits, boxes = draw(2, 900, classes, coarse=coarse)
    spec = make_spec(multi_label=multi_label, max_candidates=150, top_k=40)
    check(logits, boxes, spec, 0.01, 0.25)


def test_standard_operators_only_and_names() -> None:
    model = with_suppression(passing_graph(84, 3), SIZE, make_spec())
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions
    assert [value.name for value in model.graph.input] == ["logits", "boxes", "score_threshold", "iou_threshold"]
    assert tuple(value.name for value in model.graph.output) == OUTPUTS
    assert sum(node.op_type == "NonMaxSuppression" for node in model.graph.node) == 1


def test_graphs_that_are_no_detectors() -> None:
    with pytest.raises(BackendError, match="axis 1 of 'pred_logits' is open"):
        with_suppression(passing_graph("A", 3), SIZE, make_spec())
    model = passing_graph(84, 3)
    del model.graph.output[1]
    with pytest.raises(BackendError, match=r"it has \['pred_logits'\]"):
        with_suppression(model, SIZE, make_spec())
