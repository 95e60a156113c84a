"""`carpus evaluate` and `carpus models` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from carpus.cli.main import main
from carpus.runtime.detector import Detector
from tests.tiny_deimv2 import CLASSES, tiny_bundle


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Three pictures whose ground truth is what the tiny model itself finds best, so that its AP is known."""
    folder = tmp_path / "heldout"
    (folder / "images").mkdir(parents=True)
    annotations: list[dict[str, object]] = []
    images = []
    with Detector.open(tiny_bundle(), "onnxruntime", score_threshold=0.0) as detector:
        for number in range(3):
            pixels = np.random.default_rng(number).integers(0, 256, (60, 90, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
            images.append({"id": number, "file_name": f"{number}.png", "height": 60, "width": 90})
            found = detector(pixels)
            for class_id, info in enumerate(CLASSES):
                best = int(np.flatnonzero(found.class_id == class_id)[0])
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": number,
                        "category_id": info.dataset_id,
                        "bbox": [float(value) for value in found.xywh[best]],
                        "area": float(found.xywh[best, 2] * found.xywh[best, 3]),
                        "iscrowd": 0,
                    }
                )
    categories = [{"id": info.dataset_id, "name": info.name} for info in CLASSES]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_best_detections_as_truth_give_full_ap(backend: str, split: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = split.parent / "ap.json"
    assert main(["evaluate", str(tiny_bundle()), str(split), "--backend", backend, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"3 images, {backend} fp32" in printed
    record = json.loads(out.read_text())
    # In every class, the first of each image's detections is right, so precision starts at 1.
    assert record["metrics"]["images"] == 3
    assert record["metrics"]["ap"] > 0.5
    assert set(record["metrics"]["per_class"]) == {info.name for info in CLASSES}
    assert (record["backend"], record["precision"]) == (backend, "fp32")


def test_limit_and_half_precision(split: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "evaluate",
        str(tiny_bundle()),
        str(split),
        "--backend",
        "openvino",
        "--precision",
        "fp16",
        "--limit",
        "2",
    ]
    assert main(arguments) == 0
    assert "2 images, openvino fp16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "--limit: expected at least 1, got 0"),
        (["--batch", "0"], "--batch: expected at least 1, got 0"),
        (["--backend", "onnxruntime", "--precision", "fp16"], "backend 'onnxruntime' loads onnx of fp16"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, split: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tiny_bundle()), str(split), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_dataset_of_other_classes(split: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((split / "annotations.json").read_text())
    content["categories"][0]["name"] = "spoon"
    (split / "annotations.json").write_text(json.dumps(content))
    assert main(["evaluate", str(tiny_bundle()), str(split)]) == 2
    assert "spoon" in capsys.readouterr().err


def test_no_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tiny_bundle()), str(tmp_path)]) == 2
    assert f"No dataset at {tmp_path}" in capsys.readouterr().err


def test_model_table_of_unknown_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "yolo"]) == 2
    assert "unknown model family 'yolo'" in capsys.readouterr().err
