"""The form of a YOLO-Master that is exported: norms folded, and no expert computed that was not chosen.

1x1 experts are matrix products with gathered weights. Experts of different kernel sizes cannot be gathered; each stands
in a branch of the graph (ONNX: If) that runs when an image of the batch chose it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.deimv2.layers import fused_conv
from carpus.models.yolo.blocks import fuse_convs, fuse_pairs
from carpus.models.yolo_master.model import YOLOMaster
from carpus.models.yolo_master.moe import EfficientSparseMoE, ModularRouterExpertMoE
from carpus.models.yolo_master.routing import SpatialRouter

__all__ = ["BranchedExperts", "GatheredExperts", "deploy"]


class GatheredExperts(nn.Module):
    """A ``ModularRouterExpertMoE`` whose chosen experts are matrix products with gathered weights.

    There is no control flow that depends on values, and experts that are not chosen are not computed.

    Args:
        layer: the trained layer, in eval mode.
    """

    def __init__(self, layer: ModularRouterExpertMoE) -> None:
        super().__init__()
        self.routing = layer.routing
        self.shared_expert = layer.shared_expert
        up, down = [], []
        for expert in layer.experts:
            conv: Any = expert.conv
            first, first_norm, _, second, second_norm = conv
            up.append(fused_conv(first, first_norm))
            down.append(fused_conv(second, second_norm))
        for name, convs in (("up", up), ("down", down)):
            self.register_buffer(name, torch.stack([conv.weight.detach().flatten(1) for conv in convs]))
            biases = [conv.bias.detach()[:, None] for conv in convs if conv.bias is not None]
            self.register_buffer(f"{name}_bias", torch.stack(biases))
        self.up: Tensor
        self.up_bias: Tensor
        self.down: Tensor
        self.down_bias: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) -> (B, C, H, W), and a zero in the place of the auxiliary loss."""
        routing = self.routing(x)
        flat = x.flatten(2)
        total = self.shared_expert(x).flatten(2)
        for rank in range(routing.chosen.shape[1]):
            index = routing.chosen[:, rank]
            hidden = F.silu(self.up[index] @ flat + self.up_bias[index])
            part = self.down[index] @ hidden + self.down_bias[index]
            total = total + routing.weights.gather(1, index[:, None]).unsqueeze(2).to(part.dtype) * part
        return total.reshape(x.shape), x.new_zeros(())


class BranchedExperts(nn.Module):
    """An ``EfficientSparseMoE`` whose experts run when some image of the batch chose them, in the exported graph too.

    Without a choice, as released, all experts are mixed and there is no branch.

    Args:
        layer: the trained layer, in eval mode.
    """

    def __init__(self, layer: EfficientSparseMoE) -> None:
        super().__init__()
        self.routing = layer.routing
        self.threshold = layer.threshold
        self.norm = layer.norm
        self.experts = layer.experts
        for expert in self.experts:
            conv: Any = expert.conv
            conv.pointwise, conv.bn = fused_conv(conv.pointwise, conv.bn), nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) -> (B, C, H, W), and a zero in the place of the auxiliary loss."""
        routing = self.routing(x)
        weights = routing.weights
        if routing.chosen is not None:
            best = weights.amax(1, keepdim=True)
            weights = weights * ((weights >= self.threshold) | (weights >= best))
        parts = []
        for index, expert in enumerate(self.experts):
            weight = weights[:, index].reshape(-1, 1, 1, 1).to(x.dtype)
            if routing.chosen is None:
                parts.append(weight * expert(x))
            elif torch.compiler.is_exporting():
                parts.append(torch.cond((weight > 0).any(), _weighted(expert), _nothing, (x, weight)))
            elif (weight > 0).any():
                parts.append(weight * expert(x))
        return self.norm(sum(parts[1:], parts[0])), x.new_zeros(())


def _weighted(expert: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def branch(x: Tensor, weight: Tensor) -> Tensor:
        return weight * expert(x)

    return branch


def _nothing(x: Tensor, weight: Tensor) -> Tensor:
    """All weights are zero here; this gives zeros of the right size."""
    return weight * x


def deploy(model: YOLOMaster) -> YOLOMaster:
    """A copy in eval mode with the same outputs, up to rounding, and without what only training needs.

    Args:
        model: the trained detector; it is not changed.
    """
    copied = copy.deepcopy(model).eval()
    fuse_convs(copied)
    for index, layer in enumerate(copied.model):
        if isinstance(layer, EfficientSparseMoE):
            copied.model[index] = BranchedExperts(layer)
        if isinstance(layer, ModularRouterExpertMoE):
            if isinstance(layer.routing, SpatialRouter):
                fuse_pairs(layer.routing.router)
            fuse_pairs(layer.shared_expert)
            copied.model[index] = GatheredExperts(layer)
    return copied.requires_grad_(False)
