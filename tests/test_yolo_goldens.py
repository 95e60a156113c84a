"""YOLO-Master, the YOLO loss and the mixture-of-experts blocks against reference data."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.goldens.__main__ import main
from tests.goldens.runner import identified

OWN = Path(__file__).parent / "data" / "goldens"
ROOT = Path(os.environ.get("CARPUS_GOLDENS") or OWN)
QUICK = {"esmoe-n", "v0_1-n", "yolo_loss", "moe_ops"}


def _folders() -> list[object]:
    folders = [ROOT / "yolo_loss", *sorted(p for p in (ROOT / "yolo_master").glob("*") if p.is_dir())]
    return [pytest.param(f, id=f.name, marks=[] if f.name in QUICK else [pytest.mark.slow]) for f in folders]


@pytest.mark.parametrize("folder", _folders())
def test_reference_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([str(folder)])
    output = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in output.splitlines() if not line.startswith("  ok"))
    assert "goldens passed" in output


def test_there_is_reference_data() -> None:
    assert {"esmoe-n", "v0_1-n"} <= {p.name for p in (ROOT / "yolo_master").iterdir()}


def test_a_changed_weight_of_the_loss_fails_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("detection_loss.json", "detection_loss.npz"):
        shutil.copy(OWN / "yolo_loss" / name, tmp_path / name)
    with np.load(tmp_path / "detection_loss.npz") as data:
        arrays = {name: data[name] for name in data.files}
    arrays["main/target_gt_idx"][0, 7] += 1
    np.savez(tmp_path / "detection_loss.npz", **arrays)
    assert main([str(tmp_path), "--failures"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "FAIL" in line]
    assert len(lines) == 1
    assert "main object of each point" in lines[0]


@pytest.mark.parametrize(
    ("schema", "family", "variant"),
    [
        ({"model": "YOLO-Master EsMoE X"}, "yolo_master", "esmoe-x"),
        ({"model": "YOLO-Master v0.1 N"}, "yolo_master", "v0_1-n"),
        ({"family": "deimv2", "variant": "n"}, "deimv2", "n"),
        ({"model": "Something"}, None, None),
        ({}, None, None),
    ],
)
def test_family_and_variant_follow_from_the_model_name(schema, family, variant) -> None:
    found = identified(schema)
    assert (found.get("family"), found.get("variant")) == (family, variant)
