"""Where imports are written, what they leave alone, and the licences that bundles carry."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from carpus.cli.main import main
from carpus.export.source import load_source
from carpus.models.build import build_model
from carpus.models.data.coco import CategoryMap
from carpus.models.engine_checkpoint import save_atomic
from carpus.models.published.folder import ImportedWeights, find_config, read_imported, write_imported
from carpus.models.published.reader import read_published
from carpus.runtime.errors import DataError

SMALL = ImportedWeights(
    "deimv2", "atto", "detector", (320, 320), CategoryMap(("a",), (0,)), "MIT", {}, {"a": torch.ones(2)}
)
REPORT: dict[str, Any] = {"counts": {}}


def test_a_file_that_is_no_import_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine.safetensors"
    save_file({"b": torch.zeros(3)}, mine)
    before = mine.read_bytes()
    with pytest.raises(DataError, match=r"mine.safetensors exists and belongs to no import of weights of that name"):
        write_imported(SMALL, REPORT, mine)
    assert mine.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine.safetensors"]
    (tmp_path / "x.config.json").write_text('{"model_type": "foreign"}')
    with pytest.raises(DataError, match=r"x.config.json exists and belongs to no import"):
        write_imported(SMALL, REPORT, tmp_path / "x.safetensors")


def test_weights_of_a_folder_are_not_replaced_alone(tmp_path: Path) -> None:
    write_imported(SMALL, REPORT, tmp_path / "in")
    with pytest.raises(DataError, match=r"model.safetensors exists and belongs to no import of weights of that name"):
        write_imported(SMALL, REPORT, tmp_path / "in" / "model.safetensors")


@pytest.mark.parametrize("mask", [0o022, 0o007])
def test_an_earlier_import_is_replaced_with_the_usual_rights(mask: int, tmp_path: Path) -> None:
    out = tmp_path / "mine.safetensors"
    before = os.umask(mask)
    try:
        for licence in ("MIT", "Apache-2.0"):
            write_imported(dataclasses.replace(SMALL, licence=licence), REPORT, out)
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert read_imported(out).licence == "Apache-2.0"
    assert out.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("weights", ["null", '["model.safetensors"]', '"model.safetensors"', "3"])
def test_a_configuration_without_weights_is_none_of_theirs(weights: str, tmp_path: Path) -> None:
    save_file({"b": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(f'{{"format": "carpus.weights", "version": 1, "weights": {weights}}}')
    assert find_config(tmp_path / "model.safetensors") is None
    with pytest.raises(DataError, match=r"config.json is damaged"):
        read_imported(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_names_that_are_no_text(zipped: bool, tmp_path: Path) -> None:
    content = {"model": {"a": torch.zeros(1), 3: torch.zeros(1)}}
    torch.save(content, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(DataError, match=r"holds no weights; .* .a name under 'model' is a int"):
        read_published(tmp_path / "w.pth")


@pytest.mark.parametrize(("stated", "licence"), [("AGPL-3.0 License (https://x)", "AGPL-3.0"), (None, "NOASSERTION")])
def test_published_files_keep_the_licence_that_they_state(stated: str | None, licence: str, tmp_path: Path) -> None:
    content: dict[str, Any] = {"model": build_model("deimv2", "atto", 80).state_dict()}
    torch.save(content if stated is None else {**content, "license": stated}, tmp_path / "w.pth")
    assert load_source(tmp_path / "w.pth", family="deimv2", variant="atto").licence == licence
    assert load_source(tmp_path / "w.pth", family="deimv2", variant="atto", licence="MIT").licence == "MIT"


def test_the_command_says_when_no_licence_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": build_model("deimv2", "atto", 80).state_dict()}, tmp_path / "w.pth")
    command = ["export", str(tmp_path / "w.pth"), "--family", "deimv2", "--variant", "atto"]
    command += ["--out", str(tmp_path / "out.carpus"), "--images", str(tmp_path / "none")]
    assert main(command) == 2
    assert "so the bundle says NOASSERTION; name it with --licence." in capsys.readouterr().err
    assert main([*command, "--licence", "MIT"]) == 2
    assert "licence" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recorded", "licence"),
    [
        ({"init": None}, "Apache-2.0"),
        ({"identity": {"init": None}}, "Apache-2.0"),
        ({"init": "yolo.pt"}, "NOASSERTION"),
        ({"identity": {"init": "yolo.pt"}}, "NOASSERTION"),
        ({}, "NOASSERTION"),
    ],
)
def test_only_trainings_from_random_weights_are_ours(recorded: dict[str, Any], licence: str, tmp_path: Path) -> None:
    content = {
        "family": "deimv2",
        "variant": "atto",
        "input_size": [320, 320],
        "classes": {"names": ["cup"], "dataset_ids": [4]},
        "ema": {"module": build_model("deimv2", "atto", 1).state_dict()},
        "progress": {"epoch": 3},
        "metrics": {},
        "recipe": {},
        "seed": 7,
        **recorded,
    }
    save_atomic(content, tmp_path / "best.pt")
    assert load_source(tmp_path / "best.pt").licence == licence
    assert load_source(tmp_path / "best.pt", licence="MIT").licence == "MIT"
