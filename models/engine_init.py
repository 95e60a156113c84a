"""Starting weights from a checkpoint: this project's or an official one."""

from __future__ import annotations

from pathlib import Path

from carpus.models.data.coco import CategoryMap
from carpus.runtime.errors import DataError
from torch import nn

__all__ = ["initialise"]


def initialise(model: nn.Module, path: Path, categories: CategoryMap) -> str:
    """Fills a model from a checkpoint; what depends on the classes is kept for classes of the same name.

    Args:
        model: to be filled.
        path: a Carpus training checkpoint, or an official checkpoint.
        categories: the model's classes.

    Returns:
        One line that says what was taken.

    Raises:
        DataError: unreadable, or of another architecture.
    """
    raise DataError("not yet")
