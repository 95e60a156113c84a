"""The detector on both backends: a bundle in, the same detections out, however the picture comes."""

from __future__ import annotations

import dataclasses
import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from carpus.runtime import Detections, Detector
from carpus.runtime import backends as backends_module
from carpus.runtime.backends import BACKENDS, available_backends, open_backend
from carpus.runtime.bundle import Bundle
from carpus.runtime.errors import BackendError, BundleError, DataError
from carpus.runtime.latency import describe_machine, measure_latency
from carpus.runtime.spec import ParityRecord, TensorSpec
from tests.tiny_detector import coloured_image, tiny_manifest, tiny_onnx, write_tiny_bundle

NAMES = ("openvino", "onnxruntime")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.carpus")


@pytest.fixture(scope="module", params=NAMES)
def detector(folder: Path, request: pytest.FixtureRequest) -> Detector:
    return Detector.open(folder, request.param, num_threads=1)


def assert_same(found: Detections, expected: Detections, atol: float = 0.0) -> None:
    assert found.image_size == expected.image_size
    np.testing.assert_array_equal(found.class_id, expected.class_id)
    np.testing.assert_allclose(found.score, expected.score, atol=atol)
    np.testing.assert_allclose(found.xyxy, expected.xyxy, atol=atol)


def test_finds_what_is_in_the_picture(detector: Detector) -> None:
    found = detector(coloured_image(96, 160))
    assert found.image_size == (96, 160)
    assert sorted(found.names) == ["blue"] * 4 + ["grün"] * 4 + ["red"] * 4
    assert (np.diff(found.score) <= 0).all()
    reds = {tuple(box.tolist()) for box, _, _, name in found if name == "red"}
    assert reds == {(x, y, x + 40.0, y + 24.0) for x in (0.0, 40.0) for y in (0.0, 24.0)}


def test_backends_agree(folder: Path) -> None:
    image = coloured_image(77, 201)
    one, two = (Detector.open(folder, name, score_threshold=0.0)(image) for name in NAMES)
    assert len(one) == 48
    # the model scores blank cells equally; rounding may order them differently
    assert_same(*(found.filter(score=0.01) for found in (one, two)), atol=1e-4)


def test_zip_and_folder_agree(folder: Path, tmp_path: Path, detector: Detector) -> None:
    zipped = write_tiny_bundle(tmp_path / "tiny.zip")
    with Detector.open(zipped, detector.backend_name) as other:
        assert_same(other(coloured_image()), detector(coloured_image()), atol=1e-6)


def test_the_same_picture_however_it_comes(detector: Detector, tmp_path: Path) -> None:
    image = coloured_image(480, 640)
    expected = detector(image)
    assert len(expected) == 12
    Image.fromarray(image).save(tmp_path / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.ascontiguousarray(np.rot90(image))).save(tmp_path / "turned.png", exif=exif)
    padded = np.zeros((490, 660, 3), np.uint8)
    padded[5:485, 10:650] = image
    alpha = np.full((480, 640, 1), 9, np.uint8)
    for given in (
        tmp_path / "a.png",
        str(tmp_path / "turned.png"),
        Image.fromarray(image),
        np.dstack((image, alpha)),
        np.asfortranarray(image),
        padded[5:485, 10:650],
        image[:, ::-1][:, ::-1],
    ):
        assert_same(detector(given), expected)
    for given in (image[:, :, ::-1], image[:, :, ::-1].copy(), np.dstack((image[:, :, ::-1], alpha))):
        assert_same(detector(given, color="bgr"), expected)


def test_grey_pictures(detector: Detector) -> None:
    grey = np.zeros((60, 90), np.uint8)
    grey[:30, :45] = 255
    expected = detector(np.stack([grey] * 3, axis=-1))
    assert len(expected) == 12
    for given in (grey, grey[:, :, None], Image.fromarray(grey)):
        assert_same(detector(given), expected)


@pytest.mark.parametrize("size", [(1, 1), (1, 4000), (4000, 1), (4320, 7680)])
def test_odd_sizes(detector: Detector, size: tuple[int, int]) -> None:
    image = np.zeros((*size, 3), np.uint8)
    image[..., 0] = 255
    found = detector(image)
    assert found.names == ("red",) * 16
    assert found.xyxy.min() == 0
    assert found.xyxy[:, 2:].max(axis=0).tolist() == [size[1], size[0]]


def test_batches_are_each_image_alone(detector: Detector) -> None:
    sizes = ((96, 160), (31, 17), (480, 640), (1, 1))
    images = [*(coloured_image(*size) for size in sizes), coloured_image()[::-1]]
    expected = [detector(image) for image in images]
    for batch_size in (1, 2, 16):
        for found, alone in zip(detector.detect_batch(images, batch_size=batch_size), expected, strict=True):
            assert_same(found, alone, atol=1e-5)
    assert detector.detect_batch([]) == []


def test_earlier_results_survive_later_calls(detector: Detector) -> None:
    first = detector(coloured_image())
    copy = first.xyxy.copy(), first.score.copy()
    detector(np.zeros((50, 50, 3), np.uint8))
    np.testing.assert_array_equal(first.xyxy, copy[0])
    np.testing.assert_array_equal(first.score, copy[1])


def test_threshold_and_classes_change_while_running(folder: Path) -> None:
    with Detector.open(folder, "onnxruntime") as detector:
        image = coloured_image()
        assert detector.score_threshold == 0.5
        assert detector.classes == detector.class_names == ("red", "grün", "blue")
        detector.classes = ["grün", 2]
        assert detector.classes == ("grün", "blue")
        assert set(detector(image).names) == {"grün", "blue"}
        detector.score_threshold = 0.999
        assert set(detector(image).names) <= {"grün"}
        detector.classes = None
        assert set(detector(image).names) == {"red"}
        for wrong in (-0.1, 1.1, float("nan")):
            with pytest.raises(DataError, match=r"score_threshold: expected 0\.\.1"):
                detector.score_threshold = wrong
        with pytest.raises(DataError, match="no class 'pink'; it has red, grün, blue"):
            detector.classes = ["pink"]
        assert detector.score_threshold == 0.999


def test_options_of_open(folder: Path) -> None:
    with Detector.open(folder, "onnxruntime", score_threshold=0.9999, classes=["red"], num_threads=2) as detector:
        assert detector.score_threshold == 0.9999
        assert detector.classes == ("red",)
        assert detector.backend.num_threads == 2
        assert (detector.backend.precision, detector.backend.device) == ("fp32", "CPU")
    with pytest.raises(BackendError, match="num_threads: expected at least 1"):
        Detector.open(folder, num_threads=0)


def test_timing_uses_the_clock_given(folder: Path) -> None:
    ticks = iter(range(100))
    with Bundle.open(folder) as bundle:
        detector = Detector(bundle.manifest, open_backend(bundle, "onnxruntime"), clock=lambda: float(next(ticks)))
    detector(coloured_image())
    assert detector.last_timing == (1.0, 1.0, 1.0)
    assert detector.last_timing.total == 3.0
    detector.detect_batch([coloured_image()] * 3, batch_size=2)
    assert detector.last_timing == (2.0, 2.0, 2.0)


def test_warm_up_and_latency(detector: Detector) -> None:
    detector.warm_up(runs=1)
    latency = measure_latency(detector, coloured_image(), runs=5, warm_up=1)
    assert latency.runs == 5
    assert set(latency.parts) == {"preprocess", "inference", "postprocess", "total"}
    for values in latency.parts.values():
        assert 0 < values["p50"] <= values["p90"] <= values["p99"]
    assert latency.metrics()["inference_p50_ms"] == latency.parts["inference"]["p50"]
    assert all(describe_machine().values())
    with pytest.raises(DataError, match="runs: expected at least 1"):
        measure_latency(detector, coloured_image(), runs=0)


def test_raw_outputs_are_the_graphs(detector: Detector) -> None:
    image = coloured_image()
    outputs, transforms = detector.raw([image, image[::-1]])
    assert outputs["pred_logits"].shape == (2, 16, 3)
    assert outputs["pred_boxes"].shape == (2, 16, 4)
    assert [item.source_size for item in transforms] == [(96, 160)] * 2
    tensor, _ = detector.manifest.preprocess(image)  # type: ignore[misc]
    means = tensor[0].reshape(3, 4, 16, 4, 16).mean(axis=(2, 4)).reshape(3, 16).T
    np.testing.assert_allclose(outputs["pred_logits"][0], means * 20 - 10, atol=1e-4)


def test_threads_may_share_a_detector(detector: Detector) -> None:
    images = [coloured_image(40 + index, 60 + index) for index in range(4)]
    expected = [detector(image) for image in images]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(10):
            found = detector(images[index])
            if found.image_size != images[index].shape[:2] or not np.array_equal(found.xyxy, expected[index].xyxy):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", NAMES)
def test_fixed_batch_graphs(tmp_path: Path, name: str) -> None:
    manifest = tiny_manifest(batch=2)
    path = write_tiny_bundle(tmp_path / "tiny.carpus", formats=("onnx",), manifest=manifest)
    with Detector.open(path, name) as detector:
        images = [coloured_image(), coloured_image(20, 30), coloured_image(50, 50)]
        assert [len(found) for found in detector.detect_batch(images)] == [12, 12, 12]
        assert len(detector(images[0])) == 12
        assert detector.raw(images)[0]["pred_boxes"].shape == (3, 16, 4)
        with pytest.raises(BackendError, match="the graph takes batches of 2 only, got 1"):
            detector.backend.input_buffer(1)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_answers_nan_is_stopped(tmp_path: Path, name: str) -> None:
    path = write_tiny_bundle(tmp_path / "nan.carpus", formats=("onnx",), model=tiny_onnx(tiny_manifest(), nan=True))
    with Detector.open(path, name) as detector:
        assert len(detector(np.full((64, 64, 3), 200, np.uint8))) == 48
        with pytest.raises(BackendError, match=r"output 'pred_logits': \d+ of 48 values are NaN"):
            detector(coloured_image())


def test_wrong_inputs_name_what_is_wrong(detector: Detector, tmp_path: Path) -> None:
    good = coloured_image()
    cases: list[tuple[object, str]] = [
        (tmp_path / "none.jpg", "no such file"),
        (np.zeros((4, 4, 3), np.float32), "expected dtype uint8"),
        (np.zeros((3, 40, 64), np.uint8), "channels-first"),
        (np.zeros((0, 4, 3), np.uint8), "at least 1 x 1"),
        (None, "got builtins.NoneType"),
    ]
    for given, message in cases:
        with pytest.raises(DataError, match=message):
            detector(given)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=rf"images\[2\]: .*{message}"):
            detector.detect_batch([good, good, given], batch_size=2)  # type: ignore[list-item]
    for one in (good, "a.png"):
        with pytest.raises(DataError, match=r"expected a list of images, got one \w+; write \[image\]"):
            detector.detect_batch(one)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="batch_size: expected at least 1"):
        detector.detect_batch([good], batch_size=0)
    assert len(detector(good)) == 12


@pytest.mark.parametrize("name", NAMES)
def test_wrong_tensors_are_refused_by_the_backend(folder: Path, name: str) -> None:
    with Bundle.open(folder) as bundle:
        backend = open_backend(bundle, name)
    assert backend.run(np.zeros((2, 3, 64, 64), np.float32))["pred_boxes"].shape == (2, 16, 4)
    for wrong in (np.zeros((1, 3, 64, 32), np.float32), np.zeros((3, 64, 64), np.float32), np.zeros((1, 3, 64, 64))):
        with pytest.raises(BackendError, match=r"input 'images': expected float32 of shape \('N', 3, 64, 64\), got"):
            backend.run(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_a_closed_detector_says_so(folder: Path, name: str) -> None:
    with Detector.open(folder, name) as detector:
        detector(coloured_image())
    with pytest.raises(BackendError, match="it was closed"):
        detector(coloured_image())
    detector.close()


GRAPH_CHANGES = [
    (
        {"outputs": (TensorSpec("pred_logits", "float32", ("N", 15, 3)), tiny_manifest().outputs[1])},
        "'pred_logits' has size 16 on axis 1 in the graph and 15 in the manifest",
    ),
    (
        {"outputs": (*tiny_manifest().outputs, TensorSpec("masks", "float32", ("N", 16)))},
        "it states outputs pred_logits, pred_boxes, masks, the graph has",
    ),
    (
        {"inputs": (TensorSpec("image", "float32", ("N", 3, 64, 64)),)},
        "it states inputs image, the graph has images",
    ),
    ({"inputs": (TensorSpec("images", "float32", (1, 3, 64, 64)),)}, None),
]


@pytest.mark.parametrize(("change", "message"), GRAPH_CHANGES)
def test_a_manifest_that_does_not_fit_its_graph_is_refused(
    tmp_path: Path, change: dict[str, object], message: str | None
) -> None:
    model = tiny_onnx(tiny_manifest())
    manifest = dataclasses.replace(tiny_manifest(), **change)  # type: ignore[arg-type]
    path = write_tiny_bundle(tmp_path / "tiny.carpus", formats=("onnx",), manifest=manifest, model=model)
    for name in NAMES:
        if message is None:
            assert len(Detector.open(path, name)(coloured_image())) == 12
            continue
        with pytest.raises(BundleError) as caught:
            Detector.open(path, name)
        assert "the manifest does not fit the graph" in str(caught.value)
        assert message in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_element_types_are_held_against_the_graph(tmp_path: Path, name: str) -> None:
    specs = tuple(dataclasses.replace(spec, dtype="int64") for spec in tiny_manifest().outputs)
    manifest = dataclasses.replace(tiny_manifest(), outputs=specs)
    model = tiny_onnx(tiny_manifest())
    path = write_tiny_bundle(tmp_path / "tiny.carpus", formats=("onnx",), manifest=manifest, model=model)
    with pytest.raises(BundleError, match="'pred_logits' is float32 in the graph and int64 in the manifest"):
        Detector.open(path, name)


def test_altered_and_broken_models_are_refused(folder: Path, tmp_path: Path) -> None:
    path = write_tiny_bundle(tmp_path / "tiny.carpus")
    (path / "model.onnx").write_bytes((path / "model.onnx").read_bytes()[:-1] + b"\x00")
    (path / "openvino" / "model.bin").unlink()
    with pytest.raises(BundleError, match=r"'model\.onnx' was altered"):
        Detector.open(path, "onnxruntime")
    with pytest.raises(BundleError, match=r"'openvino/model\.bin' is listed in the manifest but missing"):
        Detector.open(path, "openvino")
    broken = write_tiny_bundle(tmp_path / "broken.carpus", formats=("onnx",), model=b"no model at all")
    for name in NAMES:
        with pytest.raises(BackendError, match=r"'model\.onnx': \w+ ?\w* [\d.]+ cannot load it"):
            Detector.open(broken, name)


def test_auto_takes_an_installed_backend_and_says_which(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="carpus")
    monkeypatch.setattr(backends_module.platform, "machine", lambda: "x86_64")
    assert Detector.open(folder).backend_name == "openvino"
    assert "backend openvino: first choice on x86_64 for onnx fp32, openvino fp32" in caplog.text
    monkeypatch.setattr(backends_module.platform, "machine", lambda: "aarch64")
    assert Detector.open(folder).backend_name == "onnxruntime"
    for missing, expected in (("openvino", "onnxruntime"), ("onnxruntime", "openvino")):
        gone = dataclasses.replace(BACKENDS[missing], package="package_that_is_not_there")
        with monkeypatch.context() as patch:
            patch.setitem(BACKENDS, missing, gone)
            assert Detector.open(folder).backend_name == expected
            message = rf"'package_that_is_not_there' is not installed; pip install 'carpus\[{missing}\]'"
            with pytest.raises(BackendError, match=message):
                Detector.open(folder, missing)


def test_no_backend_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, info in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, dataclasses.replace(info, package="package_that_is_not_there"))
    message = r"no installed backend can load its artefacts .*pip install 'carpus\[openvino\]' or"
    with pytest.raises(BackendError, match=message):
        Detector.open(folder)


def test_auto_prefers_what_the_export_measured(tmp_path: Path) -> None:
    path = write_tiny_bundle(tmp_path / "onnx.carpus", formats=("onnx",))
    with Bundle.open(path) as bundle:
        for backend in ("onnxruntime", "openvino"):
            record = ParityRecord(backend, "1", "fp32", 8, {"max_box_px": 0.0}, {"max_box_px": 0.05}, True)
            measured = dataclasses.replace(bundle.manifest, parity=(record,))
            failed = dataclasses.replace(bundle.manifest, parity=(dataclasses.replace(record, passed=False),))
            assert available_backends(SimpleNamespace(manifest=measured))[0] == backend
            assert available_backends(SimpleNamespace(manifest=failed))[-1] == backend


def test_backends_take_the_formats_there_are(tmp_path: Path) -> None:
    onnx_only = write_tiny_bundle(tmp_path / "onnx.carpus", formats=("onnx",))
    openvino_only = write_tiny_bundle(tmp_path / "openvino.carpus", formats=("openvino",))
    with Bundle.open(onnx_only) as bundle:
        assert set(available_backends(bundle)) == {"openvino", "onnxruntime"}
    with Bundle.open(openvino_only) as bundle:
        assert available_backends(bundle) == ("openvino",)
    assert len(Detector.open(onnx_only, "openvino")(coloured_image())) == 12
    with pytest.raises(BackendError, match="backend 'onnxruntime' loads onnx, the bundle has openvino fp32"):
        Detector.open(openvino_only, "onnxruntime")
    with pytest.raises(BackendError, match="loads openvino or onnx of int8, the bundle has onnx fp32"):
        Detector.open(onnx_only, "openvino", precision="int8")
    with pytest.raises(BackendError, match="expected 'auto', 'openvino', 'onnxruntime', got 'tensorrt'"):
        Detector.open(onnx_only, "tensorrt")


def test_other_kinds_of_bundle_are_no_detectors(tmp_path: Path) -> None:
    manifest = dataclasses.replace(tiny_manifest(), kind="policy")
    path = write_tiny_bundle(tmp_path / "p.carpus", formats=("onnx",), manifest=manifest)
    with pytest.raises(BundleError, match="holds a policy, not a detector"):
        Detector.open(path, "onnxruntime")
