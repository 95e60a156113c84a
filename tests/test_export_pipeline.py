"""From a trained module to a bundle, and from a wrong one to nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from carpus.export import families, images, parity, pipeline, provenance
from carpus.export.images import ParityImage, folder_images, procedural_images, shrink
from carpus.export.onnx import with_metadata
from carpus.export.openvino import export_openvino
from carpus.export.parity import TorchReference, pack_reference
from carpus.export.pipeline import export_bundle
from carpus.export.writer import BundleWriter
from carpus.models.predict import ModelDetector, deimv2_preprocess
from carpus.runtime.bundle import Bundle
from carpus.runtime.detector import Detector
from carpus.runtime.errors import BundleError, DataError
from carpus.runtime.image import load_image
from carpus.runtime.parity import ParityError
from carpus.runtime.spec import Postprocess, Preprocess
from carpus.runtime.thresholds import PARITY
from tests.tiny_deimv2 import CLASSES, SIZE, tiny_bundle, tiny_model, tiny_network, tiny_source

PICTURES = procedural_images(2)
RIGHT = deimv2_preprocess(SIZE)


def test_manifest_says_what_was_exported_and_measured() -> None:
    with Bundle.open(tiny_bundle()) as bundle:
        manifest = bundle.manifest
    assert (manifest.family, manifest.variant, manifest.name, manifest.licence) == ("deimv2", "atto", "tiny", "MIT")
    assert manifest.classes == CLASSES
    assert manifest.preprocess == RIGHT
    assert [(item.format, item.precision, item.opset) for item in manifest.artefacts] == [
        ("onnx", "fp32", 18),
        ("openvino", "fp32", None),
        ("openvino", "fp16", None),
    ]
    assert [spec.shape for spec in manifest.outputs] == [("N", 75, 3), ("N", 75, 4)]
    assert manifest.provenance.packages["torch"] == torch.__version__
    assert manifest.reference is not None
    assert manifest.reference.cases == 3
    assert [(record.backend, record.precision) for record in manifest.parity] == [
        ("onnxruntime", "fp32"),
        ("openvino", "fp32"),
        ("openvino", "fp16"),
    ]
    for record in manifest.parity:
        assert record.passed
        assert record.images == 7  # four pictures and the three stored ones
        assert record.thresholds == PARITY[record.precision].as_mapping()
        assert record.metrics["detections"] > 50
        assert record.metrics["max_box_px"] <= record.thresholds["max_box_px"]


def test_bundle_detects_what_the_module_detects() -> None:
    expected = ModelDetector(tiny_model(), [info.name for info in CLASSES], RIGHT, Postprocess(score_threshold=0.5))
    pictures = [picture.pixels for picture in procedural_images(3, seed=9)]
    for backend in ("onnxruntime", "openvino"):
        with Detector.open(tiny_bundle(), backend) as detector:
            for ours, theirs in zip(detector.detect_batch(pictures), expected(pictures), strict=True):
                assert len(ours) == len(theirs) > 3
                np.testing.assert_allclose(ours.xyxy, theirs.xyxy, atol=PARITY["fp32"].max_box_px)
                np.testing.assert_allclose(ours.score, theirs.score, atol=PARITY["fp32"].max_score)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(RIGHT, color="bgr"),
        replace(RIGHT, scale=1.0),
        replace(RIGHT, resize="letterbox"),
        replace(RIGHT, interpolation="bilinear"),
        replace(RIGHT, interpolation="area"),
        replace(RIGHT, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    ],
    ids=["bgr", "no /255", "letterbox", "two-tap resize", "area resize", "mean and std"],
)
def test_wrong_preprocessing_fails_the_gate(wrong: Preprocess, tmp_path: Path) -> None:
    out = tmp_path / "wrong.carpus"
    with pytest.raises(
        ParityError, match=r"onnxruntime .*, fp32: parity not met: .* differ by .* \(limit .*\) at query"
    ):
        export_bundle(tiny_source(), out, images=PICTURES, openvino=(), preprocess=wrong, network=tiny_network())
    assert list(tmp_path.iterdir()) == []
    assert ParityError("").exit_code == 1


def test_right_preprocessing_passes_the_same_gate(tmp_path: Path) -> None:
    done = export_bundle(
        tiny_source(),
        tmp_path / "right.carpus.zip",
        images=PICTURES,
        openvino=(),
        preprocess=RIGHT,
        network=tiny_network(),
        score_threshold=0.3,
        created=datetime(2026, 1, 31, 12, tzinfo=timezone.utc),
    )
    assert [record.passed for record in done.parity] == [True]
    with Bundle.open(tmp_path / "right.carpus.zip") as bundle:
        assert bundle.manifest.provenance.created == "2026-01-31T12:00:00+00:00"
        assert bundle.manifest.postprocess is not None
        assert bundle.manifest.postprocess.score_threshold == 0.3
        assert {entry.path for entry in bundle.manifest.files} == {"model.onnx", "reference.npz"}


def spoiled(name_part: str, factor: float) -> onnx.ModelProto:
    """The tiny graph with one weight scaled."""
    model = onnx.ModelProto()
    model.CopyFrom(tiny_network())
    weight = next(tensor for tensor in model.graph.initializer if name_part in tensor.name)
    values = numpy_helper.to_array(weight) * np.float32(factor)
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    return model


def test_wrong_weight_fails_the_gate_and_leaves_the_older_bundle(tmp_path: Path) -> None:
    out = tmp_path / "old.carpus"
    shutil.copytree(tiny_bundle(), out)
    before = (out / "manifest.json").read_bytes()
    with pytest.raises(ParityError, match="no bundle was written"):
        export_bundle(tiny_source(), out, images=PICTURES, network=spoiled("stem1.conv.weight", 1.01))
    assert (out / "manifest.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["old.carpus"]


@pytest.mark.parametrize("operator", ["ReduceMean", "ReduceMax"])
def test_image_that_depends_on_its_neighbours_fails_the_gate(operator: str, tmp_path: Path) -> None:
    """One image alone gives the right answer, so only the check of a batch can tell."""
    model = onnx.ModelProto()
    model.CopyFrom(tiny_network())
    last = next(node for node in model.graph.node if "pred_logits" in node.output)
    last.output[list(last.output).index("pred_logits")] = "own"
    axes = numpy_helper.from_array(np.array([0], np.int64), "batch_axis")
    model.graph.initializer.append(axes)
    model.graph.node.append(onnx.helper.make_node(operator, ["own", "batch_axis"], ["shared"], keepdims=1))
    model.graph.node.append(onnx.helper.make_node("Sub", ["own", "shared"], ["difference"]))
    model.graph.node.append(onnx.helper.make_node("Add", ["own", "difference"], ["pred_logits"]))
    with pytest.raises(ParityError, match=r"of image . of a batch of 3 .*against the same image alone"):
        export_bundle(tiny_source(), tmp_path / "x.carpus", images=PICTURES, openvino=(), network=model)
    assert list(tmp_path.iterdir()) == []


def test_nan_fails_the_gate(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match=r"onnxruntime, model.onnx \(fp32\): output 'pred_logits': .* NaN"):
        export_bundle(
            tiny_source(),
            tmp_path / "nan.carpus",
            images=PICTURES,
            openvino=(),
            network=spoiled("stem1.conv.weight", np.nan),
        )


def test_unusable_target_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.txt").write_text("mine")
    with pytest.raises(BundleError, match="a folder that is not a bundle is there"):
        export_bundle(tiny_source(), tmp_path / "photos", network=tiny_network())


def test_no_pictures(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected at least one picture"):
        export_bundle(tiny_source(), tmp_path / "x.carpus", images=[], network=tiny_network())


def test_unknown_family(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown model family 'yolo'"):
        export_bundle(replace(tiny_source(), family="yolo"), tmp_path / "x.carpus")


def test_same_source_gives_the_same_files() -> None:
    content = tiny_network().SerializeToString()
    reference = TorchReference(tiny_model(), RIGHT, Postprocess(), tuple(info.name for info in CLASSES))
    for make in (
        lambda: export_openvino(content, {"names": "{0: 'a'}"}),
        lambda: export_openvino(content, {"names": "{0: 'a'}"}, "fp16"),
        lambda: with_metadata(tiny_network(), {"a": "1", "b": "2"}),
        lambda: pack_reference(reference, PICTURES),
    ):
        assert make() == make()


def test_procedural_pictures_are_repeatable_and_not_square() -> None:
    first, again = procedural_images(8, seed=3), procedural_images(8, seed=3)
    other = procedural_images(8, seed=4)
    for one, same, different in zip(first, again, other, strict=True):
        assert one.pixels.dtype == np.uint8
        assert one.pixels.shape[0] != one.pixels.shape[1]
        np.testing.assert_array_equal(one.pixels, same.pixels)
        assert (one.pixels != different.pixels).any()
        assert one.pixels.std() > 20


def test_folder_pictures(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "deep").mkdir()
    for index in range(5):
        Image.fromarray(np.full((40, 40 + 10 * (index > 0), 3), index, np.uint8)).save(
            tmp_path / "deep" / f"{index}.png"
        )
    (tmp_path / "notes.txt").write_text("no picture")
    found = folder_images(tmp_path, 3)
    assert [picture.name for picture in found] == ["deep/0.png", "deep/2.png", "deep/4.png"]
    assert [picture.pixels.shape for picture in found] == [(30, 40, 3), (40, 50, 3), (40, 50, 3)]
    np.testing.assert_array_equal(found[1].pixels, load_image(tmp_path / "deep" / "2.png"))
    assert len(folder_images(tmp_path, 100)) == 5


def test_folder_without_pictures(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no image in it; looked for \.bmp, \.jpeg"):
        folder_images(tmp_path, 3)
    with pytest.raises(DataError, match=r"no such folder; give a folder with images"):
        folder_images(tmp_path / "absent", 3)


@pytest.mark.parametrize(("size", "longest"), [((480, 640), 320), ((100, 90), 320), ((641, 640), 320), ((9, 4000), 64)])
def test_shrunk_pictures_stay_oblong(size: tuple[int, int], longest: int) -> None:
    small = shrink(ParityImage("x", np.zeros((*size, 3), np.uint8)), longest).pixels.shape
    assert max(small) <= max(longest, 3)
    assert small[0] != small[1] or max(small) == 1


def test_reference_is_the_trained_form() -> None:
    """The stored outputs are the unfused module's, as it was before export and still is."""
    model = tiny_model()
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
    with np.load(tiny_bundle() / "reference.npz") as stored, torch.inference_mode():
        tensor, _ = RIGHT(stored["image_0"])
        expected = model(torch.from_numpy(tensor))
        np.testing.assert_array_equal(stored["pred_boxes_0"], expected["pred_boxes"][0].numpy())


def test_writer_and_public_names() -> None:
    assert issubclass(BundleWriter, object)
    for module in (families, images, parity, pipeline, provenance):
        assert all(hasattr(module, name) for name in module.__all__), module.__name__
