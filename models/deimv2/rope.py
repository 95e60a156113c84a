"""Rotary position embedding of image patches, as DINOv3 has it (arXiv:2508.10104; RoPE: arXiv:2104.09864)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["RotaryEmbedding", "rotate"]


def rotate(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """x * cos + (-x2, x1) * sin with (x1, x2) the halves of x.

    Args:
        x: (..., N, head_dim).
        sin, cos: (N, head_dim).

    Returns:
        (..., N, head_dim).
    """
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class RotaryEmbedding(nn.Module):
    """Sine and cosine of every patch's angles 2 pi c / period.

    The coordinates c are the patch centres in -1..1, y before x; periods are ``base^(i / (head_dim / 4))``.

    Args:
        head_dim: width of an attention head; a multiple of 4.
        grid_size: (height, width) [patches] whose sines and cosines `fuse` stores.
        prefix_tokens: tokens ahead of the patches, which are not rotated.
        base: ratio of the longest period to the shortest.
        rescale: in training the coordinates are multiplied by a factor log-uniform in (1 / rescale, rescale), drawn at
            every call; 1 leaves them.
    """

    def __init__(
        self, head_dim: int, grid_size: tuple[int, int], prefix_tokens: int, base: float = 100.0, rescale: float = 1.0
    ) -> None:
        super().__init__()
        self.prefix_tokens = prefix_tokens
        self.rescale = rescale
        self.grid_size = grid_size
        self.periods: Tensor
        self.table: Tensor | None
        quarter = head_dim // 4
        # the exponent in float32 steps, as published files hold the result
        exponents = 2.0 * torch.arange(quarter, dtype=torch.float32) / (head_dim // 2)
        self.register_buffer("periods", base**exponents)
        self.register_buffer("table", None, persistent=False)

    def fuse(self) -> None:
        """Store the result for the configured grid, in place. Not to be trained afterwards."""
        angles = self._angles(*self.grid_size)
        self.table = torch.stack([angles.sin(), angles.cos()])

    def _angles(self, height: int, width: int) -> Tensor:
        """(prefix + height * width, head_dim) angles [rad]; zero, which rotates by nothing, for the prefix."""
        dtype, device = self.periods.dtype, self.periods.device
        y = (torch.arange(height, dtype=dtype, device=device) + 0.5) / height * 2.0 - 1.0
        x = (torch.arange(width, dtype=dtype, device=device) + 0.5) / width * 2.0 - 1.0
        centres = torch.stack(torch.meshgrid(y, x, indexing="ij"), -1).reshape(-1, 2)
        angles = (2.0 * math.pi * centres[:, :, None] / self.periods).flatten(1).tile(2)
        return torch.cat([angles.new_zeros(self.prefix_tokens, angles.shape[1]), angles])

    def forward(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Sine and cosine, (prefix + height * width, head_dim) each, of a grid of patches."""
        if self.table is not None and (height, width) == self.grid_size:
            return self.table[0], self.table[1]
        angles = self._angles(height, width)
        if self.training and self.rescale != 1.0:
            bound = math.log(self.rescale)
            angles = angles * torch.empty((), device=angles.device).uniform_(-bound, bound).exp()
        return angles.sin(), angles.cos()
