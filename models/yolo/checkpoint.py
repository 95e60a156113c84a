"""What the published files of the YOLO families have in common."""

from __future__ import annotations

from carpus.models.published.rules import COUNTERS, Known, Rules

__all__ = ["yolo_rules"]

_BINS = Known(r"model\.\d+\.dfl\.conv\.weight", "constant", "the bins 0..15 of a box side, which are never trained")


def yolo_rules(title: str, *known: Known, hint: str = Rules.hint) -> Rules:
    """Rules of a family with the shared detection head, whose layer comes last.

    Args:
        title: the family's name for people.
        known: its entries with a meaning of their own, beside the head's.
        hint: what to look at when a file does not fit.
    """
    return Rules(
        title=title,
        known=(COUNTERS, _BINS, *known),
        class_head=r"model\.\d+\.cv3\.0\.2\.weight",
        class_rows=r"model\.\d+\.cv3\.\d+\.2\.(weight|bias)",
        class_sized=r"model\.\d+\.cv3\.\d+\.[012]\..*",
        hint=hint,
    )
