"""YOLO-Master: properties that reference data does not show."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from carpus.models.build import build_criterion, build_model
from carpus.models.yolo_master.attention import AreaAttention
from carpus.models.yolo_master.config import VARIANTS, MoEConfig, get_config
from carpus.models.yolo_master.deploy import deploy
from carpus.models.yolo_master.model import YOLOMaster
from carpus.models.yolo_master.moe import EfficientSparseMoE, ModularRouterExpertMoE, build_moe
from carpus.models.yolo_master.routing import diversity_loss, importance_usage_loss, mean_square_balance_loss
from carpus.runtime.errors import DataError


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def stirred(module: nn.Module) -> nn.Module:
    """Random weights and statistics of a size that keeps the signal alive through the network."""
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith(("running_mean", "bias")):
                tensor.normal_(0.0, 0.2)
            elif name.endswith("bn.weight") and (".attn." in name or ".mlp." in name):
                tensor.fill_(0.3)
            elif tensor.is_floating_point() and tensor.dim() > 1 and "dfl" not in name:
                tensor.normal_(0.0, math.sqrt(2.0 / tensor[0].numel()))
    return module


def model_of(variant: str) -> YOLOMaster:
    model = YOLOMaster(get_config(variant, 3))
    stirred(model)
    return model


def counted(layer: nn.Module) -> list[int]:
    """Images that each expert sees from now on, in one call."""
    seen = [0] * len(layer.experts)  # type: ignore[arg-type]
    for index, expert in enumerate(layer.experts):  # type: ignore[arg-type]

        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], index: int = index) -> None:
            seen[index] += inputs[0].shape[0]

        expert.register_forward_pre_hook(hook)
    return seen


SPARSE = MoEConfig("es_moe", (4,), top_k=2)
MODULAR = MoEConfig("modular", (8,), top_k=2, noise_std=1.0, balance_weight=0.01, z_weight=0.001)


@pytest.mark.parametrize(("config", "experts"), [(SPARSE, 4), (MODULAR, 8)])
def test_inference_runs_the_chosen_experts_only(config: MoEConfig, experts: int) -> None:
    layer = stirred(build_moe(16, experts, config)).eval()
    x = torch.randn(5, 16, 8, 8)
    seen = counted(layer)
    with torch.inference_mode():
        layer(x)
        chosen = layer.routing(x).chosen  # type: ignore[operator, union-attr]
    assert seen == [int((chosen == index).sum()) for index in range(experts)]
    assert sum(seen) == 10


def test_sparse_and_dense_inference_agree_and_the_threshold_drops_weak_experts() -> None:
    layer = stirred(EfficientSparseMoE(16, 4, SPARSE)).eval()
    x = torch.randn(5, 16, 8, 8)
    with torch.inference_mode():
        sparse = layer(x)[0]
        layer.sparse = False  # type: ignore[assignment]
        torch.testing.assert_close(layer(x)[0], sparse, rtol=1e-5, atol=1e-5)
        layer.sparse, layer.threshold = True, 1.0  # type: ignore[assignment]
        seen = counted(layer)
        layer(x)
    assert sum(seen) == 5


def test_soft_and_hard_routing_are_the_same_numbers() -> None:
    layer = stirred(EfficientSparseMoE(16, 4, SPARSE))
    x = torch.randn(5, 16, 8, 8)
    torch.testing.assert_close(layer.train().routing(x).weights, layer.eval().routing(x).weights, rtol=0, atol=3e-6)  # type: ignore[operator, union-attr]


def test_losses_of_balance_and_diversity() -> None:
    assert float(mean_square_balance_loss(torch.full((3, 4), 0.25))) == 0
    assert float(mean_square_balance_loss(torch.eye(4)[:1])) > 0.1
    same, different = torch.ones(2, 3, 5), torch.eye(5)[None, :3]
    assert float(diversity_loss(same)) == pytest.approx(1.0, rel=1e-6)
    assert float(diversity_loss(different)) == 0
    assert float(diversity_loss(torch.ones(2, 1, 5))) == 0
    logits, chosen = torch.zeros(4, 4), torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])
    assert float(importance_usage_loss(logits, chosen, balance_weight=1, z_weight=0)) == pytest.approx(1.0)


def test_router_noise_is_for_training_only() -> None:
    layer = stirred(ModularRouterExpertMoE(16, 8, MODULAR))
    x = torch.randn(2, 16, 8, 8)
    layer.routing.train()  # type: ignore[union-attr]
    assert not torch.equal(layer.routing(x).logits, layer.routing(x).logits)  # type: ignore[operator, union-attr]
    layer.eval()
    assert torch.equal(layer.routing(x).logits, layer.routing(x).logits)  # type: ignore[operator, union-attr]
    assert float(layer(x)[1]) == 0


def test_areas_attend_separately() -> None:
    attention = stirred(AreaAttention(32, area=2)).eval()
    attention.pe = nn.Module()  # type: ignore[union-attr]
    attention.pe.forward = torch.zeros_like  # type: ignore[union-attr, method-assign, assignment]
    x = torch.randn(1, 32, 4, 3)
    changed = x.clone()
    changed[:, :, 2:] += 1.0
    with torch.inference_mode():
        before, after = attention(x), attention(changed)
    torch.testing.assert_close(before[:, :, :2], after[:, :, :2])
    assert not torch.allclose(before[:, :, 2:], after[:, :, 2:])
    with pytest.raises(DataError, match="multiple of 32, got 48"):
        AreaAttention(48)


@pytest.mark.parametrize("variant", ["esmoe-n", "v0_1-n", "paper-n"])
def test_eval_output_and_deployed_form(variant: str) -> None:
    model = model_of(variant).eval()
    images = torch.rand(2, 3, 64, 96)
    with torch.inference_mode():
        before = model(images)
        after = deploy(model)(images)
        one = model(images[1:])
    positions = 8 * 12 + 4 * 6 + 2 * 3
    assert before["pred_logits"].shape == (2, positions, 3)
    assert before["pred_boxes"].shape == (2, positions, 4)
    assert float(before["pred_logits"].std()) > 0.05
    for name in before:
        limit = 1e-4 * float(before[name].abs().max())
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=limit)
        torch.testing.assert_close(one[name], before[name][1:], rtol=0, atol=limit)


@pytest.mark.parametrize("variant", ["esmoe-n", "v0_1-n", "paper-n"])
def test_training_reduces_the_loss(variant: str) -> None:
    model = build_model("yolo_master", variant, 3).train()
    criterion = build_criterion("yolo_master", variant, 3)
    images = torch.rand(2, 3, 64, 64)
    targets = [
        {"labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.6, 0.4]])},
        {"labels": torch.tensor([0, 2]), "boxes": torch.tensor([[0.3, 0.3, 0.4, 0.4], [0.7, 0.6, 0.3, 0.5]])},
    ]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    values = []
    for _ in range(8):
        losses = criterion(model(images, targets), targets)
        assert ("loss_dfl" in losses) == (variant != "paper-n")
        total = torch.stack(list(losses.values())).sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        values.append(float(total.detach()))
    assert all(math.isfinite(value) for value in values)
    assert min(values[4:]) < values[0]


def test_paper_configuration() -> None:
    config = get_config("paper-s")
    assert config.moe.num_experts == (4, 4, 4, 4)
    assert (config.moe.top_k, config.reg_max, config.loss.dfl) == (2, 1, 0.0)
    model = YOLOMaster(config)
    kernels = [e.conv.depthwise.kernel_size[0] for e in model.model[3].experts]  # type: ignore[union-attr]
    assert kernels == [3, 5, 7, 9]
    assert not hasattr(model.head, "dfl")


def test_all_variants_build() -> None:
    assert len(VARIANTS) == 15
    with torch.device("meta"):
        for name, config in VARIANTS.items():
            assert YOLOMaster(config).config.variant == name


def test_a_copy_is_independent() -> None:
    model = model_of("esmoe-n").eval()
    reference = copy.deepcopy(model.state_dict())
    deploy(model)
    assert all(torch.equal(value, reference[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_config("esmoe-q"), "unknown YOLO-Master variant 'esmoe-q' .*; known variants: esmoe-n, esmoe-s"),
        (lambda: get_config("esmoe-n", 0), "num_classes must be at least 1, got 0"),
        (lambda: get_config("esmoe-n").with_input_size(100, 64), "multiples of 32 px, got"),
        (lambda: MoEConfig("es_moe", (3, 4), top_k=4), r"between 1 and the experts of the smallest layer \(3\)"),
        (lambda: replace(get_config("v0_1-n"), moe=SPARSE), "names 1 layers, the layout has 3"),
        (lambda: model_of("esmoe-n")(torch.rand(1, 3, 60, 64)), "multiples of 32 px, got"),
        (lambda: model_of("esmoe-n")(torch.rand(3, 64, 64)), r"must be \(B, 3, H, W\)"),
        (lambda: MoEConfig("modular", (4,), top_k=None), "must choose experts"),
    ],
)
def test_wrong_values(make, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()
