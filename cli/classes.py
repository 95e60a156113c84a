"""The class names that a command is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from carpus.runtime.errors import DataError

if TYPE_CHECKING:
    from carpus.models.data.coco import CategoryMap

__all__ = ["given_classes"]


def given_classes(class_names: Path | None, dataset: Path | None) -> CategoryMap | None:
    """Classes from a text file or a data set; None when neither is given.

    Args:
        class_names: text file with one class name a line.
        dataset: a split's folder or a COCO JSON file.

    Raises:
        DataError: both are given, or the one given cannot be read.
    """
    if class_names is not None and dataset is not None:
        raise DataError("give --class-names or --dataset, not both")
    # Here, because they bring torch, which --help and a wrong option need not wait for.
    if class_names is not None:
        from carpus.models.published.classes import read_class_names

        return read_class_names(class_names)
    if dataset is not None:
        from carpus.models.data.coco import locate_split
        from carpus.models.data.coco_reader import load_coco

        return load_coco(*locate_split(dataset)).categories
    return None
