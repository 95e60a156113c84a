"""Exponential moving average of a model, the weights that are evaluated and shipped.

``decay_t = decay * (1 - exp(-t / warmups))`` with t the number of updates, over every floating-point entry of the
state, running statistics included (DEIMv2's recipe, after YOLOv5's).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from carpus.runtime.errors import DataError

__all__ = ["ModelEMA"]


class ModelEMA:
    """Keeps an averaged copy of a model.

    Attributes:
        module: the averaged model, in eval mode, without gradients.
        decay: the decay approached after warm-up.
        updates: number of updates so far.
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.9999, warmups: int = 1000) -> None:
        """
        Args:
            model: the trained model; it must keep its tensors (optimisers update in place, so they do).
            decay: in 0..1; the average reaches back about ``1 / (1 - decay)`` updates.
            warmups: updates over which the decay rises.

        Raises:
            DataError: decay or warmups out of range.
        """
        if not 0.0 <= decay < 1.0:
            raise DataError(f"EMA decay must be in [0, 1), got {decay}.")
        if warmups < 1:
            raise DataError(f"EMA warmups must be at least 1 update, got {warmups}.")
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        self.updates = 0
        self._warmups = warmups
        pairs = _distinct_pairs(self.module, model)
        self._averaged = [mine for mine, _ in pairs if mine.is_floating_point()]
        self._sources = [theirs for mine, theirs in pairs if mine.is_floating_point()]
        self._counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    def current_decay(self, updates: int) -> float:
        """The decay used for the update with this 1-based number."""
        return self.decay * (1.0 - math.exp(-updates / self._warmups))

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the model's present weights."""
        self.updates += 1
        torch._foreach_lerp_(self._averaged, self._sources, 1.0 - self.current_decay(self.updates))
        for mine, theirs in self._counters:
            mine.copy_(theirs)

    def state_dict(self) -> dict[str, Any]:
        """Weights and counters, plain enough for ``torch.load(weights_only=True)``."""
        return {"module": self.module.state_dict(), "updates": self.updates, "decay": self.decay}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self.module.load_state_dict(state["module"])
        self.updates = int(state["updates"])
        self.decay = float(state["decay"])


def _distinct_pairs(average: nn.Module, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Corresponding state tensors, shared ones once."""
    mine, theirs = average.state_dict(keep_vars=True), model.state_dict(keep_vars=True)
    seen: set[int] = set()
    pairs = []
    for name, tensor in mine.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            pairs.append((tensor.detach(), theirs[name].detach()))
    return pairs
