"""Counted figures against published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carpus.models.deimv2.config import VARIANTS, get_config
from carpus.models.summary import attention_gflops, model_table
from carpus.runtime.errors import DataError

SCHEMAS = Path(__file__).parent / "data" / "goldens" / "deimv2"


def test_table_agrees_with_the_published_figures() -> None:
    rows = model_table(["deimv2"])
    assert [(row.family, row.variant) for row in rows] == [("deimv2", v) for v in VARIANTS]
    for row in rows:
        schema = json.loads((SCHEMAS / row.variant / "schema.json").read_text())
        assert row.trainable_params == schema["parameters"]["trainable_total"]
        assert row.deploy_params == schema["parameters"]["deploy_form_all"]
        flops = schema["flops_counted_here"]["deploy_form_flops_2xMAC_conv_matmul_attention"]
        assert round(row.gflops * 1e9) == flops
        assert row.fused_params < row.deploy_params
        assert row.published is not None
        # printed with one decimal
        assert row.deploy_params / 1e6 == pytest.approx(row.published.params_m, abs=0.05)
        assert row.gflops == pytest.approx(row.published.gflops, rel=0.06)


def test_attention_that_the_authors_do_not_count() -> None:
    # S: 1600 patches and a class token, 12 blocks, two products of 2 * 1601^2 * 192
    assert attention_gflops(get_config("s")) == pytest.approx(12 * 2 * 2 * 1601**2 * 192 / 1e9)
    assert attention_gflops(get_config("n")) == 0.0


def test_unknown_family() -> None:
    with pytest.raises(DataError, match="unknown model family 'yolo'; known families: deimv2"):
        model_table(["yolo"])
