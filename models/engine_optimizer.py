"""AdamW with DEIMv2's parameter groups.

Source: parameter groups of the published configurations. HGNetv2 backbones have their own rate and are all decayed (the
published pattern that means to spare the backbone's norms matches none of them). Of transformer backbones only the
transformer has the backbone's rate, with its norms and biases undecayed; the adapter counts with the encoder, except
that its norms' factors and the output norms are decayed, as published. Norms of encoder and decoder are not decayed,
and except in Atto their biases neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from carpus.models.recipe import Recipe

__all__ = ["ParameterGroup", "make_optimizer", "parameter_groups"]

_NORM = re.compile(r"norm|bn")
_NORM_OR_BIAS = re.compile(r"norm|bn|bias")
_TRANSFORMER, _ADAPTER = "backbone.dinov3.", "backbone.sta."
_ADAPTER_OUTPUT = ("backbone.convs.", "backbone.norms.")


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share rate and decay.

    Attributes:
        name: what they are.
        lr: initial learning rate.
        weight_decay: decay.
        names: parameter names, in the model's order.
    """

    name: str
    lr: float
    weight_decay: float
    names: tuple[str, ...]


def parameter_groups(model: nn.Module, recipe: Recipe) -> tuple[ParameterGroup, ...]:
    """Sorts a model's trainable parameters into groups; shared ones count once, empty groups are left out."""
    undecayed = _NORM if recipe.decay_biases else _NORM_OR_BIAS
    members: dict[str, list[str]] = {"backbone": [], "backbone undecayed": [], "undecayed": [], "rest": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.startswith(_TRANSFORMER):
            members["backbone undecayed" if _NORM_OR_BIAS.search(name) else "backbone"].append(name)
        elif name.startswith(_ADAPTER_OUTPUT):
            members["rest"].append(name)
        elif name.startswith("backbone.") and not name.startswith(_ADAPTER):
            members["backbone"].append(name)
        elif undecayed.search(name):
            members["undecayed"].append(name)
        else:
            members["rest"].append(name)
    settings = {
        "backbone": (recipe.lr * recipe.backbone_lr_factor, recipe.weight_decay),
        "backbone undecayed": (recipe.lr * recipe.backbone_lr_factor, 0.0),
        "undecayed": (recipe.lr, 0.0),
        "rest": (recipe.lr, recipe.weight_decay),
    }
    return tuple(ParameterGroup(key, *settings[key], tuple(names)) for key, names in members.items() if names)


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`; each group keeps its initial rate as ``initial_lr``."""
    parameters = dict(model.named_parameters())
    groups = [
        {
            "params": [parameters[name] for name in group.names],
            "lr": group.lr,
            "initial_lr": group.lr,
            "weight_decay": group.weight_decay,
        }
        for group in parameter_groups(model, recipe)
    ]
    # One fused pass over all parameters; a loop over 300 small tensors costs more than the arithmetic.
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=True)
