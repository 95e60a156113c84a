"""The projector of LW-DETR: aggregated encoder maps to the decoder's levels.

Source: LW-DETR (arXiv:2406.03459), section 3.1: multi-level feature aggregation and a C2f block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.deimv2.layers import fused_conv
from carpus.models.lw_detr.vit import Record

__all__ = ["C2f", "ChannelNorm", "ConvX", "Projector"]

WIDE = 512
"""Channels above this are halved by a 1x1 convolution before they are upsampled."""


class ConvX(nn.Module):
    """Convolution without bias ("same" padding), BatchNorm, activation."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, *, act: type[nn.Module] = nn.SiLU
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(out_channels)
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H/stride, W/stride)."""
        return self.act(self.bn(self.conv(x)))

    def fuse(self) -> None:
        """Fold the norm into the convolution, in place. Does nothing the second time."""
        if isinstance(self.bn, nn.BatchNorm2d):
            self.conv = fused_conv(self.conv, self.bn)
            self.bn = nn.Identity()


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels of a map."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Bottleneck(nn.Module):
    """Two 3x3 convolutions without shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cv1 = ConvX(channels, channels, 3)
        self.cv2 = ConvX(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        return self.cv2(self.cv1(x))


class C2f(nn.Module):
    """Split, a chain of bottlenecks, and a convolution over everything on the way.

    Args:
        in_channels: input channels.
        out_channels: output channels; half of them run through the chain.
        num_bottlenecks: length of the chain.
    """

    def __init__(self, in_channels: int, out_channels: int, num_bottlenecks: int = 3) -> None:
        super().__init__()
        half = out_channels // 2
        self.cv1 = ConvX(in_channels, 2 * half, 1)
        self.cv2 = ConvX((2 + num_bottlenecks) * half, out_channels, 1)
        self.m = nn.ModuleList(Bottleneck(half) for _ in range(num_bottlenecks))

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H, W)."""
        parts = list(self.cv1(x).chunk(2, 1))
        for bottleneck in self.m:
            parts.append(bottleneck(parts[-1]))
        return self.cv2(torch.cat(parts, 1))


def _sampling(level: str, channels: int) -> tuple[nn.Sequential, int]:
    """Layers that bring a map of stride 16 to a level, and the channels that leave them."""
    if level == "P4":
        return nn.Sequential(), channels
    if level == "P5":
        return nn.Sequential(ConvX(channels, channels, 3, 2, act=nn.ReLU)), channels
    if channels > WIDE:
        half = channels // 2
        up = nn.ConvTranspose2d(half, channels // 4, 2, 2)
        return nn.Sequential(ConvX(channels, half, 1, act=nn.ReLU), up), channels // 4
    return nn.Sequential(nn.ConvTranspose2d(channels, channels // 2, 2, 2)), channels // 2


class Projector(nn.Module):
    """Per level: every aggregated map brought to its resolution, concatenated, C2f, channel norm.

    Args:
        in_channels: channels of the aggregated maps, all of stride 16 px.
        levels: "P3" (stride 8), "P4" (16), "P5" (32).
        out_channels: channels of every level.
    """

    def __init__(self, in_channels: tuple[int, ...], levels: tuple[str, ...], out_channels: int) -> None:
        super().__init__()
        samplings, stages = [], []
        for level in levels:
            made = [_sampling(level, channels) for channels in in_channels]
            samplings.append(nn.ModuleList(layers for layers, _ in made))
            total = sum(channels for _, channels in made)
            stages.append(nn.Sequential(C2f(total, out_channels), ChannelNorm(out_channels)))
        self.stages_sampling = nn.ModuleList(samplings)
        self.stages = nn.ModuleList(stages)

    def forward(self, maps: list[Tensor], record: Record | None = None) -> list[Tensor]:
        """Aggregated maps (B, C_j, H, W) -> one map (B, out, H_l, W_l) per level."""
        levels = []
        for i, (samplings, stage) in enumerate(zip(self.stages_sampling, self.stages, strict=True)):
            sampled = [layers(x) for layers, x in zip(samplings, maps, strict=True)]  # type: ignore[call-overload]
            level = stage(torch.cat(sampled, 1))
            if record:
                for j, x in enumerate(sampled):
                    record(f"projector.sampling.{i}.{j}", x)
                record(f"projector.out.{i}", level)
            levels.append(level)
        return levels
