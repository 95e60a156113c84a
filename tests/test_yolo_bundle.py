"""Bundles that suppress their detections: from the network over the gate to detections, with thresholds as inputs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from carpus.cli.main import main
from carpus.export import pipeline
from carpus.export.images import procedural_images
from carpus.export.pipeline import export_bundle
from carpus.models.predict import ModelDetector
from carpus.models.yolo.letterbox import yolo_postprocess, yolo_preprocess
from carpus.runtime.bundle import Bundle
from carpus.runtime.detections import Detections
from carpus.runtime.detector import Detector
from carpus.runtime.errors import BackendError, BundleError, DataError
from carpus.runtime.parity import ParityError
from carpus.runtime.spec import DETECTION_OUTPUTS, THRESHOLD_INPUTS, Manifest, Preprocess
from carpus.runtime.verify import verify_bundle
from tests.tiny_detector import tiny_manifest
from tests.tiny_yolo import CLASSES, SIZE, TinyYOLO, tiny_bundle, tiny_family, tiny_network, tiny_source

PICTURES = [picture.pixels for picture in procedural_images(3, seed=11)]
BACKENDS = ("onnxruntime", "openvino")


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export knows the tiny family."""
    own, others = tiny_family(), pipeline.get_family
    monkeypatch.setattr(pipeline, "get_family", lambda name: own if name == own.name else others(name))


def expected(score: float, iou: float) -> list[Detections]:
    """What training evaluation makes of the network."""
    spec = replace(yolo_postprocess(), score_threshold=score, iou_threshold=iou)
    names = [info.name for info in CLASSES]
    return ModelDetector(TinyYOLO().eval(), names, yolo_preprocess(SIZE), spec)(PICTURES)


def agree(found: Detections, wanted: Detections) -> bool:
    return (
        len(found) == len(wanted)
        and np.array_equal(found.class_id, wanted.class_id)
        and np.allclose(found.score, wanted.score, atol=1e-4)
        and np.allclose(found.xyxy, wanted.xyxy, atol=0.05)
    )


def test_manifest_and_parity_of_a_bundle_that_suppresses() -> None:
    with Bundle.open(tiny_bundle()) as bundle:
        manifest = bundle.manifest
    assert [spec.name for spec in manifest.inputs] == ["images", *THRESHOLD_INPUTS]
    assert [spec.name for spec in manifest.outputs] == [*DETECTION_OUTPUTS, "pred_scores", "pred_boxes"]
    assert manifest.postprocess == tiny_family().postprocess
    assert manifest.preprocess == yolo_preprocess(SIZE)
    for record in manifest.parity:
        assert record.passed
        assert record.metrics["detections"] > 20
        assert record.metrics["suppression_differs"] == record.thresholds["suppression_differs"] == 0
    assert verify_bundle(tiny_bundle()).passed
    assert Manifest.loads(manifest.dumps()) == manifest


@pytest.mark.parametrize("backend", BACKENDS)
def test_thresholds_of_the_moment_need_no_new_export(backend: str) -> None:
    with Detector.open(tiny_bundle(), backend, precision="fp32" if backend == "openvino" else None) as detector:
        assert (detector.score_threshold, detector.iou_threshold, detector.suppresses) == (0.25, 0.7, True)
        counts = []
        for score, iou in ((0.25, 0.7), (0.4, 0.7), (0.4, 0.2), (0.05, 1.0), (1.0, 0.5)):
            detector.score_threshold, detector.iou_threshold = score, iou
            alone = [detector(picture) for picture in PICTURES]
            together = detector.detect_batch(PICTURES)
            wanted = expected(score, iou)
            for one, among, right in zip(alone, together, wanted, strict=True):
                assert agree(one, right)
                assert agree(among, right)
            counts.append(sum(map(len, alone)))
        assert counts[0] > counts[1] > counts[2] > counts[4] == 0 < counts[3]


def test_evaluation_takes_every_class_of_a_position() -> None:
    names = [info.name for info in CLASSES]
    wanted = ModelDetector(TinyYOLO().eval(), names, yolo_preprocess(SIZE), yolo_postprocess(evaluation=True))(PICTURES)
    with Detector.open(tiny_bundle(), "onnxruntime", score_threshold=0.001, evaluation=True) as detector:
        found = detector.detect_batch(PICTURES)
    assert all(agree(one, right) for one, right in zip(found, wanted, strict=True))
    assert sum(map(len, found)) > sum(map(len, expected(0.001, 0.7)))


def test_a_choice_of_classes_leaves_the_others_out_of_everything() -> None:
    spec = yolo_postprocess()
    with Detector.open(tiny_bundle(), "onnxruntime", classes=["cup"], iou_threshold=0.3) as detector:
        found = detector(PICTURES[0])
        assert set(found.names) == {"cup"}
        raw, transforms = detector.raw([PICTURES[0]])
    least = raw["pred_scores"][0][:, 0] > spec.score_threshold
    assert 0 < len(found) <= least.sum()
    assert found.score[0] == raw["pred_scores"][0][:, 0].max()
    assert transforms[0].model_size == SIZE


def test_thresholds_that_cannot_be() -> None:
    with pytest.raises(DataError, match=r"iou_threshold: expected 0\.\.1, got 1\.5"):
        Detector.open(tiny_bundle(), iou_threshold=1.5)
    with pytest.raises(DataError, match=r"score_threshold: expected 0\.\.1, got -1"):
        Detector.open(tiny_bundle(), score_threshold=-1)
    with pytest.raises(DataError, match="deimv2 has no non-maximum suppression"):
        export_bundle(
            replace(tiny_source(), family="deimv2"), Path("unused"), iou_threshold=0.5, network=tiny_network()
        )


def test_detect_and_verify_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cv2.imwrite(str(tmp_path / "a.png"), cv2.cvtColor(PICTURES[0], cv2.COLOR_RGB2BGR))
    counts = []
    for index, options in enumerate(([], ["--iou", "0.1"], ["--score", "0.9"])):
        out = tmp_path / str(index)
        assert main(["detect", str(tiny_bundle()), str(tmp_path / "a.png"), "--out", str(out), *options]) == 0
        written = json.loads((out / "detections.json").read_text(encoding="utf-8"))
        assert written["iou_threshold"] == (0.1 if "--iou" in options else 0.7)
        counts.append(len(written["images"][0]["detections"]))
    assert counts[0] > max(counts[1:])
    assert main(["verify", str(tiny_bundle())]) == 0
    assert "passed" in capsys.readouterr().out
    assert main(["detect", str(tiny_bundle()), str(tmp_path / "a.png"), "--iou", "2"]) == 2
    assert main(["bench", str(tiny_bundle()), "--runs", "3", "--warm-up", "1"]) == 0


def altered(change: Any) -> onnx.ModelProto:
    """The tiny graph with something changed."""
    model = onnx.ModelProto()
    model.CopyFrom(tiny_network())
    change(model.graph)
    return model


def without_suppression(graph: onnx.GraphProto) -> None:
    """Every box without area: nothing overlaps."""
    for tensor in graph.initializer:
        if tensor.name.endswith("half"):
            tensor.CopyFrom(numpy_helper.from_array(np.array(0.0, np.float32), tensor.name))


def across_classes(graph: onnx.GraphProto) -> None:
    """The threshold taken from the wrong input."""
    node = next(node for node in graph.node if node.op_type == "NonMaxSuppression")
    node.input[4] = node.input[3]


def fewer(graph: onnx.GraphProto) -> None:
    """At most three detections of a class."""
    node = next(node for node in graph.node if node.op_type == "NonMaxSuppression")
    graph.initializer.append(numpy_helper.from_array(np.array([3], np.int64), "three_only"))
    node.input[2] = "three_only"


@pytest.mark.parametrize("change", [without_suppression, across_classes, fewer])
def test_graphs_that_suppress_wrongly_fail_the_gate(change: Any, tmp_path: Path) -> None:
    with pytest.raises(ParityError, match=r"suppression in the graph makes \d+ detections"):
        export_bundle(
            tiny_source(),
            tmp_path / "wrong.carpus",
            images=procedural_images(5),
            openvino=(),
            network=altered(change),
        )
    assert not (tmp_path / "wrong.carpus").exists()


def test_wrong_preprocessing_fails_the_gate(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="parity not met"):
        export_bundle(
            tiny_source(),
            tmp_path / "wrong.carpus",
            openvino=(),
            preprocess=Preprocess(SIZE, resize="stretch", interpolation="bilinear"),
            network=tiny_network(),
        )


def test_another_networks_graph_fails_the_gate(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="parity not met"):
        export_bundle(tiny_source(seed=1), tmp_path / "wrong.carpus", openvino=(), network=tiny_network())


def test_nan_is_an_error_and_not_an_empty_scene() -> None:
    with Detector.open(tiny_bundle(), "onnxruntime") as detector:
        backend = detector.backend
        outputs = {name: values.copy() for name, values in backend.infer(1).items()}
        outputs["pred_scores"][0, 5, 1] = np.nan
        detector._backend = type(
            "Broken",
            (),
            {  # a model that went wrong on the way
                "scalars": backend.scalars,
                "input_buffer": lambda self, batch: backend.input_buffer(batch),
                "infer": lambda self, batch: outputs,
                "close": lambda self: backend.close(),
            },
        )()
        with pytest.raises(BackendError, match=r"'pred_scores': 1 of .* values are NaN"):
            detector(PICTURES[0])


def manifest_with(**changes: Any) -> dict[str, Any]:
    with Bundle.open(tiny_bundle()) as bundle:
        data = bundle.manifest.to_json()
    for path, value in changes.items():
        data[path] = value(data[path])
    return data


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"inputs": lambda inputs: inputs[:2]}, "takes one image input and the inputs score_threshold, iou_threshold"),
        (
            {"inputs": lambda inputs: [*inputs[:2], {**inputs[2], "shape": [2]}]},
            r"'iou_threshold' must be float32 \(1,\)",
        ),
        ({"outputs": lambda outputs: outputs[1:]}, "'num_detections' is missing"),
        (
            {"outputs": lambda outputs: [{**outputs[0], "dtype": "float32"}, *outputs[1:]]},
            "'num_detections' must be int64 with 1 dimensions",
        ),
        (
            {"postprocess": lambda spec: {**spec, "in_graph": False}},
            "takes one image input, got images, score_threshold",
        ),
        ({"postprocess": lambda spec: {**spec, "kind": "top_k"}}, "a graph suppresses with kind 'nms' only"),
    ],
)
def test_manifests_that_contradict_themselves(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(BundleError, match=problem):
        Manifest.from_json(manifest_with(**changes))


def test_manifests_of_detectors_without_suppression_stay_as_they_are() -> None:
    data = tiny_manifest().to_json()
    for name in ("kind", "iou_threshold", "multi_label", "max_candidates", "in_graph"):
        del data["postprocess"][name]
    assert Manifest.from_json(data) == tiny_manifest()
