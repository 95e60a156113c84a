"""`carpus detect` and `carpus bench`, run in this process on a real bundle."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

import carpus.runtime
from carpus.cli.detect import Detect
from carpus.cli.main import main
from carpus.runtime.errors import DataError
from tests.tiny_detector import coloured_image, write_tiny_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.carpus"))


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    folder = tmp_path / "shots"
    (folder / "deep").mkdir(parents=True)
    Image.fromarray(coloured_image(96, 160)).save(folder / "a.png")
    Image.fromarray(coloured_image(48, 64)).save(folder / "deep" / "größe.png")
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(folder / "dark.jpg")
    return folder


def run(*arguments: object) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:  # tyro leaves this way on wrong options
        return int(stop.code or 0)


def test_detect_writes_json_and_pictures(
    bundle: str, shots: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run("detect", bundle, shots, "--out", out, "--backend", "onnxruntime") == 0
    printed = capsys.readouterr().out
    assert "3 images on onnxruntime, score >= 0.5: 8 red, 8 grün, 8 blue" in printed
    data = json.loads((out / "detections.json").read_text(encoding="utf-8"))
    assert data["bundle"] == "tiny.carpus"
    assert [item["image"] for item in data["images"]] == ["a.png", "dark.jpg", "deep/größe.png"]
    assert [len(item["detections"]) for item in data["images"]] == [12, 0, 12]
    drawn = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert drawn == ["annotated/a.png", "annotated/dark.jpg", "annotated/deep/größe.png", "detections.json"]
    with Image.open(out / "annotated" / "a.png") as image:
        assert image.size == (160, 96)
        assert np.any(np.asarray(image) != coloured_image(96, 160))


def test_detect_writes_coco_results(bundle: str, shots: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--coco", "--no-json", "--no-annotate", "--classes", "grün", "2", "--out", out)
    assert run("detect", bundle, shots, *options) == 0
    results = json.loads((out / "coco_results.json").read_text(encoding="utf-8"))
    assert {item["category_id"] for item in results} == {7, 11}
    assert {item["image_id"] for item in results} == {1, 3}
    images = json.loads((out / "coco_images.json").read_text(encoding="utf-8"))
    assert images[0] == {"id": 1, "file_name": "a.png", "width": 160, "height": 96}
    assert {item.name for item in out.iterdir()} == {"coco_results.json", "coco_images.json"}
    annotations = tmp_path / "annotations.json"
    entries = [
        {"file_name": name, "id": number} for name, number in (("a.png", 70), ("größe.png", 71), ("dark.jpg", 72))
    ]
    annotations.write_text(json.dumps({"images": entries}))
    assert run("detect", bundle, shots, *options, "--coco-annotations", annotations) == 0
    results = json.loads((out / "coco_results.json").read_text(encoding="utf-8"))
    assert {item["image_id"] for item in results} == {70, 71}


def test_detect_reads_and_writes_videos(bundle: str, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="writing video needs PyAV")
    from carpus.runtime.video import VideoWriter

    with VideoWriter(tmp_path / "film.mp4", 10) as writer:
        for _ in range(4):
            writer.write(coloured_image(96, 160))
    out = tmp_path / "out"
    assert run("detect", bundle, tmp_path / "film.mp4", "--out", out, "--score", "0.9") == 0
    data = json.loads((out / "detections.json").read_text(encoding="utf-8"))
    assert [(item["frame"], item["seconds"]) for item in data["images"]] == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]
    assert all(len(item["detections"]) >= 8 for item in data["images"])
    capture = cv2.VideoCapture(str(out / "annotated" / "film.mp4"))
    assert int(capture.get(cv2.CAP_PROP_FRAME_COUNT)) == 4


def test_unreadable_inputs_are_named_and_the_rest_is_done(
    bundle: str, shots: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (shots / "bad.png").write_bytes((shots / "a.png").read_bytes()[:60])
    assert run("detect", bundle, shots, "--out", tmp_path / "out") == 1
    assert "1 of 4 inputs could not be read" in capsys.readouterr().out
    assert "bad.png" in caplog.text
    data = json.loads((tmp_path / "out" / "detections.json").read_text(encoding="utf-8"))
    assert len(data["images"]) == 3
    assert run("detect", bundle, shots / "bad.png", "--out", tmp_path / "none") == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{bundle}", "none.png"], "input 'none.png': no such file"),
        (["{bundle}", "*.nothing"], "no image or video matches the pattern"),
        (["{bundle}", ""], "input '': expected a file, folder or pattern"),
        (["{bundle}", "{shots}", "--out", "{shots}/a.png"], "cannot use '{shots}/a.png"),
        (["nowhere.carpus", "{shots}"], "bundle 'nowhere.carpus': no such file or folder"),
        (["{bundle}", "{shots}", "--classes", "pink"], "the model has no class 'pink'; it has red, grün, blue"),
        (["{bundle}", "{shots}", "--classes", "3"], "expected ids 0..2, got 3"),
        (["{bundle}", "{shots}", "--score", "1.5"], "score_threshold: expected 0..1, got 1.5"),
        (["{bundle}", "{shots}", "--threads", "0"], "num_threads: expected at least 1"),
        (["{bundle}", "{shots}", "--backend", "tensorrt"], "tensorrt"),
        (["{bundle}", "{shots}", "--coco", "--coco-annotations", "none.json"], "'none.json': cannot be read"),
    ],
)
def test_wrong_usage_of_detect(
    bundle: str, shots: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("detect", *(item.format(bundle=bundle, shots=shots) for item in arguments)) == 2
    printed = capsys.readouterr()
    assert message.format(shots=shots) in printed.err + printed.out


def test_detect_without_inputs_is_wrong_usage(bundle: str) -> None:
    with pytest.raises(DataError, match="no input: name at least one image"):
        Detect(Path(bundle), ()).run()


def test_bench_prints_parts_machine_and_versions(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", bundle, "--runs", 3, "--warm-up", 1, "--size", 64, 48) == 0
    printed = capsys.readouterr().out
    for word in ("p50", "p90", "p99", "preprocess", "inference", "postprocess", "64 x 48", "numpy", "cores"):
        assert word in printed
    assert printed.index("openvino 2") < printed.index("preprocess")


def test_bench_as_json(bundle: str, shots: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--image", shots / "a.png", "--backend", "onnxruntime", "--threads", 1, "--json")
    assert run("bench", bundle, "--runs", 3, *arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["image"] == {"width": 160, "height": 96}
    (row,) = report["backends"]
    assert (row["backend"], row["threads"], row["precision"]) == ("onnxruntime", 1, "fp32")
    assert set(row["milliseconds"]) == {"preprocess", "inference", "postprocess", "total"}
    assert report["packages"]["numpy"] == np.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--runs", "0"], "runs: expected at least 1"), (["--size", "0", "4"], "--size: expected a positive width")],
)
def test_wrong_usage_of_bench(
    bundle: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", bundle, *arguments) == 2
    assert message in capsys.readouterr().err


def test_export_lists_are_true() -> None:
    names = [name for _, name, _ in pkgutil.walk_packages(carpus.runtime.__path__, "carpus.runtime.")]
    assert len(names) >= 20
    for name in ("carpus.runtime", *names):
        module = importlib.import_module(name)
        assert module.__all__, name
        assert module.__doc__, name
        for item in module.__all__:
            assert hasattr(module, item), f"{name}.{item}"
        assert len(set(module.__all__)) == len(module.__all__), name
