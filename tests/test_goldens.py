"""The networks against reference data, and the runner that checks it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from carpus.models.deimv2.config import VARIANTS
from tests.goldens.__main__ import main
from tests.goldens.case import UnusableFolder, compare_stored, input_array
from tests.goldens.weights import evaluate_formula, named_values

OWN = Path(__file__).parent / "data" / "goldens"
ROOT = Path(os.environ.get("CARPUS_GOLDENS") or OWN)
SLOW = {"n", "pico", "s", "m", "l", "x"}


def _folders() -> list[object]:
    folders = [ROOT / "deimv2" / variant for variant in VARIANTS]
    return [
        pytest.param(folder, id=folder.name, marks=[pytest.mark.slow] if folder.name in SLOW else [])
        for folder in folders
        if (folder / "schema.json").is_file()
    ]


def test_there_is_reference_data() -> None:
    assert len(_folders()) == len(VARIANTS), f"{ROOT} lacks reference data of some variants"


@pytest.mark.parametrize("folder", _folders())
def test_reference_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([str(folder)])
    output = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in output.splitlines() if not line.startswith("  ok"))
    assert "goldens passed" in output


@pytest.fixture
def atto(tmp_path: Path) -> Path:
    """A copy of the atto eval case that a test may break."""
    folder = tmp_path / "atto"
    folder.mkdir()
    for name in ("schema.json", "case.json", "io.npz"):
        shutil.copy(OWN / "deimv2" / "atto" / name, folder / name)
    return folder


def test_a_changed_value_fails_by_name(atto: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with np.load(atto / "io.npz") as data:
        arrays = {name: data[name] for name in data.files}
    arrays["decoder.layers.1.boxes"][0, 3, 2] += 1e-4
    np.savez(atto / "io.npz", **arrays)
    assert main([str(atto), "--failures"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines if "FAIL" in line] == ["decoder.layers.1.boxes"]
    assert lines[-1].startswith("goldens failed: ")


def test_a_changed_hash_fails(atto: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads((atto / "schema.json").read_text())
    schema["weights_sha256"] = "0" * 64
    (atto / "schema.json").write_text(json.dumps(schema))
    assert main([str(atto), "--failures"]) == 1
    assert "FAIL schema    weights_sha256 " in capsys.readouterr().out


def test_cases_in_a_folder_of_their_own(atto: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (atto / "cases" / "one").mkdir(parents=True)
    for name in ("case.json", "io.npz"):
        (atto / name).rename(atto / "cases" / "one" / name)
    assert main([str(atto)]) == 0
    assert "  ok   forward   pred_boxes" in capsys.readouterr().out


def _schema(folder: Path, **changes: object) -> None:
    schema = json.loads((folder / "schema.json").read_text())
    (folder / "schema.json").write_text(json.dumps({**schema, **changes}))


def _case(folder: Path, **changes: object) -> None:
    case = json.loads((folder / "case.json").read_text())
    (folder / "case.json").write_text(json.dumps({**case, **changes}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: shutil.rmtree(f), "no such folder"),
        (lambda f: (f / "schema.json").unlink(), "holds no schema.json"),
        (lambda f: (f / "schema.json").write_text("{"), "not a usable schema"),
        (lambda f: (f / "io.npz").unlink(), "case.json needs io.npz, which is missing"),
        (lambda f: (f / "io.npz").write_bytes(b"no archive"), "cannot be read as an .npz file"),
        (lambda f: (f / "io.npz").write_bytes(b""), "cannot be read as an .npz file"),
        (lambda f: (f / "io.npz").write_bytes((f / "io.npz").read_bytes()[:9999]), "cannot be read as an .npz file"),
        (lambda f: _case(f, arrays={}), "forward: the files describe nothing to compare"),
        (lambda f: _case(f, input={"seed": 1, "shape": [1, 3, 33, 7]}), "multiples of 32 px, got (1, 3, 33, 7)"),
        (lambda f: _schema(f, state_dict=5), "schema: TypeError"),
        (lambda f: (f / "cases").mkdir(), "cases: holds no case; known are case.json with io.npz"),
        (lambda f: (f / "case.json").write_text("[]"), "expected a JSON object, found list"),
        (lambda f: (f / "case.json").write_text('{"arrays": {}}'), "field or array 'input' is missing"),
        (lambda f: _schema(f, family="yolo"), "no checks for family 'yolo'"),
        (lambda f: _schema(f, variant="xxl"), "unknown DEIMv2 variant 'xxl'; known variants: atto"),
    ],
)
def test_unusable_folders(atto: Path, spoil, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(atto)
    assert main([str(atto)]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out.splitlines()[-1].endswith("1 of 1 folders unusable")


def test_recipe_values() -> None:
    # values that the reference data states for atto
    weight = named_values("backbone.stem.stem1.conv.weight", (16, 3, 3, 3)).reshape(-1)
    assert weight[:3].tolist() == [0.1335485726594925, -0.26158061623573303, 0.25616544485092163]
    assert (named_values("a.running_var", (100,)) >= 0.5).all()


@pytest.mark.parametrize("formula", ["__import__('os')", "n.shape", "open(1)", "n if 1 else n", "n*"])
def test_formulas_are_no_programs(formula: str) -> None:
    with pytest.raises(UnusableFolder, match="override formula"):
        evaluate_formula(formula, np.ones(2), (2,))


def test_formula_of_a_mask() -> None:
    value = evaluate_formula("concatenate([ones(shape[0]//3), zeros(shape[0]//3), 0.5*n[:2]])", np.ones(6), (6,))
    assert value.tolist() == [1, 1, 0, 0, 0.5, 0.5]


def test_comparison_covers_what_is_not_stored() -> None:
    values = np.zeros(100, np.float32)
    spec = {"shape": [100], "storage": "strided", "stride": 7, "mean": 0.0, "std": 0.0, "absmax": 0.0}
    assert compare_stored("x", values, values[::7], spec, 1e-6).passed
    values[1] = 1.0  # between the stored elements
    assert not compare_stored("x", values, np.zeros(15, np.float32), spec, 1e-6).passed
    assert not compare_stored("x", values[:99], np.zeros(15, np.float32), spec, 9.0).passed
    assert not compare_stored("x", np.full(100, np.nan, np.float32), np.zeros(15, np.float32), spec, 9.0).passed


def test_unknown_input_kind() -> None:
    with pytest.raises(UnusableFolder, match="input kind 'photo' is not known"):
        input_array({"kind": "photo", "seed": 1, "shape": [1]})
