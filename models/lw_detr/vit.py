"""The encoder of LW-DETR: a plain ViT whose tokens stay in window-major order.

Source: LW-DETR (arXiv:2406.03459), section 3.2. Windowed blocks attend inside each window and the others to all
tokens; as attention does not depend on the order of tokens, no block has to reorder them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.deimv2.layers import attend
from carpus.models.lw_detr.config import ViTConfig

__all__ = ["Record", "ViT", "from_window_major", "to_window_major"]

Record = Callable[[str, Tensor], None]
"""Receives named intermediate tensors; None in normal use."""


def to_window_major(x: Tensor, grid: int) -> Tensor:
    """(B, H, W, C) -> (B * grid^2, H/grid * W/grid, C): windows row-major, tokens row-major inside."""
    _, height, width, dim = x.shape
    rows, columns = height // grid, width // grid
    x = x.reshape(-1, grid, rows, grid, columns, dim).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(-1, rows * columns, dim)


def from_window_major(x: Tensor, grid: int, height: int, width: int) -> Tensor:
    """Inverse of `to_window_major`, channels first: (B * grid^2, H/grid * W/grid, C) -> (B, C, H, W)."""
    dim = x.shape[2]
    x = x.reshape(-1, grid, grid, height // grid, width // grid, dim).permute(0, 5, 1, 3, 2, 4)
    return x.reshape(-1, dim, height, width)


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., 2016): training leaves an image's branch out with probability ``rate``."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(N, ...) -> (N, ...), kept rows scaled by 1 / (1 - rate)."""
        if self.rate == 0.0 or not self.training:
            return x
        keep = 1.0 - self.rate
        mask = torch.empty(x.shape[0], *[1] * (x.dim() - 1), device=x.device, dtype=x.dtype).bernoulli_(keep)
        return x * (mask / keep)


class Attention(nn.Module):
    """Multi-head self-attention with biases on queries and values but none on keys."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, dim) -> (B, N, dim)."""
        count, dim = x.shape[1], x.shape[2]
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias).reshape(-1, count, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = attend(q * self.scale, k, v, fused=not torch.compiler.is_exporting())
        return self.proj(out.transpose(1, 2).reshape(-1, count, dim))


class FeedForward(nn.Module):
    """fc2(GELU(fc1(x)))."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Pre-norm transformer block with layer scale.

    Args:
        config: sizes.
        windows: windows that are joined for attention; 1 attends inside each window.
        drop_path: stochastic depth.
    """

    def __init__(self, config: ViTConfig, windows: int, drop_path: float) -> None:
        super().__init__()
        dim = config.dim
        self.windows = windows
        self.gamma_1 = nn.Parameter(torch.full((dim,), 0.1))
        self.gamma_2 = nn.Parameter(torch.full((dim,), 0.1))
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, config.num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = FeedForward(dim, config.mlp_ratio * dim)
        self.drop_path = DropPath(drop_path)
        self.all_windows = config.window_grid**2

    def forward(self, x: Tensor) -> Tensor:
        """(B * windows, N, dim) window-major -> the same."""
        count, dim = x.shape[1], x.shape[2]
        attended = self.attn(self.norm1(x).reshape(-1, self.windows * count, dim)).reshape(-1, count, dim)
        x = x + self._dropped(self.gamma_1 * attended)
        return x + self._dropped(self.gamma_2 * self.mlp(self.norm2(x)))

    def _dropped(self, branch: Tensor) -> Tensor:
        """Leave a branch out for whole images, which are ``all_windows`` rows each."""
        if self.drop_path.rate == 0.0 or not self.training:
            return branch
        return self.drop_path(branch.unflatten(0, (-1, self.all_windows))).flatten(0, 1)


class PatchEmbed(nn.Module):
    """Non-overlapping patches to tokens."""

    def __init__(self, dim: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, H/patch, W/patch, dim)."""
        return self.proj(images).permute(0, 2, 3, 1)


class ViT(nn.Module):
    """Vision transformer without class token and without final norm.

    Args:
        config: sizes.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.pos_embed = nn.Parameter(torch.zeros(1, config.pretrained_grid**2 + 1, config.dim))
        self.patch_embed = PatchEmbed(config.dim, config.patch_size)
        everything = config.window_grid**2
        self.blocks = nn.ModuleList(
            Block(config, 1 if i in config.windowed else everything, config.drop_path * i / max(config.depth - 1, 1))
            for i in range(config.depth)
        )
        self.fixed_positions: Tensor | None
        self.register_buffer("fixed_positions", None, persistent=False)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @property
    def out_channels(self) -> tuple[int, ...]:
        """Channels of the maps that are returned."""
        return (self.config.dim,) * len(self.config.taken)

    def positions(self, height: int, width: int) -> Tensor:
        """Position embedding (1, height, width, dim): the learned grid without its class entry, resized bicubically."""
        side = self.config.pretrained_grid
        grid = self.pos_embed[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, (height, width), mode="bicubic", align_corners=False)
        return grid.permute(0, 2, 3, 1)

    def fix_positions(self, height: int, width: int) -> None:
        """Resize the position embedding once for inputs of (height, width) patches; other sizes then fail."""
        with torch.no_grad():
            self.fixed_positions = self.positions(height, width).contiguous()

    def forward(self, images: Tensor, record: Record | None = None) -> list[Tensor]:
        """(B, 3, H, W), H and W multiples of 64 -> the taken blocks' maps, each (B, dim, H/16, W/16)."""
        x = self.patch_embed(images)
        height, width = x.shape[1], x.shape[2]
        positions = self.positions(height, width) if self.fixed_positions is None else self.fixed_positions
        if record:
            record("vit.patch_embed_bhwc", x)
            record("vit.pos_embed_interp", positions)
        grid = self.config.window_grid
        x = to_window_major(x + positions, grid)
        if record:
            record("vit.block0_input_window_major", x)
        maps = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if record:
                record(f"vit.blocks.{i}", x)
            if i in self.config.taken:
                maps.append(from_window_major(x, grid, height, width))
        return maps
