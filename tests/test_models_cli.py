"""`carpus models`: the table, one variant, JSON, and names that are not there."""

from __future__ import annotations

import json

import pytest

from carpus.cli.main import main
from carpus.cli.models_text import table_text
from carpus.export.families import EXPORT_FAMILIES
from carpus.export.support import support_of
from carpus.models.build import FAMILIES
from carpus.models.recipe_table import RECIPES
from carpus.models.summary import ModelRow, model_row, variants_of


@pytest.fixture(scope="module")
def rows() -> list[ModelRow]:
    names = variants_of("lw_detr")[:2] + variants_of("mamba_yolo")[:4] + variants_of("yolo_master")[:3]
    return [model_row(*name) for name in names]


@pytest.mark.parametrize("columns", [80, 99, 100, 120])
def test_the_table_fits_the_terminal(rows: list[ModelRow], columns: int) -> None:
    text = table_text(rows, {(row.family, row.variant): support_of(row.family, row.variant) for row in rows}, columns)
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    heads = [line.split() for line in lines if line.startswith("variant")]
    assert len(heads) == 3
    assert ("training" in heads[0]) == (columns >= 100)
    for row in rows:
        (line,) = [line for line in lines if line.split(" ")[0] == row.variant]
        assert f"{row.params_inference / 1e6:.2f}" in line
    for note in {note for row in rows for note in row.notes}:
        assert any(line.startswith(f"{letter}: ") for letter in "abcdef" for line in lines), note


def test_one_variant_in_detail(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "lw_detr", "tiny"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "12,052,002 in training, 9,072,366 deployed",
        "11.2 in the authors' model zoo (a multiply-accumulate counted once), -6.5%",
        "11.19 counted alike, the same when rounded",
        "note: The authors count a multiply-accumulate once",
        "Apache-2.0 (published weights)",
        "export onnx, openvino",
    ):
        assert part in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "mamba_yolo", "T", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["family"], row["variant"], row["input_size"]) == ("mamba_yolo", "T", [640, 640])
    assert row["params_training"] == 6_131_688
    assert row["published"]["gflops"] == 13.2
    assert row["gflops"] == pytest.approx(row["gflops_parts"]["layers"] + row["gflops_parts"]["products"], abs=1e-3)
    assert row["difference"]["params"] == pytest.approx(6_131_688 / 5.8e6 - 1, abs=1e-4)
    assert set(row["notes"]) == {"mamba-params", "mamba-gflops"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lw-detr"], "unknown model family 'lw-detr' (did you mean 'lw_detr'?)"),
        (["yolo_master", "v0.1-n"], "unknown yolo_master variant 'v0.1-n' (did you mean 'v0_1-n'?)"),
    ],
)
def test_unknown_names_are_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_support_is_what_the_tables_say() -> None:
    for family, variant in variants_of():
        support = support_of(family, variant)
        assert support.recipes == tuple(n for n in RECIPES if variant in RECIPES[n].get(family, {}))
        assert support.onnx == support.openvino == (family in EXPORT_FAMILIES)
    assert not support_of("mamba_yolo", "mamba3-T").published
    assert support_of("mamba_yolo", "T").published
    assert set(FAMILIES) >= set(EXPORT_FAMILIES)
