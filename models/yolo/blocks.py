"""Convolution blocks that the YOLO families share.

Every BatchNorm has eps 1e-3 and momentum 0.03. Names of submodules are those of the published checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from carpus.models.deimv2.layers import fused_conv

__all__ = ["SPPF", "Bottleneck", "C3k", "C3k2", "Concat", "Conv", "batch_norm", "fuse_convs", "fuse_pairs"]

BN_EPS = 1e-3
BN_MOMENTUM = 0.03


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """A BatchNorm with the eps and momentum of the YOLO families."""
    return nn.BatchNorm2d(channels, eps=BN_EPS, momentum=BN_MOMENTUM)


class Conv(nn.Module):
    """Convolution without bias, BatchNorm, SiLU; "same" padding for odd kernels.

    Args:
        in_channels: input channels.
        out_channels: output channels.
        kernel_size: odd kernel size.
        stride: stride.
        groups: convolution groups; equal to the channels for a depthwise convolution.
        act: apply SiLU at the end.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 1,
        stride: int = 1,
        groups: int = 1,
        *,
        act: bool = True,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, (kernel_size - 1) // 2, groups=groups, bias=False
        )
        self.bn: nn.Module = batch_norm(out_channels)
        self.act: nn.Module = nn.SiLU() if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H/stride, W/stride)."""
        return self.act(self.bn(self.conv(x)))

    def fuse(self) -> None:
        """Fold the norm into the convolution, in place. Does nothing the second time."""
        if isinstance(self.bn, nn.BatchNorm2d):
            self.conv = fused_conv(self.conv, self.bn)
            self.bn = nn.Identity()


def fuse_convs(model: nn.Module) -> None:
    """Fuse every ``Conv`` inside a model, in place; for eval and export only."""
    for module in model.modules():
        if isinstance(module, Conv):
            module.fuse()


def fuse_pairs(sequence: nn.Sequential) -> None:
    """Fold every norm that follows a convolution in a sequence, in place; names of the others stay."""
    for index in range(len(sequence) - 1):
        conv, norm = sequence[index], sequence[index + 1]
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            sequence[index], sequence[index + 1] = fused_conv(conv, norm), nn.Identity()


class Concat(nn.Module):
    """Concatenation along the channels."""

    def forward(self, maps: list[Tensor]) -> Tensor:
        """(B, C_i, H, W) each -> (B, sum of C_i, H, W)."""
        return torch.cat(maps, 1)


class Bottleneck(nn.Module):
    """Two 3x3 convolutions with an additive shortcut.

    Args:
        in_channels: input channels.
        out_channels: output channels.
        expansion: width between the two convolutions, relative to the output.
        shortcut: add the input; only where input and output have equally many channels.
    """

    def __init__(self, in_channels: int, out_channels: int, *, expansion: float = 0.5, shortcut: bool = True) -> None:
        super().__init__()
        hidden = int(out_channels * expansion)
        self.cv1 = Conv(in_channels, hidden, 3)
        self.cv2 = Conv(hidden, out_channels, 3)
        self.add = shortcut and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H, W)."""
        y = self.cv2(self.cv1(x))
        return x + y if self.add else y


class C3k(nn.Module):
    """Cross-stage block: n bottlenecks on one 1x1 branch, concatenated with a second 1x1 branch.

    Args:
        in_channels: input channels.
        out_channels: output channels.
        num_blocks: bottlenecks n.
        expansion: width of each branch relative to the output.
    """

    def __init__(self, in_channels: int, out_channels: int, num_blocks: int = 2, *, expansion: float = 0.5) -> None:
        super().__init__()
        hidden = int(out_channels * expansion)
        self.cv1 = Conv(in_channels, hidden)
        self.cv2 = Conv(in_channels, hidden)
        self.cv3 = Conv(2 * hidden, out_channels)
        self.m = nn.Sequential(*(Bottleneck(hidden, hidden, expansion=1.0) for _ in range(num_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H, W)."""
        return self.cv3(torch.cat([self.m(self.cv1(x)), self.cv2(x)], 1))


class C3k2(nn.Module):
    """Split block: a 1x1 convolution halved in two, n inner blocks chained on the second half, all concatenated.

    Args:
        in_channels: input channels.
        out_channels: output channels.
        num_blocks: inner blocks n.
        c3k: inner blocks are ``C3k`` instead of ``Bottleneck``.
        expansion: width of a half relative to the output.
    """

    def __init__(
        self, in_channels: int, out_channels: int, num_blocks: int = 1, *, c3k: bool = False, expansion: float = 0.5
    ) -> None:
        super().__init__()
        hidden = int(out_channels * expansion)
        self.cv1 = Conv(in_channels, 2 * hidden)
        self.cv2 = Conv((2 + num_blocks) * hidden, out_channels)
        self.m = nn.ModuleList(C3k(hidden, hidden) if c3k else Bottleneck(hidden, hidden) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H, W)."""
        parts = list(self.cv1(x).chunk(2, 1))
        for block in self.m:
            parts.append(block(parts[-1]))
        return self.cv2(torch.cat(parts, 1))


class SPPF(nn.Module):
    """Spatial pyramid pooling: three successive stride-1 max-pools, concatenated with their input.

    Args:
        in_channels: input channels; half of them are pooled.
        out_channels: output channels.
        kernel_size: odd window of the max-pools [cells].
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 5) -> None:
        super().__init__()
        hidden = in_channels // 2
        self.cv1 = Conv(in_channels, hidden)
        self.cv2 = Conv(4 * hidden, out_channels)
        self.m = nn.MaxPool2d(kernel_size, 1, kernel_size // 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H, W)."""
        parts = [self.cv1(x)]
        for _ in range(3):
            parts.append(self.m(parts[-1]))
        return self.cv2(torch.cat(parts, 1))
