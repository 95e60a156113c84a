"""Weights of a transformer alone (a distilled ViT-Tiny, or DINOv3's own ViT-S) into a DEIMv2 backbone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from carpus.models.deimv2.model import DEIMv2
from carpus.models.deimv2.sta import NestedViT, ViTBackbone
from carpus.models.published.fit import Fit, compare, listing
from carpus.models.published.rules import Known, Rules
from carpus.runtime.errors import DataError

__all__ = [
    "RULES",
    "TransformerReport",
    "compare_transformer",
    "find_transformer",
    "is_transformer_only",
    "load_transformer",
]

_MARK = "cls_token"

RULES = Rules(
    title="the transformer of DEIMv2",
    known=(
        Known(r"mask_token", "optional", "stands for hidden patches in DINOv3's own training; a detector has none"),
        Known(r"rope_embed\.periods", "optional", "the same in every transformer of this head size"),
    ),
    class_head=r"(?!)",
    class_rows=r"(?!)",
    hint="S takes the distilled ViT-Tiny, M ViT-Tiny+, L DINOv3's ViT-S/16, X its ViT-S+/16.",
)


@dataclass(frozen=True)
class TransformerReport:
    """What loading a transformer did.

    Attributes:
        fit: by names inside the transformer; left over are entries without a place, by their names in the file.
        prefix: what the file has ahead of every name of the transformer.
    """

    fit: Fit
    prefix: str

    def describe(self, path: Path) -> str:
        """One line for the log."""
        parts = sorted({name.split(".")[0] for name in self.fit.copied})
        line = f"backbone starts from {path} ({len(self.fit.copied)} entries: {', '.join(parts)}"
        if self.fit.left_over:
            line += f"; not used: {', '.join(self.fit.left_over)}"
        return f"{line}); everything else from random weights"


def is_transformer_only(state: Mapping[str, Tensor]) -> bool:
    """Whether a state holds a vision transformer and no detector."""
    return any(name.endswith(_MARK) for name in state) and not any(
        name.startswith(("decoder.", "encoder.", "backbone.sta.")) for name in state
    )


def compare_transformer(model: nn.Module, state: Mapping[str, Tensor], source: str) -> TransformerReport:
    """Hold weights of a transformer against the one of a backbone.

    Args:
        model: a DEIMv2 network.
        state: weights by name, with any prefix ahead of all names of the transformer.
        source: named in errors.

    Raises:
        DataError: a model without transformer.
    """
    prefix = next(name.removesuffix(_MARK) for name in state if name.endswith(_MARK))
    given = {name.removeprefix(prefix) if name.startswith(prefix) else name: tensor for name, tensor in state.items()}
    fit = compare(find_transformer(model, source).state_dict(keep_vars=True), given, RULES)
    there = {name.removeprefix(prefix): name for name in state if name.startswith(prefix)}
    return TransformerReport(replace(fit, left_over=tuple(there.get(name, name) for name in fit.left_over)), prefix)


def load_transformer(model: nn.Module, state: Mapping[str, Tensor], source: str) -> TransformerReport:
    """Fill the transformer of a backbone; entries outside its blocks that it has no place for are reported.

    Args:
        model: a DEIMv2 network to fill; untouched when an error is raised.
        state: weights by name, with any prefix ahead of all names of the transformer.
        source: named in errors.

    Raises:
        DataError: a model without transformer, entries missing, of another shape or not finite, or blocks to spare.
    """
    report = compare_transformer(model, state, source)
    spare = tuple(name for name in report.fit.left_over if name.startswith(f"{report.prefix}blocks."))
    problems = replace(report.fit, left_over=spare).problems()
    if problems:
        variant = cast(DEIMv2, model).config.variant
        raise DataError(f"{source} does not fit {RULES.title} {variant}: {listing(problems)}. {RULES.hint}")
    own = find_transformer(model, source).state_dict(keep_vars=True)
    with torch.no_grad():
        for name in report.fit.copied:
            own[name].copy_(state[report.prefix + name])
    return report


def find_transformer(model: nn.Module, source: str) -> nn.Module:
    """The transformer inside a DEIMv2 network.

    Args:
        model: the network.
        source: what it is for, for the message.

    Raises:
        DataError: it has none.
    """
    if not isinstance(model, DEIMv2) or not isinstance(model.backbone, ViTBackbone):
        variant = model.config.variant if isinstance(model, DEIMv2) else type(model).__name__
        raise DataError(f"{source} holds a vision transformer, and DEIMv2 {variant} has none; choose one of s, m, l, x")
    dinov3 = model.backbone.dinov3
    return dinov3._model if isinstance(dinov3, NestedViT) else dinov3
