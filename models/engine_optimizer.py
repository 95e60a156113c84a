"""Optimisers over parameter groups; which parameters share a rate is each family's own affair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from carpus.models.recipe import Recipe

__all__ = ["ParameterGroup", "make_optimizer"]


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


def make_optimizer(model: nn.Module, groups: Sequence[ParameterGroup], recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimiser over the groups, each of which keeps its initial rate as ``initial_lr``."""
    parameters = dict(model.named_parameters())
    options = [
        {
            "params": [parameters[name] for name in group.names],
            "lr": group.lr,
            "initial_lr": group.lr,
            "weight_decay": group.weight_decay,
        }
        for group in groups
    ]
    # One fused pass over all parameters; a loop over 300 small tensors costs more than the arithmetic.
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(options, lr=recipe.lr, momentum=recipe.momentum, nesterov=True, fused=True)
    return torch.optim.AdamW(options, lr=recipe.lr, betas=recipe.betas, fused=True)
