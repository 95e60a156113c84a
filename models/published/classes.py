"""What the classes of published weights are called."""

from __future__ import annotations

from pathlib import Path

from carpus.models.data.coco import CategoryMap
from carpus.models.data.coco_classes import COCO_CATEGORY_IDS, COCO_CLASSES
from carpus.runtime.errors import DataError

__all__ = ["name_classes", "read_class_names"]


def name_classes(
    path: Path, count: int, given: CategoryMap | None, stated: tuple[str, ...] | None = None
) -> tuple[CategoryMap, str]:
    """Names and data-set ids for the classes of a file.

    Args:
        path: the file, named in errors.
        count: its number of classes.
        given: what the user says; goes first.
        stated: names in the file; go second. COCO's own take COCO's ids, others count from 0.

    Returns:
        The classes, and where they come from.

    Raises:
        DataError: names given for another number of classes, or names neither given nor known.
    """
    if given is not None:
        if len(given) != count:
            raise DataError(f"Checkpoint {path} has {count} classes, {len(given)} names were given.")
        return given, "as given"
    known = {len(table): table for table in (COCO_CLASSES, COCO_CATEGORY_IDS)}
    coco = CategoryMap(*map(tuple, zip(*known[count], strict=True))) if count in known else None
    if stated is not None and len(stated) == count and (coco is None or stated != coco.names):
        if len(set(stated)) == count:
            return CategoryMap(stated, tuple(range(count))), "as the file names them"
        raise DataError(f"Checkpoint {path} names two of its classes alike; give --class-names or --dataset.")
    if coco is None:
        raise DataError(
            f"Checkpoint {path} has {count} classes and does not name them; give --class-names or --dataset."
        )
    return coco, "COCO's, by their number" if stated is None else "COCO's, as the file names them"


def read_class_names(path: Path) -> CategoryMap:
    """Class names from a text file, one a line; data-set ids count from 0.

    Raises:
        DataError: no such file, no text, or the same name twice.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"class names {str(path)!r}: cannot be read as a text file ({error})") from None
    names = tuple(line.strip() for line in lines if line.strip())
    if not names:
        raise DataError(f"class names {str(path)!r}: expected one name a line, the file is empty")
    return CategoryMap(names, tuple(range(len(names))))
