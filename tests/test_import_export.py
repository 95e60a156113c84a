"""From a published file through an import to a bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from carpus.cli.main import main
from carpus.export.source import load_source
from carpus.models.data.coco import CategoryMap
from carpus.models.torch_file import file_sha256
from carpus.runtime.bundle import Bundle
from carpus.runtime.errors import DataError
from tests.official_files import deimv2_training, official_state, pickled_detector, schema_folder

TRAINED = Path(__file__).resolve().parent.parent / "weights" / "deimv2-atto-tabletop.pt"


def bring_in(content: object, folder: Path, *options: str) -> Path:
    torch.save(content, folder / "published.pth")
    assert main(["import", str(folder / "published.pth"), "--out", str(folder / "in"), *options]) == 0
    return folder / "in"


def yolo(family: str, variant: str, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    state = official_state(schema_folder(family, variant))
    with pickled_detector(state) as net:
        return bring_in({"ema": net, "model": None}, folder, "--licence", "MIT"), state


@pytest.mark.parametrize(("family", "variant"), [("mamba_yolo", "T"), ("yolo_master", "esmoe-n")])
@pytest.mark.parametrize("file", ["", "model.safetensors", "config.json"])
def test_an_import_is_a_source_that_says_what_it_is(family: str, variant: str, file: str, tmp_path: Path) -> None:
    place, state = yolo(family, variant, tmp_path)
    source = load_source(place / file)
    assert (source.family, source.variant, source.input_size) == (family, variant, (640, 640))
    assert (source.name, source.licence) == (f"{family}-{variant}", "MIT")
    assert (len(source.classes), source.classes[0].name, source.classes[0].dataset_id) == (80, "person", 1)
    assert source.checkpoint_sha256 == file_sha256(place / "model.safetensors")
    assert dict(source.recipe) == {
        "source.file": "published.pth",
        "source.sha256": file_sha256(tmp_path / "published.pth"),
        "source.layout": "'ema', pickled module foreign_detector.DetectionModel",
    }
    assert not source.module.training
    for name, value in source.module.state_dict().items():
        expected = state[name].half().float() if value.is_floating_point() else state[name]
        assert torch.equal(value, expected), name


def test_what_is_said_against_an_import_is_refused(tmp_path: Path) -> None:
    place, _ = yolo("yolo_master", "esmoe-n", tmp_path)
    with pytest.raises(DataError, match=r"holds variant 'esmoe-n', not 'esmoe-s'; leave --variant out"):
        load_source(place, variant="esmoe-s")
    with pytest.raises(DataError, match=r"has 80 classes, 2 were given"):
        load_source(place, classes=CategoryMap(("a", "b"), (0, 1)))
    assert load_source(place, licence="AGPL-3.0-only").licence == "AGPL-3.0-only"


def test_a_transformer_alone_is_no_detector(tmp_path: Path) -> None:
    prefix = "backbone.dinov3._model."
    state = official_state(schema_folder("deimv2", "s"))
    place = bring_in({n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}, tmp_path)
    with pytest.raises(DataError, match=r"holds the transformer of a deimv2 s alone, which detects nothing"):
        load_source(place)


@pytest.mark.slow
def test_published_file_to_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = torch.load(TRAINED, weights_only=True)
    (tmp_path / "names.txt").write_text("\n".join(trained["classes"]["names"]))
    options = ["--class-names", str(tmp_path / "names.txt"), "--licence", "Apache-2.0"]
    place = bring_in(deimv2_training(trained["ema"]["module"]), tmp_path, *options)
    out = tmp_path / "out.carpus"
    assert main(["export", str(place), "--out", str(out), "--num-images", "2", "--precision", "onnx"]) == 0
    with Bundle.open(out) as bundle:
        manifest = bundle.manifest
    assert (manifest.family, manifest.variant, manifest.licence) == ("deimv2", "atto", "Apache-2.0")
    assert manifest.class_names == tuple(trained["classes"]["names"])
    assert manifest.provenance.checkpoint_sha256 == file_sha256(place / "model.safetensors")
    report = json.loads((place / "report.json").read_text())
    assert manifest.provenance.recipe["source.sha256"] == report["source"]["sha256"]
    assert main(["verify", str(out)]) == 0
    assert "passed" in capsys.readouterr().out


@pytest.mark.slow
def test_pickled_module_to_bundle(tmp_path: Path) -> None:
    place, _ = yolo("yolo_master", "esmoe-n", tmp_path)
    out = tmp_path / "out.carpus"
    assert main(["export", str(place), "--out", str(out), "--num-images", "1", "--precision", "onnx"]) == 0
    with Bundle.open(out) as bundle:
        manifest = bundle.manifest
    assert (manifest.family, manifest.variant, manifest.licence) == ("yolo_master", "esmoe-n", "MIT")
    assert all(record.passed for record in manifest.parity)
