"""Published LW-DETR files: what stands in them, and what of it a network takes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from carpus.models.published.fit import Fit, fill
from carpus.models.published.rules import COUNTERS, Rules

__all__ = ["RULES", "load_state"]

RULES = Rules(
    title="LW-DETR",
    known=(COUNTERS,),
    class_head=r"class_embed\.weight",
    class_rows=r"(class_embed|transformer\.enc_out_class_embed\.\d+)\.(weight|bias)",
    hint="Files for COCO have 91 classes, which are its category ids.",
)


def load_state(model: nn.Module, state: Mapping[str, Tensor], source: str) -> Fit:
    """Fill a network from weights that must fit exactly; see `carpus.models.published.fit.fill`."""
    return fill(model, state, RULES, source)
