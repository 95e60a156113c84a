"""How far an exported model may stray from the trained one. The only place where these numbers stand.

Export refuses to write a bundle, and ``carpus verify`` fails, when a figure lies above its threshold. Tests, command
line and documentation cite this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from carpus.runtime.errors import BundleError

__all__ = ["PARITY", "ParityLimits", "parity_limits"]


@dataclass(frozen=True)
class ParityLimits:
    """Greatest differences allowed between a backend and the trained module, over all images compared.

    Attributes:
        max_box_px: greatest difference of a box edge [px of the source image].
        max_score: greatest difference of a score, over all classes of a query.
        detections_differ: detections that one side has and the other lacks, over all images.
        replaced_share: share of an image's queries that may be other ones, as long as all of those score below
            ``weak_score`` on both sides. The encoder takes its best positions as queries, and which of two near-equal
            ones is the last to be taken depends on the last bits of a sum.
        weak_score: score below which a query is never a detection.
        score_floor: queries are compared when their best score is at least this on either side; 0 compares all.
            Weights rounded to 16 bits replace some of the weakest queries, which no robot acts upon.
        min_queries: compare at least this many of an image's best queries, whatever the floor; otherwise a model that
            is sure of nothing would pass for want of anything to compare.
    """

    max_box_px: float
    max_score: float
    detections_differ: int = 0
    replaced_share: float = 0.02
    weak_score: float = 0.05
    score_floor: float = 0.0
    min_queries: int = 0

    def as_mapping(self) -> dict[str, float]:
        """The deciding figures by metric name, as a bundle's parity record holds them."""
        return {
            "max_box_px": self.max_box_px,
            "max_score": self.max_score,
            "detections_differ": float(self.detections_differ),
        }


PARITY: Mapping[str, ParityLimits] = MappingProxyType(
    {
        # The shipped DEIMv2-Atto on 100 held-out images (benchmarks/parity.py): 0.0006 px and 0.00001, the same AP.
        "fp32": ParityLimits(max_box_px=0.05, max_score=1e-4),
        # The same run: 0.58 px and 0.012 among the detections that count, AP the same to three decimals. On drawn
        # pictures, which no detector was trained on, up to 1.9 px and 0.04.
        "fp16": ParityLimits(max_box_px=3.0, max_score=0.1, replaced_share=0.0, score_floor=0.3, min_queries=1),
    }
)
"""Limits by the precision of an artefact's weights."""


def parity_limits(precision: str) -> ParityLimits:
    """The limits for a precision.

    Raises:
        BundleError: there are none for it; the message lists those there are.
    """
    if precision not in PARITY:
        raise BundleError(f"no parity limits for precision {precision!r}; there are limits for {', '.join(PARITY)}")
    return PARITY[precision]
