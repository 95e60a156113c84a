"""Arrays of the state-space operators' reference data, and how they are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tests.goldens.case import Check
from tests.goldens.deimv2_forward import TOLERANCE_FACTOR

__all__ = ["Arrays", "compare"]

FLOOR = 4.0 * float(np.finfo(np.float32).eps)
"""Of the largest value: a few roundings, where a case happens to deviate by nothing."""


class Arrays:
    """The arrays of one case as tensors.

    Args:
        stored: content of the .npz file.
        case: name before the slash.
    """

    def __init__(self, stored: Mapping[str, np.ndarray], case: str) -> None:
        self._stored, self._case = stored, case

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self._stored[f"{self._case}/{name}"])

    def optional(self, name: str) -> Tensor | None:
        """The array, or None where the case has none of that name."""
        return self[name] if f"{self._case}/{name}" in self._stored else None


def compare(name: str, ours: Tensor, goal: Tensor, deviation: float, *, period: float | None = None) -> Check:
    """Within a few times the case's own deviation, or a few roundings of the largest value.

    Args:
        name: for the report.
        ours: computed here.
        goal: stored.
        deviation: float32 against float64, of the official code.
        period: values that differ by it are equal (angles).
    """
    tolerance = max(TOLERANCE_FACTOR * deviation, FLOOR * max(float(goal.abs().max()), period or 0.0))
    if ours.shape != goal.shape:
        return Check(name, math.inf, tolerance, f"shape {tuple(ours.shape)}, expected {tuple(goal.shape)}")
    difference = (ours.detach().double() - goal.double()).abs()
    if period is not None:
        difference = torch.minimum(difference, period - difference)
    return Check(name, float(difference.max()), tolerance)
