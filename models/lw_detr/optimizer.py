"""Learning rates and decays of LW-DETR's parameters: layer by layer and component by component.

Source: LW-DETR (arXiv:2406.03459), appendix, and its published training configurations.
"""

from __future__ import annotations

import re

from torch import nn

from carpus.models.engine_optimizer import ParameterGroup
from carpus.models.lw_detr.config import OptimizerConfig

__all__ = ["parameter_groups"]

_ENCODER = "backbone.0.encoder."
_DECODER = "transformer.decoder."
_BLOCK = re.compile(r"blocks\.(\d+)\.")
_UNDECAYED = re.compile(r"gamma|pos_embed|rel_pos|bias|norm|\.bn\d|\.downsample\.1\.")


def parameter_groups(model: nn.Module, depth: int, config: OptimizerConfig) -> tuple[ParameterGroup, ...]:
    """Sorts a model's trainable parameters into groups of equal rate and decay, in the model's order.

    Encoder parameters have the rate ``lr_encoder * layer_decay^(depth + 1 - id) * component_decay^2``, id 0 for patch
    and position embedding and block index + 1 for blocks; the decoder's have ``lr * component_decay``, all others
    ``lr``. In the encoder layer scales, positions, biases and norms are not decayed; elsewhere everything is. A
    residual network has no such ids: all of it has the rate of id 0, with decays of 1 in its published settings.

    Args:
        model: network with the official names.
        depth: encoder blocks.
        config: rates and decays.
    """
    members: dict[tuple[str, float, float], list[str]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.startswith(_ENCODER):
            block = _BLOCK.match(name.removeprefix(_ENCODER))
            layer = 0 if block is None else int(block[1]) + 1
            rate = config.lr_encoder * config.layer_decay ** (depth + 1 - layer) * config.component_decay**2
            decay = 0.0 if _UNDECAYED.search(name) else config.weight_decay
            key = (f"encoder.{layer}" + ("" if decay else ".undecayed"), rate, decay)
        elif name.startswith(_DECODER):
            key = ("decoder", config.lr * config.component_decay, config.weight_decay)
        else:
            key = ("rest", config.lr, config.weight_decay)
        members.setdefault(key, []).append(name)
    return tuple(ParameterGroup(name, rate, decay, tuple(names)) for (name, rate, decay), names in members.items())
