"""Published Mamba-YOLO files: what stands in them, and what of it a network takes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from carpus.models.published.fit import Fit, fill
from carpus.models.yolo.checkpoint import yolo_rules

__all__ = ["RULES", "load_state"]

RULES = yolo_rules("Mamba-YOLO")


def load_state(model: nn.Module, state: Mapping[str, Tensor], source: str) -> Fit:
    """Fill a network from weights that must fit exactly; see `carpus.models.published.fit.fill`."""
    return fill(model, state, RULES, source)
