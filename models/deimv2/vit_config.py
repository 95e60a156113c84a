"""Sizes of the vision-transformer backbones, as data.

Figures follow "Real-Time Object Detection Meets DINOv3" (arXiv:2509.20787) and "DINOv3" (arXiv:2508.10104).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from carpus.runtime.errors import DataError

__all__ = ["VIT_SMALL", "VIT_SMALL_PLUS", "VIT_TINY", "VIT_TINY_PLUS", "ViTConfig"]


@dataclass(frozen=True)
class ViTConfig:
    """Vision transformer with Spatial Tuning Adapter: maps at strides 8, 16, 32.

    Attributes:
        name: published name of the size.
        dim: width of the tokens.
        num_heads: attention heads, 64 wide.
        ffn_dim: hidden width of the feed-forward.
        detail_channels: channels of the adapter's stem.
        map_channels: channels of the returned maps.
        take_blocks: indices (from 0) of the three blocks whose tokens make the maps, ascending. A checkpoint does not
            tell them: the published configurations of S and M say 3, 7, 11, the authors' notebook 5, 8, 11.
        nested: the transformer's names have ``_model.`` ahead of them (distilled backbones).
        gated_ffn: SwiGLU with separate projections instead of GELU.
        storage_tokens: tokens besides the class token that carry no patch.
        layer_scale: initial factor of the residual branches; None has none.
        norm_eps: eps of every LayerNorm.
        mask_key_bias: keys have no bias, by a mask that is part of the checkpoint.
        final_norm: tokens pass a last LayerNorm before they are taken.
        rope_rescale: bound of the random scale of coordinates in training; 1 has none.
        depth: transformer blocks.
        patch_size: side of a patch [px].
    """

    name: str
    dim: int
    num_heads: int
    ffn_dim: int
    detail_channels: int
    map_channels: int
    take_blocks: tuple[int, int, int]
    nested: bool = False
    gated_ffn: bool = False
    storage_tokens: int = 0
    layer_scale: float | None = None
    norm_eps: float = 1e-6
    mask_key_bias: bool = False
    final_norm: bool = False
    rope_rescale: float = 1.0
    depth: int = 12
    patch_size: int = 16

    def __post_init__(self) -> None:
        taken = self.take_blocks
        if len(taken) != 3 or list(taken) != sorted(set(taken)) or not 0 <= taken[0] <= taken[-1] < self.depth:
            raise DataError(
                f"ViTConfig.take_blocks must be three ascending indices in 0..{self.depth - 1}, got {taken}"
            )

    @property
    def out_channels(self) -> tuple[int, ...]:
        """Channels of the returned maps."""
        return (self.map_channels,) * 3


VIT_TINY = ViTConfig("ViT-Tiny", 192, 3, 768, detail_channels=16, map_channels=192, take_blocks=(3, 7, 11), nested=True)
VIT_TINY_PLUS = replace(VIT_TINY, name="ViT-Tiny+", dim=256, num_heads=4, ffn_dim=1024, map_channels=256)
VIT_SMALL = ViTConfig(
    "ViT-S/16",
    384,
    6,
    1536,
    detail_channels=32,
    map_channels=224,
    take_blocks=(5, 8, 11),
    storage_tokens=4,
    layer_scale=1e-5,
    norm_eps=1e-5,
    mask_key_bias=True,
    final_norm=True,
    rope_rescale=2.0,
)
VIT_SMALL_PLUS = replace(VIT_SMALL, name="ViT-S+/16", detail_channels=64, map_channels=256, gated_ffn=True)
"""Backbones of S, M, L and X."""
