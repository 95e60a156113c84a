"""Area attention and the blocks made of it ("YOLOv12", arXiv:2502.12524, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from carpus.models.yolo.blocks import C3k, Conv
from carpus.runtime.errors import DataError

__all__ = ["A2C2f", "ABlock", "AreaAttention"]

HEAD_DIM = 32


class AreaAttention(nn.Module):
    """Self-attention inside horizontal strips of the map, with a depthwise 7x7 convolution as position signal.

    Args:
        dim: channels, a multiple of the head width 32.
        area: strips of equal size that attend separately; 1 attends globally. H * W must be a multiple of it.
    """

    def __init__(self, dim: int, area: int = 1) -> None:
        super().__init__()
        if dim % HEAD_DIM:
            raise DataError(f"area attention needs a width that is a multiple of {HEAD_DIM}, got {dim}")
        self.area = area
        self.num_heads = dim // HEAD_DIM
        self.qkv = Conv(dim, 3 * dim, act=False)
        self.proj = Conv(dim, dim, act=False)
        self.pe = Conv(dim, dim, 7, groups=dim, act=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, dim, H, W) -> (B, dim, H, W)."""
        batch, dim, height, width = x.shape
        # Channels are grouped by head: q, k and v of head 0, then of head 1, and so on.
        heads = self.qkv(x).reshape(batch, self.num_heads, 3, HEAD_DIM, self.area, -1)
        query, key, value = heads.permute(2, 0, 4, 1, 5, 3).unbind(0)
        weights = (query * HEAD_DIM**-0.5 @ key.transpose(-2, -1)).softmax(-1)
        mixed = (weights @ value).permute(0, 2, 4, 1, 3).reshape(batch, dim, height, width)
        values = heads[:, :, 2].reshape(batch, dim, height, width)
        return self.proj(mixed + self.pe(values))


class ABlock(nn.Module):
    """Area attention and a convolutional MLP, each with a residual.

    Args:
        dim: channels.
        mlp_ratio: hidden width of the MLP relative to ``dim``.
        area: strips that attend separately.
    """

    def __init__(self, dim: int, mlp_ratio: float, area: int) -> None:
        super().__init__()
        self.attn = AreaAttention(dim, area)
        hidden = int(dim * mlp_ratio)
        self.mlp = nn.Sequential(Conv(dim, hidden), Conv(hidden, dim, act=False))

    def forward(self, x: Tensor) -> Tensor:
        """(B, dim, H, W) -> (B, dim, H, W)."""
        x = x + self.attn(x)
        return x + self.mlp(x)


class A2C2f(nn.Module):
    """Groups of two ABlocks chained on a half-width branch, all outputs concatenated (R-ELAN).

    Args:
        in_channels: input channels.
        out_channels: output channels; half of them are the width of the groups.
        num_blocks: groups.
        attention: groups of ABlocks; otherwise each group is a ``C3k``.
        area: strips that attend separately.
        residual: add the output to the input, scaled by channel; needs ``in_channels == out_channels``.
        mlp_ratio: hidden width of the ABlocks' MLP.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_blocks: int = 1,
        *,
        attention: bool = True,
        area: int = 1,
        residual: bool = False,
        mlp_ratio: float = 2.0,
    ) -> None:
        super().__init__()
        hidden = out_channels // 2
        self.cv1 = Conv(in_channels, hidden)
        self.cv2 = Conv((1 + num_blocks) * hidden, out_channels)
        self.gamma = nn.Parameter(torch.full((out_channels,), 0.01)) if attention and residual else None

        def group() -> nn.Module:
            if not attention:
                return C3k(hidden, hidden)
            return nn.Sequential(*(ABlock(hidden, mlp_ratio, area) for _ in range(2)))

        self.m = nn.ModuleList(group() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H, W)."""
        parts = [self.cv1(x)]
        for group in self.m:
            parts.append(group(parts[-1]))
        y = self.cv2(torch.cat(parts, 1))
        return y if self.gamma is None else x + self.gamma.reshape(1, -1, 1, 1) * y
