"""The form of a trained network that is exported: norms folded away, training-only parts dropped."""

from __future__ import annotations

import copy
from typing import Literal

from torch import nn

from carpus.models.deimv2.encoder import RepBlock
from carpus.models.deimv2.layers import ConvNorm
from carpus.models.deimv2.model import DEIMv2

__all__ = ["deploy"]


def deploy(model: DEIMv2, *, fuse: Literal["all", "official"] = "all") -> DEIMv2:
    """A copy for inference that computes the same outputs; it can no longer be trained.

    Args:
        model: trained network, left as it is.
        fuse: "all" folds everything that can be folded (every BatchNorm, the backbone's learnable affines with their
            ReLU, attention and offset scales). "official" folds what the published code does (the encoder's
            convolutions and re-parameterisable blocks) and keeps the denoising embedding, for comparison with
            published parameter counts and outputs.

    Returns:
        The copy, in eval mode, without gradients.
    """
    fused = copy.deepcopy(model).eval().requires_grad_(False)
    if fuse == "official":
        for name, module in list(fused.encoder.named_modules()):
            if isinstance(module, RepBlock) or (isinstance(module, ConvNorm) and not name.startswith("input_proj")):
                module.fuse()
    else:
        for module in list(fused.modules()):
            fold = getattr(module, "fuse", None)
            if callable(fold):
                fold()
    decoder = fused.decoder
    for heads in (decoder.dec_score_head, decoder.decoder.lqe_layers):
        for i in range(len(heads) - 1):
            heads[i] = nn.Identity()
    if fuse == "all":
        decoder.denoising_class_embed = nn.Identity()  # type: ignore[assignment]
    return fused
