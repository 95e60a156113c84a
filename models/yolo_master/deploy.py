"""The form of a YOLO-Master that is exported: norms folded, 1x1 experts gathered instead of branched to."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.deimv2.layers import fused_conv
from carpus.models.yolo.blocks import fuse_convs
from carpus.models.yolo_master.model import YOLOMaster
from carpus.models.yolo_master.moe import EfficientSparseMoE, ModularRouterExpertMoE
from carpus.models.yolo_master.routing import SpatialRouter

__all__ = ["GatheredExperts", "deploy"]


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


def _fuse_pairs(sequence: nn.Sequential) -> None:
    """Fold every norm that follows a convolution in a sequence, in place; names of the others stay."""
    for index in range(len(sequence) - 1):
        conv, norm = sequence[index], sequence[index + 1]
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            sequence[index], sequence[index + 1] = fused_conv(conv, norm), nn.Identity()


def deploy(model: YOLOMaster) -> YOLOMaster:
    """A copy in eval mode with the same outputs, up to rounding, and without what only training needs.

    Args:
        model: the trained detector; it is not changed.
    """
    copied = copy.deepcopy(model).eval()
    fuse_convs(copied)
    for index, layer in enumerate(copied.model):
        if isinstance(layer, EfficientSparseMoE):
            for expert in layer.experts:
                conv = expert.conv
                conv.pointwise, conv.bn = fused_conv(conv.pointwise, conv.bn), nn.Identity()  # type: ignore[union-attr, arg-type]
        if isinstance(layer, ModularRouterExpertMoE):
            if isinstance(layer.routing, SpatialRouter):
                _fuse_pairs(layer.routing.router)
            _fuse_pairs(layer.shared_expert)
            copied.model[index] = GatheredExperts(layer)
    return copied.requires_grad_(False)
