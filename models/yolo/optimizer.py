"""Learning rates and decays of the YOLO families' parameters.

Biases and the factors of norms are not decayed, everything else is, the scan's own parameters included, as published.
"""

from __future__ import annotations

from typing import cast

from torch import nn

from carpus.models.engine_optimizer import ParameterGroup
from carpus.models.recipe import Recipe

__all__ = ["parameter_groups"]

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)


def parameter_groups(model: nn.Module, recipe: Recipe) -> tuple[ParameterGroup, ...]:
    """Sorts a model's trainable parameters into groups of equal rate and decay.

    The model is a list of layers: backbone, neck from the first upsampling on, head last. The backbone has the recipe's
    ``backbone_lr_factor``; ``component_decay`` lowers the neck once and the backbone twice, ``layer_decay`` each layer
    of the backbone once more than the one after it.

    Args:
        model: network with its layers in ``model.model``.
        recipe: rates and decays.
    """
    layers = list(cast(nn.ModuleList, model.model))
    depth = next(index for index, layer in enumerate(layers) if isinstance(layer, nn.Upsample))
    norms = {name for name, module in model.named_modules() if isinstance(module, _NORMS)}
    members: dict[tuple[str, float, float], list[str]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        index = int(name.split(".")[1])
        part, rate = "head", recipe.lr
        if index < depth:
            part, rate = "backbone", rate * recipe.backbone_lr_factor * recipe.component_decay**2
            rate *= recipe.layer_decay ** (depth - index)
        elif index < len(layers) - 1:
            part, rate = "neck", rate * recipe.component_decay
        free = "bias" in name or name.rpartition(".")[0] in norms
        key = (f"{part} undecayed" if free else part, rate, 0.0 if free else recipe.weight_decay)
        members.setdefault(key, []).append(name)
    return tuple(ParameterGroup(*key, tuple(names)) for key, names in members.items())
