"""LW-DETR networks small enough for unit tests."""

from __future__ import annotations

from typing import Literal

import torch

from carpus.models.lw_detr.config import DecoderConfig, LWDETRConfig, ViTConfig
from carpus.models.lw_detr.model import LWDETR

__all__ = ["small_config", "small_model"]


def small_config(levels: tuple[Literal["P3", "P4", "P5"], ...] = ("P4",), drop_path: float = 0.0) -> LWDETRConfig:
    """A network of two blocks, three query groups and four classes for inputs of 128 x 192 px."""
    return LWDETRConfig(
        variant="tiny",
        encoder=ViTConfig(24, 2, windowed=(0,), taken=(0, 1), num_heads=3, drop_path=drop_path),
        levels=levels,
        decoder=DecoderConfig(32, 4, 4, num_points=2, num_queries=10, num_groups=3, num_layers=2, ffn_dim=48),
        num_classes=4,
        input_size=(128, 192),
    )


def small_model(config: LWDETRConfig | None = None, seed: int = 0) -> LWDETR:
    """The network in eval mode with every weight away from its start, so that every part has an effect."""
    torch.manual_seed(seed)
    model = LWDETR(config or small_config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(std=0.1)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return model
