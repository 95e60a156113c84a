"""Counted figures against published ones, and against torch's own counter on real passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from carpus.models.build import FAMILIES, build_model
from carpus.models.counting import SCAN_OPERATIONS, count, shapes_only
from carpus.models.deimv2.config import VARIANTS
from carpus.models.deimv2.deploy import deploy
from carpus.models.figures import FAMILY_FACTS, NOTES, PUBLISHED, licence_of
from carpus.models.summary import TOLERANCE, Difference, ModelRow, model_row, model_table, variants_of
from carpus.runtime.errors import DataError

SCHEMAS = Path(__file__).parent / "data" / "goldens"


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str], ModelRow]:
    return {(row.family, row.variant): row for row in model_table()}


def test_the_table_has_every_variant_of_every_family(table: dict[tuple[str, str], ModelRow]) -> None:
    assert list(table) == [(name, variant) for name, family in FAMILIES.items() for variant in family.variants]
    assert set(FAMILY_FACTS) == set(FAMILIES)
    assert set(PUBLISHED) <= set(table)
    assert all(row.count.layers > 0 and row.params_inference <= row.params_training * 1.01 for row in table.values())


def test_deimv2_agrees_with_reference_data(table: dict[tuple[str, str], ModelRow]) -> None:
    for variant in VARIANTS:
        row = table["deimv2", variant]
        schema = json.loads((SCHEMAS / "deimv2" / variant / "schema.json").read_text())
        assert row.params_training == schema["parameters"]["trainable_total"]
        assert row.params_inference == schema["parameters"]["deploy_form_all"]
        # which leaves out the products inside the transformer backbones
        flops = schema["flops_counted_here"]["deploy_form_flops_2xMAC_conv_matmul_attention"]
        backbone = row.count.gflops * 1e9 - flops
        assert round(backbone) == _backbone_products(variant)


def _backbone_products(variant: str) -> int:
    vit: Any = VARIANTS[variant].backbone
    if not hasattr(vit, "storage_tokens"):
        return 0
    return 4 * (40 * 40 + 1 + vit.storage_tokens) ** 2 * vit.dim * vit.depth


@pytest.mark.parametrize(
    ("name", "trained", "deployed"),
    [
        (("lw_detr", "tiny"), 12_052_002, 9_072_366),
        (("lw_detr", "xlarge"), 118_033_378, 110_866_222),
        (("lw_detr", "resnet50"), 34_087_746, 30_546_638),
        (("mamba_yolo", "T"), 6_131_688, None),
        (("mamba_yolo", "L"), 57_631_008, None),
        (("mamba_yolo", "paper-B"), 20_882_452, None),
        (("yolo_master", "esmoe-n"), 2_694_348, None),
        (("yolo_master", "v0_1-x"), 131_160_712, None),
    ],
)
def test_parameters(
    table: dict[tuple[str, str], ModelRow], name: tuple[str, str], trained: int, deployed: int | None
) -> None:
    assert table[name].params_training == trained
    assert deployed is None or table[name].params_inference == deployed


def test_every_large_difference_is_explained(table: dict[tuple[str, str], ModelRow]) -> None:
    for row in table.values():
        for difference in (row.params_difference, row.gflops_difference):
            if difference is not None and abs(difference.relative) > TOLERANCE:
                assert difference.explained_by in NOTES, (row.family, row.variant)
                assert difference.explained_by in row.notes
    assert set(NOTES) == {note for row in table.values() for note in row.notes}


UNEXPLAINED = {("yolo_master", "v0_1-n"), ("yolo_master", "v0_1-s")} | {
    ("mamba_yolo", variant) for variant in ("T", "B", "paper-T", "paper-B")
}


def test_counting_as_the_authors_do_gives_their_figures(table: dict[tuple[str, str], ModelRow]) -> None:
    for name, row in table.items():
        if row.alike_difference is None or not row.notes or row.gflops_difference.explained_by is None:
            continue
        if name in UNEXPLAINED:
            assert "unexplained" in NOTES[row.gflops_difference.explained_by]
        else:
            assert abs(row.alike_difference.relative) < 0.01, name


@pytest.mark.parametrize(("variant", "stated"), [("T", 14.3), ("B", 49.7), ("L", 156.2)])
def test_mamba_yolo_as_its_configuration_files_state_it(
    table: dict[tuple[str, str], ModelRow], variant: str, stated: float
) -> None:
    assert round(table["mamba_yolo", variant].alike or 0.0, 1) == stated


@pytest.mark.parametrize(
    ("family", "variant"),
    [("deimv2", "atto"), ("lw_detr", "tiny"), ("mamba_yolo", "T"), ("mamba_yolo", "mamba3-T")]
    + [("yolo_master", variant) for variant in ("esmoe-n", "v0_1-n")],
)
def test_counting_by_shapes_equals_a_real_pass(family: str, variant: str) -> None:
    size = (256, 320)
    torch.manual_seed(0)
    model = build_model(family, variant, 3, size).eval().requires_grad_(False)
    # torch's counter does not see inside the processor's fused attention
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, *size))
    with shapes_only():
        shapes = build_model(family, variant, 3, size).eval()
    assert round(count(shapes, size).gflops * 1e9) == counter.get_total_flops()
    assert sum(p.numel() for p in shapes.parameters()) == sum(p.numel() for p in model.parameters())


def test_deployed_forms_are_counted_like_a_real_pass() -> None:
    model = deploy(build_model("deimv2", "n", 3, (320, 320)).eval(), fuse="official")  # type: ignore[arg-type]
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 320, 320))
    with shapes_only():
        shapes = deploy(build_model("deimv2", "n", 3, (320, 320)).eval(), fuse="official")  # type: ignore[arg-type]
    assert round(count(shapes, (320, 320)).gflops * 1e9) == counter.get_total_flops()


def test_of_unequal_experts_the_mean_counts() -> None:
    size = (128, 128)
    torch.manual_seed(0)
    model = build_model("yolo_master", "paper-n", 3, size).eval().requires_grad_(False)
    with shapes_only():
        counted = count(build_model("yolo_master", "paper-n", 3, size).eval(), size).gflops * 1e9
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, *size))
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert counted != counter.get_total_flops()


def test_the_scan_is_counted_by_its_formula() -> None:
    row = model_row("mamba_yolo", "T")
    # blocks per stage and map: one SS2D of four directions, inner width 2 C, 16 states
    blocks = [
        (32, 160, 1),
        (64, 80, 1),
        (128, 40, 3),
        (256, 20, 1),
        (128, 40, 1),
        (64, 80, 1),
        (128, 40, 1),
        (256, 20, 1),
    ]
    steps = sum(4 * side**2 * 2 * channels * 16 * count for channels, side, count in blocks)
    assert row.count.scan == pytest.approx(SCAN_OPERATIONS * steps / 1e9)
    assert model_row("mamba_yolo", "mamba3-T").count.scan == 0.0


@pytest.mark.parametrize(
    ("here", "published", "digits", "relative"),
    [(0.757, 0.8, 1, 0.0), (7.02, 6.8, 1, 0.0324), (0.5, 1.0, 1, -0.5), (0.849, 0.8, 1, 0.0), (0.851, 0.8, 1, 0.06375)],
)
def test_differences_within_the_rounding_of_print_are_none(
    here: float, published: float, digits: int, relative: float
) -> None:
    assert Difference(here, published, digits, None).relative == pytest.approx(relative, abs=1e-4)


def test_licences() -> None:
    assert licence_of("lw_detr", "tiny") == "Apache-2.0"
    assert licence_of("mamba_yolo", "T") == licence_of("yolo_master", "esmoe-n") == "AGPL-3.0"
    assert "DINOv3 License" in (licence_of("deimv2", "x") or "")
    for name in (("yolo_master", "paper-n"), ("mamba_yolo", "paper-T"), ("mamba_yolo", "mamba3-L")):
        assert licence_of(*name) is None


def test_unknown_names() -> None:
    with pytest.raises(DataError, match=r"unknown model family 'lw_det' \(did you mean 'lw_detr'\?\)"):
        variants_of("lw_det")
    with pytest.raises(DataError, match=r"unknown lw_detr variant 'tin' \(did you mean 'tiny'\?\)"):
        variants_of("lw_detr", "tin")
    assert variants_of("lw_detr", "tiny") == [("lw_detr", "tiny")]
