"""Blocks of Mamba-YOLO (arXiv:2406.05835, section 3), with the submodule names of the published checkpoints.

The paper's ODSSBlock is ``VSSBlock`` in the backbone and ``XSSBlock`` in the neck: they differ in the input projection
and in how many state-space modules they chain.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from carpus.models.mamba_yolo.config import Activation, ScanConfig
from carpus.models.mamba_yolo.ss2d import SS2D
from carpus.models.yolo.blocks import batch_norm

__all__ = ["LSBlock", "LayerNorm2d", "RGBlock", "SimpleStem", "VSSBlock", "VisionClueMerge", "XSSBlock"]

MLP_RATIO = 4.0
LAYER_NORM_EPS = 1e-6


class LayerNorm2d(nn.Module):
    """Norm over the channels of every pixel.

    Args:
        channels: C.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SimpleStem(nn.Module):
    """Two 3x3 convolutions of stride 2; GELU after the first, SiLU after the second, as released.

    Args:
        in_channels: channels of the image.
        out_channels: output channels; half of them between the two convolutions.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        hidden = out_channels // 2
        self.conv = nn.Sequential(
            nn.Conv2d(in_channels, hidden, 3, 2, 1, bias=False),
            batch_norm(hidden),
            nn.GELU(),
            nn.Conv2d(hidden, out_channels, 3, 2, 1, bias=False),
            batch_norm(out_channels),
            nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H/4, W/4)."""
        return self.conv(x)


class VisionClueMerge(nn.Module):
    """Downsampling without loss: every 2x2 patch becomes channels, then a 1x1 convolution.

    Args:
        in_channels: input channels.
        out_channels: output channels.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.pw_linear = nn.Sequential(nn.Conv2d(4 * in_channels, out_channels, 1), batch_norm(out_channels), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W), H and W even -> (B, out, H/2, W/2)."""
        # order (row, column) of the patch: even even, odd even, even odd, odd odd
        patches = [x[:, :, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.pw_linear(torch.cat(patches, 1))


class LSBlock(nn.Module):
    """Local spatial block: depthwise 3x3, norm, two 1x1 convolutions with GELU between them, residual.

    Args:
        channels: C.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = batch_norm(channels)
        self.fc2 = nn.Conv2d(channels, channels, 1)
        self.act = nn.GELU()
        self.fc3 = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        return x + self.fc3(self.act(self.fc2(self.norm(self.fc1(x)))))


class RGBlock(nn.Module):
    """Residual gated block: a 1x1 convolution to two branches, one of which gates the other; no residual of its own.

    Args:
        channels: C.
        hidden: nominal hidden channels; two thirds of them are used.
        activation: of the gate.
    """

    def __init__(self, channels: int, hidden: int, activation: Activation = "gelu") -> None:
        super().__init__()
        hidden = int(2 * hidden / 3)
        self.fc1 = nn.Conv2d(channels, 2 * hidden, 1)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.act: nn.Module = nn.GELU() if activation == "gelu" else nn.SiLU()
        self.fc2 = nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        gate, values = self.fc1(x).chunk(2, 1)
        return self.fc2(self.act(self.dwconv(gate) + gate) * values)


class VSSBlock(nn.Module):
    """ODSSBlock of the backbone: projection, then local block and SS2D, then gated block, with two residuals.

    Args:
        in_channels: input channels.
        channels: output channels.
        scan: state-space operator.
        gate_activation: of the gated block.
    """

    def __init__(self, in_channels: int, channels: int, scan: ScanConfig, gate_activation: Activation = "gelu") -> None:
        super().__init__()
        self.proj_conv = nn.Sequential(nn.Conv2d(in_channels, channels, 1), batch_norm(channels), nn.SiLU())
        self.norm = LayerNorm2d(channels)
        self.op = SS2D(channels, scan)
        self.lsblock = LSBlock(channels)
        self.norm2 = LayerNorm2d(channels)
        self.mlp = RGBlock(channels, int(MLP_RATIO * channels), gate_activation)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, C, H, W)."""
        x = self.proj_conv(x)
        # the residual adds the block's input, not what the local block made of it
        x = x + self.op(self.norm(self.lsblock(x)))
        return x + self.mlp(self.norm2(x))


class XSSBlock(nn.Module):
    """ODSSBlock of the neck: several SS2D one after the other, projection only where the width changes.

    Args:
        in_channels: input channels.
        channels: output channels.
        num_scans: SS2D modules in the chain.
        scan: state-space operator.
        gate_activation: of the gated block.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        num_scans: int,
        scan: ScanConfig,
        gate_activation: Activation = "gelu",
    ) -> None:
        super().__init__()
        self.in_proj: nn.Module = nn.Identity()
        if in_channels != channels:
            self.in_proj = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, bias=False), batch_norm(channels), nn.SiLU()
            )
        self.norm = LayerNorm2d(channels)
        self.ss2d = nn.Sequential(*(SS2D(channels, scan) for _ in range(num_scans)))
        self.lsblock = LSBlock(channels)
        self.norm2 = LayerNorm2d(channels)
        self.mlp = RGBlock(channels, int(MLP_RATIO * channels), gate_activation)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, C, H, W)."""
        x = self.in_proj(x)
        x = x + self.ss2d(self.norm(self.lsblock(x)))
        return x + self.mlp(self.norm2(x))
