"""Learning rates and decays of DEIMv2's parameters.

Source: parameter groups of the published configurations (arXiv:2509.20787). HGNetv2 backbones have their own rate and
are all decayed (the published pattern that means to spare the backbone's norms matches none of them). Of transformer
backbones only the transformer has the backbone's rate, with its norms and biases undecayed; the adapter counts with the
encoder, except that its norms' factors and the output norms are decayed, as published. Norms of encoder and decoder are
not decayed, and except in Atto their biases neither.
"""

from __future__ import annotations

import re

from torch import nn

from carpus.models.engine_optimizer import ParameterGroup
from carpus.models.recipe import Recipe

__all__ = ["parameter_groups"]

_NORM = re.compile(r"norm|bn")
_NORM_OR_BIAS = re.compile(r"norm|bn|bias")
_TRANSFORMER, _ADAPTER = "backbone.dinov3.", "backbone.sta."
_ADAPTER_OUTPUT = ("backbone.convs.", "backbone.norms.")
_LAYER = re.compile(r"^backbone\.(?:dinov3\.blocks|stages)\.(\d+)\.")


def parameter_groups(model: nn.Module, recipe: Recipe) -> tuple[ParameterGroup, ...]:
    """Sorts a model's trainable parameters into groups; shared ones count once, empty groups are left out.

    A recipe with ``layer_decay`` lowers the rate of the backbone's layers (transformer blocks, HGNetv2 stages; what
    stands before them is layer 0) by ``layer_decay^(L + 1 - id)``; one with ``component_decay`` lowers encoder and
    adapter once and the backbone twice.
    """
    undecayed = _NORM if recipe.decay_biases else _NORM_OR_BIAS
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    depth = max((int(found[1]) + 1 for name in names if (found := _LAYER.match(name))), default=0)
    members: dict[tuple[str, float], list[str]] = {}
    for name in names:
        kind, rate = "rest", recipe.lr
        if name.startswith(_TRANSFORMER):
            kind = "backbone undecayed" if _NORM_OR_BIAS.search(name) else "backbone"
        elif not name.startswith(_ADAPTER_OUTPUT):
            if name.startswith("backbone.") and not name.startswith(_ADAPTER):
                kind = "backbone"
            elif undecayed.search(name):
                kind = "undecayed"
        if kind.startswith("backbone"):
            layer = 0 if (found := _LAYER.match(name)) is None else int(found[1]) + 1
            rate *= recipe.backbone_lr_factor * recipe.component_decay**2 * recipe.layer_decay ** (depth + 1 - layer)
        elif not name.startswith("decoder."):
            rate *= recipe.component_decay
        members.setdefault((kind, rate), []).append(name)
    order = ("backbone", "backbone undecayed", "undecayed", "rest")
    return tuple(
        ParameterGroup(kind, rate, 0.0 if kind.endswith("undecayed") else recipe.weight_decay, tuple(group))
        for (kind, rate), group in sorted(members.items(), key=lambda item: order.index(item[0][0]))
    )
