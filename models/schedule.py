"""Learning-rate schedule of DEIMv2: quadratic warm-up, flat, cosine, constant.

Source: the facts of the DEIMv2 training recipe (`FlatCosine`), held by tests against sampled values of the original.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from carpus.runtime.errors import DataError

__all__ = ["FlatCosine"]


@dataclass(frozen=True)
class FlatCosine:
    """Factor on the initial learning rate, per iteration.

    ``(it / warmup)^2`` up to ``warmup``, then 1 until ``flat``, then half a cosine down to ``final`` at ``decayed``,
    then ``final``.

    Attributes:
        warmup: iterations of warm-up.
        flat: iteration up to which the rate stays at its full value; beyond ``decayed`` means that it never falls.
        decayed: iteration from which the rate stays at ``final`` (total less the closing epochs without augmentation).
        final: closing factor, 0..1.
        linear: warm-up and fall are straight lines instead, as YOLO detectors are trained.
    """

    warmup: int
    flat: int
    decayed: int
    final: float
    linear: bool = False

    def __post_init__(self) -> None:
        if min(self.warmup, self.flat, self.decayed) < 0:
            raise DataError(f"FlatCosine takes iterations of at least 0, got {self}.")
        if not 0.0 <= self.final <= 1.0:
            raise DataError(f"FlatCosine.final must be in 0..1, got {self.final}.")

    def factor(self, iteration: int) -> float:
        """The factor at an iteration, counted from 0."""
        if iteration < self.warmup:
            return (iteration / self.warmup) ** (1 if self.linear else 2)
        if iteration >= self.decayed:
            return self.final if self.flat < self.decayed else 1.0
        if iteration <= self.flat:
            return 1.0
        progress = (iteration - self.flat) / (self.decayed - self.flat)
        left = 1.0 - progress if self.linear else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final + (1.0 - self.final) * left
