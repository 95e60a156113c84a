"""Weights of a transformer alone (a distilled ViT-Tiny, or DINOv3's own ViT-S) into a DEIMv2 backbone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from carpus.models.deimv2.model import DEIMv2
from carpus.models.deimv2.sta import NestedViT, ViTBackbone
from carpus.runtime.errors import DataError

__all__ = ["TransformerReport", "is_transformer_only", "load_transformer"]

_MARK = "cls_token"
_OPTIONAL = ("mask_token", "rope_embed.periods")
"""Never used, or the same in every model: some files leave them out."""


@dataclass(frozen=True)
class TransformerReport:
    """What loading a transformer did, by names inside the transformer.

    Attributes:
        used: entries copied.
        kept: optional entries that the file lacks.
        left_over: entries of the file that the backbone has no place for.
        prefix: what the file has ahead of every name.
    """

    used: tuple[str, ...]
    kept: tuple[str, ...]
    left_over: tuple[str, ...]
    prefix: str

    def describe(self, path: Path) -> str:
        """One line for the log."""
        parts = sorted({name.split(".")[0] for name in self.used})
        line = f"backbone starts from {path} ({len(self.used)} entries: {', '.join(parts)}"
        if self.left_over:
            line += f"; not used: {', '.join(self.left_over)}"
        return f"{line}); everything else from random weights"


def is_transformer_only(state: Mapping[str, Tensor]) -> bool:
    """Whether a state holds a vision transformer and no detector."""
    return any(name.endswith(_MARK) for name in state) and not any(
        name.startswith(("decoder.", "encoder.", "backbone.sta.")) for name in state
    )


def load_transformer(model: DEIMv2, state: Mapping[str, Tensor], source: str) -> TransformerReport:
    """Fill the transformer of a backbone.

    Args:
        model: network to fill; untouched when an error is raised.
        state: weights by name, with any prefix ahead of all names of the transformer.
        source: named in errors.

    Raises:
        DataError: a model without transformer, entries missing, of another shape or not finite, or blocks to spare.
    """
    backbone = model.backbone
    if not isinstance(backbone, ViTBackbone):
        raise DataError(
            f"{source} holds a vision transformer, and DEIMv2 {model.config.variant} has none; choose one of s, m, l, x"
        )
    vit = backbone.dinov3._model if isinstance(backbone.dinov3, NestedViT) else backbone.dinov3
    prefix = next(name.removesuffix(_MARK) for name in state if name.endswith(_MARK))
    given = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    own = vit.state_dict(keep_vars=True)
    missing = [name for name in own if name not in given and name not in _OPTIONAL]
    spare = [name for name in given if name.startswith("blocks.") and name not in own]
    shared = [name for name in own if name in given]
    shapes = [
        f"{name} is {tuple(given[name].shape)}, expected {tuple(own[name].shape)}"
        for name in shared
        if given[name].shape != own[name].shape
    ]
    infinite = [name for name in shared if not torch.isfinite(given[name]).all()]
    problems = [
        f"{len(names)} {label}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        for label, names in (
            ("missing", missing),
            ("without a place", spare),
            ("of another shape", shapes),
            ("not finite", infinite),
        )
        if names
    ]
    if problems:
        raise DataError(
            f"{source} does not fit the transformer of DEIMv2 {model.config.variant}: {'; '.join(problems)}. "
            "S takes the distilled ViT-Tiny, M ViT-Tiny+, L DINOv3's ViT-S/16, X its ViT-S+/16."
        )
    with torch.no_grad():
        for name in shared:
            own[name].copy_(given[name])
    outside = [name for name in state if not name.startswith(prefix)]
    return TransformerReport(
        used=tuple(shared),
        kept=tuple(name for name in own if name not in given),
        left_over=(*(prefix + name for name in given if name not in own), *outside),
        prefix=prefix,
    )
