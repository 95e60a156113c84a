"""Mamba-YOLO: reference data, and properties that it does not show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from carpus.models.build import build_criterion, build_model
from carpus.models.mamba_yolo.blocks import RGBlock, VisionClueMerge
from carpus.models.mamba_yolo.config import VARIANTS, MambaYOLOConfig, ScanConfig, get_config
from carpus.models.mamba_yolo.model import MambaYOLO
from carpus.models.mamba_yolo.ss2d import SS2D
from carpus.runtime.errors import DataError
from tests.goldens.__main__ import main

OWN = Path(__file__).parent / "data" / "goldens"
ROOT = Path(os.environ.get("CARPUS_GOLDENS") or OWN)
SCANS = [ScanConfig(), ScanConfig(kind="mamba3", headdim=8, chunk_size=8)]
S6_PARAMETERS = {"x_proj_weight", "Ds", "A_logs", "dt_projs_weight", "dt_projs_bias"}
PER_DIRECTION = S6_PARAMETERS | {"proj", "dt_bias", "B_bias", "C_bias", "D"}


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def _folders() -> list[Path]:
    return [path for path in sorted((ROOT / "mamba_yolo").glob("*")) if path.is_dir()]


def test_there_is_reference_data() -> None:
    assert {path.name for path in _folders()} >= {"T", "blocks"}


@pytest.mark.parametrize("folder", _folders(), ids=lambda path: path.name)
def test_reference_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([str(folder)])
    output = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in output.splitlines() if not line.startswith("  ok"))


@pytest.mark.parametrize(
    ("variant", "parameters"),
    [("T", 6_131_704), ("B", 21_828_000), ("L", 57_631_024), ("paper-T", 5_879_924), ("paper-L", 53_466_160)],
)
def test_parameters(variant: str, parameters: int) -> None:
    with torch.device("meta"):
        model = MambaYOLO(get_config(variant))
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("variant", ["T", "paper-T", "mamba3-T"])
def test_trains_and_detects(variant: str) -> None:
    model, criterion = build_model("mamba_yolo", variant, 3), build_criterion("mamba_yolo", variant, 3)
    images = torch.rand(2, 3, 64, 96)
    targets: list[dict[str, Tensor]] = [
        {"labels": torch.tensor([2]), "boxes": torch.tensor([[0.5, 0.5, 0.4, 0.5]])},
        {"labels": torch.zeros(0, dtype=torch.int64), "boxes": torch.zeros(0, 4)},
    ]
    losses = criterion(model.train()(images), targets)
    assert set(losses) == {"loss_box", "loss_cls", "loss_dfl"}
    torch.stack(list(losses.values())).sum().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name, p in trained.items() if p.grad is None or not p.grad.isfinite().all()] == []
    with torch.inference_mode():
        outputs = model.eval()(images)
    positions = 64 * 96 // 64 * (1 + 4 + 16) // 16
    assert outputs["pred_logits"].shape == (2, positions, 3)
    assert outputs["pred_boxes"].shape == (2, positions, 4)
    assert outputs["pred_boxes"].isfinite().all()


def test_learns_one_image() -> None:
    model, criterion = build_model("mamba_yolo", "T", 2).train(), build_criterion("mamba_yolo", "T", 2)
    images = torch.rand(2, 3, 64, 64)
    targets = [{"labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.4, 0.6, 0.5]])}] * 2
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    history = []
    for _ in range(12):
        loss = torch.stack(list(criterion(model(images), targets).values())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(float(loss.detach()))
    assert min(history[-3:]) < 0.7 * history[0]


@pytest.mark.parametrize("scan", SCANS, ids=lambda scan: scan.kind)
def test_scans_of_oblong_maps_commute_with_transposition(scan: ScanConfig) -> None:
    """A transposed map with the row and column directions exchanged gives the transposed result."""
    block = SS2D(16, scan).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        turned = SS2D(16, scan).double()
        turned.load_state_dict(block.state_dict())
        for name, parameter in turned.named_parameters():
            if name == "conv2d.weight":
                parameter.copy_(parameter.transpose(2, 3).clone())
            elif name.removeprefix("scan.") in PER_DIRECTION:
                parameter.copy_(parameter.unflatten(0, (4, -1))[[1, 0, 3, 2]].flatten(0, 1))
        x = torch.randn(2, 16, 3, 7, dtype=torch.float64)
        torch.testing.assert_close(turned(x.transpose(2, 3)).transpose(2, 3), block(x))
        assert not torch.allclose(block(x.transpose(2, 3)).transpose(2, 3), block(x), rtol=1e-3)


@pytest.mark.parametrize("scan", SCANS, ids=lambda scan: scan.kind)
def test_every_position_reaches_every_other(scan: ScanConfig) -> None:
    block = SS2D(8, scan)
    x = torch.randn(1, 8, 5, 6, requires_grad=True)
    block(x)[0, :, 2, 3].sum().backward()
    assert x.grad is not None
    assert (x.grad.abs().sum(1) > 0).all()


def test_merge_keeps_the_order_of_patches() -> None:
    merge = VisionClueMerge(1, 4).eval()
    seen: list[Tensor] = []
    merge.pw_linear.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    merge(torch.tensor([[[[0.0, 2.0], [1.0, 3.0]]]]))
    assert seen[0].flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_gate_activation_is_a_choice() -> None:
    blocks = [RGBlock(8, 32, activation) for activation in ("gelu", "silu")]
    blocks[1].load_state_dict(blocks[0].state_dict())
    x = torch.randn(1, 8, 4, 4)
    assert not torch.allclose(blocks[0](x), blocks[1](x), atol=1e-3)
    config = MambaYOLOConfig("T", 0.33, 0.25, 1024, gate_activation="silu")
    assert any(isinstance(m.act, torch.nn.SiLU) for m in MambaYOLO(config).modules() if isinstance(m, RGBlock))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_config("S"), "known variants: T, B, L, paper-T"),
        (lambda: get_config("T", 0), "num_classes must be at least 1"),
        (lambda: get_config("T").with_input_size(100, 64), "multiples of 32 px"),
        (lambda: MambaYOLOConfig("T", 1, 1, 64, gate_activation="relu"), "unknown gate activation 'relu'"),
        (lambda: ScanConfig(kind="s4"), "unknown scan 's4'; known scans: s6, mamba3"),
        (lambda: ScanConfig(d_state=0), "d_state must be at least 1"),
        (lambda: MambaYOLO(get_config("T"))(torch.rand(1, 3, 64, 50)), "multiples of 32 px"),
    ],
)
def test_refusals(make, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()


def test_all_variants_are_consistent() -> None:
    assert all(config.variant == name for name, config in VARIANTS.items())
    assert get_config("L").repeats == (2, 2, 6, 2)
    assert get_config("paper-L").repeats == (2, 4, 4, 2)
    assert get_config("L").channels == (96, 192, 384, 576)
