"""The form of a Mamba-YOLO that is exported: every norm that follows a convolution is folded into it."""

from __future__ import annotations

import copy

from torch import nn

from carpus.models.deimv2.layers import fused_conv
from carpus.models.mamba_yolo.blocks import LSBlock
from carpus.models.mamba_yolo.model import MambaYOLO
from carpus.models.yolo.blocks import fuse_convs, fuse_pairs

__all__ = ["deploy"]


def deploy(model: MambaYOLO) -> MambaYOLO:
    """A copy in eval mode with the same outputs, up to rounding; it can no longer be trained.

    Args:
        model: the trained detector; it is not changed.
    """
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    fuse_convs(copied)
    for module in list(copied.modules()):
        if isinstance(module, nn.Sequential):
            fuse_pairs(module)
        elif isinstance(module, LSBlock) and isinstance(module.norm, nn.BatchNorm2d):
            module.fc1, module.norm = fused_conv(module.fc1, module.norm), nn.Identity()  # type: ignore[assignment]
    return copied
