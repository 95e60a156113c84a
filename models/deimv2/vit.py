"""Vision transformer with rotary positions: DINOv3's ViT-S and ViT-S+, and the distilled ViT-Tiny and ViT-Tiny+.

"DINOv3", arXiv:2508.10104; the small distilled ones: "Real-Time Object Detection Meets DINOv3", arXiv:2509.20787.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.deimv2.config import ViTConfig
from carpus.models.deimv2.layers import attend
from carpus.models.deimv2.rope import RotaryEmbedding, rotate

__all__ = ["VisionTransformer"]


class PatchEmbed(nn.Module):
    """Non-overlapping patches to tokens."""

    def __init__(self, dim: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, H/patch * W/patch, dim), row by row."""
        return self.proj(images).flatten(2).transpose(1, 2)


class MaskedLinear(nn.Linear):
    """Linear layer whose bias is multiplied by a constant mask: 1 for queries and values, 0 for keys.

    Published files hold the mask; a constructed layer has the same one.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 3 * dim)
        self.bias_mask: Tensor | None
        self.register_buffer("bias_mask", torch.cat([torch.ones(dim), torch.zeros(dim), torch.ones(dim)]))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., 3 * dim)."""
        return F.linear(x, self.weight, self.bias if self.bias_mask is None else self.bias * self.bias_mask)


class Attention(nn.Module):
    """Multi-head self-attention with rotated queries and keys."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        dim = config.dim
        self.num_heads = config.num_heads
        self.head_dim = dim // config.num_heads
        self.qkv = MaskedLinear(dim) if config.mask_key_bias else nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.query_scale: float | None = 1.0 / math.sqrt(self.head_dim)

    def fuse(self) -> None:
        """Fold bias mask and softmax scale into the projection, in place. Does nothing the second time."""
        with torch.no_grad():
            if isinstance(self.qkv, MaskedLinear) and self.qkv.bias_mask is not None:
                self.qkv.bias.mul_(self.qkv.bias_mask)
                self.qkv.bias_mask = None
            if self.query_scale is not None:
                self.qkv.weight[: self.proj.in_features].mul_(self.query_scale)
                self.qkv.bias[: self.proj.in_features].mul_(self.query_scale)
                self.query_scale = None

    def forward(self, x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        """(B, N, dim) with the angles' sine and cosine (N, head_dim) -> (B, N, dim)."""
        q, k, v = self.qkv(x).unflatten(-1, (3 * self.num_heads, self.head_dim)).transpose(1, 2).chunk(3, 1)
        q, k = rotate(q, sin, cos), rotate(k, sin, cos)
        if self.query_scale is not None:
            q = q * self.query_scale
        return self.proj(attend(q, k, v, fused=self.training).transpose(1, 2).flatten(2))


class GELUFeedForward(nn.Module):
    """fc2(GELU(fc1(x)))."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    @property
    def last(self) -> nn.Linear:
        """The layer that makes the output."""
        return self.fc2

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return self.fc2(F.gelu(self.fc1(x)))


class GatedFeedForward(nn.Module):
    """w3(silu(w1 x) * w2 x), SwiGLU with separate projections."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim)
        self.w2 = nn.Linear(dim, hidden_dim)
        self.w3 = nn.Linear(hidden_dim, dim)

    @property
    def last(self) -> nn.Linear:
        """The layer that makes the output."""
        return self.w3

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return self.w3(F.silu(self.w1(x)) * self.w2(x))


class LayerScale(nn.Module):
    """A factor per channel."""

    def __init__(self, dim: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), initial))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return x * self.gamma


class Block(nn.Module):
    """Pre-norm transformer block: x + ls1(attention(norm1 x)), then + ls2(feed-forward(norm2 x))."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        dim = config.dim
        self.norm1 = nn.LayerNorm(dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(dim, eps=config.norm_eps)
        feed_forward = GatedFeedForward if config.gated_ffn else GELUFeedForward
        self.mlp = feed_forward(dim, config.ffn_dim)
        self.ls1: nn.Module = nn.Identity()
        self.ls2: nn.Module = nn.Identity()
        if config.layer_scale is not None:
            self.ls1, self.ls2 = LayerScale(dim, config.layer_scale), LayerScale(dim, config.layer_scale)

    def fuse(self) -> None:
        """Fold the layer scales into the layers ahead of them, in place. Does nothing the second time."""
        for name, linear in (("ls1", self.attn.proj), ("ls2", self.mlp.last)):
            scale = getattr(self, name)
            if isinstance(scale, LayerScale):
                with torch.no_grad():
                    linear.weight.mul_(scale.gamma[:, None])
                    linear.bias.mul_(scale.gamma)
                setattr(self, name, nn.Identity())

    def forward(self, x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        """(B, N, dim) with the angles' sine and cosine (N, head_dim) -> (B, N, dim)."""
        x = x + self.ls1(self.attn(self.norm1(x), sin, cos))
        return x + self.ls2(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """Patch tokens after chosen blocks.

    Args:
        config: sizes.
        input_size: (height, width) [px] whose rotary angles are stored.
    """

    def __init__(self, config: ViTConfig, input_size: tuple[int, int]) -> None:
        super().__init__()
        dim, patch = config.dim, config.patch_size
        self.patch_size = patch
        self.take = config.take_blocks
        self.prefix_tokens = 1 + config.storage_tokens
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.storage_tokens: nn.Parameter | None = None
        self.mask_token: nn.Parameter | None = None
        if config.storage_tokens:
            self.storage_tokens = nn.Parameter(torch.empty(1, config.storage_tokens, dim))
            self.mask_token = nn.Parameter(torch.zeros(1, dim))
        self.patch_embed = PatchEmbed(dim, patch)
        self.rope_embed = RotaryEmbedding(
            dim // config.num_heads,
            (input_size[0] // patch, input_size[1] // patch),
            self.prefix_tokens,
            rescale=config.rope_rescale,
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm: nn.Module = nn.LayerNorm(dim, eps=config.norm_eps) if config.final_norm else nn.Identity()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.cls_token, std=0.02)
        if self.storage_tokens is not None:
            nn.init.normal_(self.storage_tokens, std=0.02)

    def _prefix(self) -> Tensor:
        """(1, prefix, dim) tokens ahead of the patches."""
        token: Tensor = self.cls_token
        if self.training and self.mask_token is not None:
            # no patch is ever masked here; the zero keeps every parameter in the graph, as distributed training needs
            token = token + 0.0 * self.mask_token
        return token if self.storage_tokens is None else torch.cat([token, self.storage_tokens], 1)

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) -> a map (B, dim, H/16, W/16) for every block that is taken."""
        height, width = images.shape[2] // self.patch_size, images.shape[3] // self.patch_size
        patches = self.patch_embed(images)
        # Padding instead of concatenation: an exported graph then needs no batch size at run time.
        x = F.pad(patches, (0, 0, self.prefix_tokens, 0)) + F.pad(self._prefix(), (0, 0, 0, height * width))
        sin, cos = self.rope_embed(height, width)
        maps = []
        for i, block in enumerate(self.blocks):
            if i > 0 and self.training and self.rope_embed.rescale != 1.0:
                sin, cos = self.rope_embed(height, width)
            x = block(x, sin, cos)
            if i in self.take:
                tokens = self.norm(x)[:, self.prefix_tokens :]
                maps.append(tokens.transpose(1, 2).unflatten(2, (height, width)))
        return maps
