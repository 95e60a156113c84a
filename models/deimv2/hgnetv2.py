"""HGNetv2 backbone in the sizes that DEIMv2 uses (PP-HGNetV2 with learnable affine blocks)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.deimv2.config import BackboneConfig, StageConfig
from carpus.models.deimv2.layers import fused_conv

__all__ = ["ConvBNAct", "HGBlock", "HGNetv2", "LearnableAffine"]


class LearnableAffine(nn.Module):
    """y = scale * x + bias with two scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return self.scale * x + self.bias


class _ClampFrom(torch.autograd.Function):
    """max(x, bias), where x already contains the bias: the bias's gradient counts every element once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        # In place: the norm in front keeps its input for its own backward, not this.
        ctx.bound = float(bias.detach())
        ctx.mark_dirty(x.clamp_(min=ctx.bound))
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (out,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, out, ctx.bound), grad.sum().reshape(1)


def norm_relu_affine(x: Tensor, norm: nn.BatchNorm2d, affine: LearnableAffine) -> Tensor:
    """``affine(relu(norm(x)))`` in training mode with fewer passes over memory, for CPUs.

    scale * relu(z) + bias is max(scale * z + bias, bias) for a positive scale, and the affine part of z is the norm's
    own; what is left of the three steps after the norm is one clamp.
    """
    if float(affine.scale.detach()) <= 0.0:
        return affine(F.relu(norm(x)))
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    x = F.batch_norm(
        x,
        norm.running_mean,
        norm.running_var,
        norm.weight * affine.scale,
        norm.bias * affine.scale + affine.bias.detach(),
        training=True,
        momentum=norm.momentum if norm.momentum is not None else 0.1,
        eps=norm.eps,
    )
    return _ClampFrom.apply(x, affine.bias)


class Bound(nn.Module):
    """Keeps values at or above (``lower``) or at or below a number."""

    def __init__(self, value: float, *, lower: bool) -> None:
        super().__init__()
        self.value = value
        self.lower = lower

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return x.clamp(min=self.value) if self.lower else x.clamp(max=self.value)


class ConvBNAct(nn.Module):
    """Convolution, BatchNorm and, with ``act``, ReLU and a learnable affine.

    Args:
        in_channels: input channels.
        out_channels: output channels.
        kernel_size: kernel size k; padding is (k - 1) // 2, so none for k = 2.
        stride: stride.
        groups: convolution groups.
        act: False stops after the norm.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        groups: int = 1,
        *,
        act: bool = True,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, (kernel_size - 1) // 2, groups=groups, bias=False
        )
        self.bn: nn.Module = nn.BatchNorm2d(out_channels)
        self.act = act
        self.lab: nn.Module = LearnableAffine() if act else nn.Identity()
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H', W')."""
        x = self.conv(x)
        fast = self.act and self.bn.training and x.device.type == "cpu" and not torch.compiler.is_compiling()
        if fast and isinstance(self.bn, nn.BatchNorm2d) and isinstance(self.lab, LearnableAffine):
            return norm_relu_affine(x, self.bn, self.lab)
        x = self.bn(x)
        return self.lab(F.relu(x) if self.act else x)

    def fuse(self) -> None:
        """Fold the norm, and the affine together with the ReLU, into the convolution. Does nothing the second time.

        scale * relu(x) + bias is max(scale * x + bias, bias) for a positive scale and the min for a negative one: one
        clamp, which runtimes attach to the convolution, in place of three passes.
        """
        if not isinstance(self.bn, nn.BatchNorm2d):
            return
        self.conv = fused_conv(self.conv, self.bn)
        self.bn = nn.Identity()
        if isinstance(self.lab, LearnableAffine) and self.conv.bias is not None:
            scale, bias = float(self.lab.scale), float(self.lab.bias)
            with torch.no_grad():
                self.conv.weight *= scale
                self.conv.bias.mul_(scale).add_(bias)
            self.lab = Bound(bias, lower=scale >= 0.0)
            self.act = False


class LightConv(nn.Module):
    """1x1 convolution without activation, then a depthwise kxk one with it."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.conv1 = ConvBNAct(in_channels, out_channels, 1, act=False)
        self.conv2 = ConvBNAct(out_channels, out_channels, kernel_size, groups=out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H, W)."""
        return self.conv2(self.conv1(x))


class Stem(nn.Module):
    """Image to stride 4: a pooled and a convolved branch between 3x3 convolutions of stride 2."""

    def __init__(self, in_channels: int, mid_channels: int, out_channels: int) -> None:
        super().__init__()
        self.stem1 = ConvBNAct(in_channels, mid_channels, 3, 2)
        self.stem2a = ConvBNAct(mid_channels, mid_channels // 2, 2)
        self.stem2b = ConvBNAct(mid_channels // 2, mid_channels, 2)
        self.stem3 = ConvBNAct(2 * mid_channels, mid_channels, 3, 2)
        self.stem4 = ConvBNAct(mid_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H/4, W/4)."""
        x = F.pad(self.stem1(x), (0, 1, 0, 1))
        convolved = self.stem2b(F.pad(self.stem2a(x), (0, 1, 0, 1)))
        pooled = F.max_pool2d(x, 2, 1)
        return self.stem4(self.stem3(torch.cat([pooled, convolved], 1)))


class HGBlock(nn.Module):
    """Layers in sequence, all outputs and the input aggregated by two 1x1 convolutions."""

    def __init__(self, in_channels: int, config: StageConfig, *, identity: bool) -> None:
        super().__init__()
        mid, out = config.mid_channels, config.out_channels
        self.layers = nn.ModuleList()
        for i in range(config.num_layers):
            width = mid if i else in_channels
            self.layers.append(
                LightConv(width, mid, config.kernel_size) if config.light else ConvBNAct(width, mid, config.kernel_size)
            )
        self.aggregation = nn.Sequential(
            ConvBNAct(in_channels + config.num_layers * mid, out // 2, 1), ConvBNAct(out // 2, out, 1)
        )
        self.identity = identity

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H, W)."""
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(outputs[-1]))
        y = self.aggregation(torch.cat(outputs, 1))
        return y + x if self.identity else y


class Stage(nn.Module):
    """Optional depthwise downsampling, then HG blocks."""

    def __init__(self, config: StageConfig) -> None:
        super().__init__()
        channels = config.in_channels
        self.downsample = (
            ConvBNAct(channels, channels, 3, 2, channels, act=False) if config.downsample else nn.Identity()
        )
        self.blocks = nn.Sequential(
            *(HGBlock(config.out_channels if i else channels, config, identity=i > 0) for i in range(config.num_blocks))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H/2 or H, W/2 or W)."""
        return self.blocks(self.downsample(x))


class HGNetv2(nn.Module):
    """The backbone: stem and stages, returning the maps of ``config.return_stages``."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.return_stages = frozenset(config.return_stages)
        self.stem = Stem(*config.stem_channels)
        self.stages = nn.ModuleList(Stage(stage) for stage in config.stages)

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) in 0..1 -> maps (B, C_i, H/stride_i, W/stride_i), fine to coarse."""
        x = self.stem(images)
        maps = []
        for i, stage in enumerate(self.stages):
            x = stage(x)
            if i in self.return_stages:
                maps.append(x)
        return maps
