"""Published YOLO-Master files: what stands in them, and what of it a network takes."""

from __future__ import annotations

from carpus.models.published.rules import Known
from carpus.models.yolo.checkpoint import yolo_rules

__all__ = ["RULES"]

RULES = yolo_rules(
    "YOLO-Master",
    Known(
        r".*\.(load_balancing_loss|expert_usage_counts)",
        "unused",
        "loss and expert usage of the last training step, which the official code does not keep either",
    ),
    hint=(
        "Files of the first v0.1 release have other experts, at other layers, than the released configurations; they "
        "are not read."
    ),
)
