"""The two mixture-of-experts layers of YOLO-Master.

Eager inference computes the chosen experts only. While a graph is captured no step may depend on the values, so there
all experts run and are weighted; ``carpus.models.yolo_master.deploy`` makes a form that avoids this for 1x1 experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.yolo.blocks import batch_norm
from carpus.models.yolo_master.config import MoEConfig
from carpus.models.yolo_master.routing import (
    GlobalRouter,
    SpatialRouter,
    diversity_loss,
    importance_usage_loss,
    mean_square_balance_loss,
)

__all__ = ["EfficientSparseMoE", "ModularRouterExpertMoE", "build_moe", "expert_kernels"]


def _capturing() -> bool:
    """Whether a graph is being captured, so that control flow must not depend on values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def expert_kernels(num_experts: int) -> tuple[int, ...]:
    """Kernel sizes of the depthwise experts: 3, 5, 7, 9, ..."""
    return tuple(3 + 2 * i for i in range(num_experts))


class SeparableConv(nn.Module):
    """Depthwise k x k and 1x1 convolution, BatchNorm, SiLU."""

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(
            channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, bias=False
        )
        self.pointwise = nn.Conv2d(channels, channels, 1, bias=False)
        self.bn = batch_norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        return F.silu(self.bn(self.pointwise(self.depthwise(x))))


class Expert(nn.Module):
    """One expert: a ``conv`` submodule, as the published checkpoints name it."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        return self.conv(x)


def _dispatch(experts: nn.ModuleList, x: Tensor, weights: Tensor, start: Tensor) -> Tensor:
    """``start`` plus the weighted sum of the experts, each run on the images that chose it only.

    Args:
        experts: E modules.
        x: (B, C, H, W).
        weights: (B, E), zero where an expert is not chosen.
        start: (B, C, H, W) to add to.
    """
    total = start
    for index, expert in enumerate(experts):
        rows = weights[:, index].nonzero().flatten()
        if rows.numel():
            part = weights[rows, index].reshape(-1, 1, 1, 1) * expert(x[rows])
            total = total.index_add(0, rows, part.to(total.dtype))
    return total


def _mix(experts: nn.ModuleList, x: Tensor, weights: Tensor, start: Tensor) -> Tensor:
    """As ``_dispatch``, with every expert run on every image."""
    total = start
    for index, expert in enumerate(experts):
        output = expert(x)
        total = total + weights[:, index].reshape(-1, 1, 1, 1).to(output.dtype) * output
    return total


class EfficientSparseMoE(nn.Module):
    """ES-MoE: depthwise-separable experts with growing kernels, mixed by a global router (arXiv:2512.23273).

    Args:
        channels: channels of the map.
        num_experts: experts E.
        config: choice of experts and losses.
    """

    def __init__(self, channels: int, num_experts: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.sparse = True
        self.threshold = config.threshold
        self.routing = GlobalRouter(channels, num_experts, config.top_k)
        self.experts = nn.ModuleList(Expert(SeparableConv(channels, k)) for k in expert_kernels(num_experts))
        self.norm = nn.Sequential(batch_norm(channels), nn.SiLU())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) -> (B, C, H, W) and the auxiliary loss, a scalar."""
        routing = self.routing(x)
        loss = self.config.balance_weight * mean_square_balance_loss(routing.weights)
        weights = routing.weights
        if routing.chosen is not None and not self.training and self.sparse:
            first = F.one_hot(routing.chosen[:, 0], weights.shape[1]).to(torch.bool)
            weights = weights * (first | (weights >= self.threshold))
            if not _capturing():
                return self.norm(_dispatch(self.experts, x, weights, torch.zeros_like(x))), loss
        if not (self.training and self.config.diversity_weight):
            return self.norm(_mix(self.experts, x, weights, torch.zeros_like(x))), loss
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        loss = loss + self.config.diversity_weight * diversity_loss(outputs.mean((3, 4)))
        mixed = (weights[:, :, None, None, None].to(outputs.dtype) * outputs).sum(1)
        return self.norm(mixed), loss


class ModularRouterExpertMoE(nn.Module):
    """v0.1 mixture: 1x1 experts of double width beside one shared expert, chosen by a convolutional router.

    In training the BatchNorm statistics of an expert come from the images that chose it only.

    Args:
        channels: channels of the map.
        num_experts: experts E.
        config: choice of experts and losses; ``top_k`` must be given.
    """

    def __init__(self, channels: int, num_experts: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.routing = SpatialRouter(channels, num_experts, config.top_k or num_experts, config.noise_std)
        self.experts = nn.ModuleList(Expert(_pointwise_expert(channels)) for _ in range(num_experts))
        self.shared_expert = nn.Sequential(
            nn.Conv2d(channels, channels, 1, bias=False), batch_norm(channels), nn.SiLU()
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) -> (B, C, H, W) and the auxiliary loss, a scalar (zero in eval mode)."""
        routing = self.routing(x)
        shared = self.shared_expert(x)
        if not self.training:
            mix = _mix if _capturing() else _dispatch
            return mix(self.experts, x, routing.weights, shared), x.new_zeros(())
        loss = importance_usage_loss(
            routing.logits,
            routing.chosen,
            balance_weight=self.config.balance_weight,
            z_weight=self.config.z_weight,
        )
        return _dispatch(self.experts, x, routing.weights, shared), loss


def _pointwise_expert(channels: int) -> nn.Sequential:
    hidden = 2 * channels
    return nn.Sequential(
        nn.Conv2d(channels, hidden, 1, bias=False),
        batch_norm(hidden),
        nn.SiLU(),
        nn.Conv2d(hidden, channels, 1, bias=False),
        batch_norm(channels),
    )


def build_moe(channels: int, num_experts: int, config: MoEConfig) -> EfficientSparseMoE | ModularRouterExpertMoE:
    """The layer that the configuration names."""
    layer = EfficientSparseMoE if config.kind == "es_moe" else ModularRouterExpertMoE
    return layer(channels, num_experts, config)
