"""What the published files of the YOLO families have in common."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from carpus.models.published.rules import COUNTERS, Known, Rules
from carpus.models.yolo.head import Detect
from carpus.runtime.errors import DataError

__all__ = ["yolo_rules"]

_CLASS_HEAD = r"model\.\d+\.cv3\.0\.2\.weight"
_BINS = Known(r"model\.\d+\.dfl\.conv\.weight", "constant", "the bins 0..15 of a box side, which are never trained")


def yolo_rules(title: str, *known: Known, hint: str = "") -> Rules:
    """Rules of a family with the shared detection head, whose layer comes last.

    Args:
        title: the family's name for people.
        known: its entries with a meaning of their own, beside the head's.
        hint: what to know of its files when one does not fit.
    """
    return Rules(
        title=title,
        known=(COUNTERS, _BINS, *known),
        class_head=_CLASS_HEAD,
        class_rows=r"model\.\d+\.cv3\.\d+\.2\.(weight|bias)",
        adapter=_adopt_class_width,
        hint=hint,
    )


def _adopt_class_width(model: Any, state: Mapping[str, Tensor]) -> None:
    """Give the class branches the width of the weights'.

    It follows from the number of classes, so in the smallest sizes a network for another number of classes has another;
    with the weights' width it takes over everything but the classification rows.
    """
    head: Detect = model.head
    for name, tensor in state.items():
        if re.fullmatch(_CLASS_HEAD, name) and tensor.ndim == 4 and tensor.shape[1] != head.class_width:
            with contextlib.suppress(DataError):  # no width of this network: comparing the shapes says so
                head.set_class_width(tensor.shape[1])
