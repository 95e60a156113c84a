"""How far an exported model may stray from the trained one. The only place where these numbers stand.

Export refuses to write a bundle, and ``carpus verify`` fails, when a figure lies above its threshold. Tests, command
line and documentation cite this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from carpus.runtime.errors import BundleError

__all__ = ["PARITY", "ParityLimits", "parity_limits"]


@dataclass(frozen=True)
class ParityLimits:
    """Greatest differences allowed between a backend and the trained module, over all images compared.

    Attributes:
        max_box_px: greatest difference of a box corner [px of the source image].
        max_score: greatest difference of a score, of any class of a compared query.
        max_unmatched: queries compared that have no counterpart, an image.
        score_floor: queries whose best score in the reference lies below this are not compared; 0 compares all.
            Weights rounded to 16 bits reorder and replace the weakest queries, which no robot acts upon.
        min_queries: compare at least this many of the best queries, whatever the floor (an untrained or unsure model
            would pass for want of anything to compare).
    """

    max_box_px: float
    max_score: float
    max_unmatched: int = 0
    score_floor: float = 0.0
    min_queries: int = 0

    def as_mapping(self) -> dict[str, float]:
        """The deciding figures by metric name, as a bundle's parity record holds them."""
        return {
            "max_box_px": self.max_box_px,
            "max_score": self.max_score,
            "max_unmatched": float(self.max_unmatched),
        }


PARITY: Mapping[str, ParityLimits] = MappingProxyType(
    {
        "fp32": ParityLimits(max_box_px=0.05, max_score=1e-4),
        "fp16": ParityLimits(max_box_px=2.0, max_score=0.02, score_floor=0.3, min_queries=1),
    }
)
"""Limits by the precision of an artefact's weights."""


def parity_limits(precision: Literal["fp32", "fp16", "int8"] | str) -> ParityLimits:
    """The limits for a precision.

    Raises:
        BundleError: there are none for it; the message lists those there are.
    """
    if precision not in PARITY:
        raise BundleError(f"no parity limits for precision {precision!r}; there are limits for {', '.join(PARITY)}")
    return PARITY[precision]
