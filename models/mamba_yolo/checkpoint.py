"""Published Mamba-YOLO files: what stands in them, and what of it a network takes."""

from __future__ import annotations

from carpus.models.yolo.checkpoint import yolo_rules

__all__ = ["RULES"]

RULES = yolo_rules("Mamba-YOLO")
