"""Reads COCO JSON into `CocoDataset`, and trusts nothing.

Every reference is resolved, every box is judged, and whatever is wrong is named by file, field and annotation id.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from carpus.models.data.coco import BadBox, CategoryMap, CocoDataset, CocoImage
from carpus.runtime.errors import DataError

__all__ = ["BadBoxPolicy", "load_coco"]

logger = logging.getLogger(__name__)

BadBoxPolicy = Literal["drop", "refuse"]

_LISTED = 10  # bad boxes spelled out in a message; the rest is counted


def load_coco(
    annotations: Path,
    image_dir: Path | None = None,
    *,
    bad_boxes: BadBoxPolicy = "drop",
    categories: CategoryMap | None = None,
) -> CocoDataset:
    """Reads and checks a COCO detection file.

    Args:
        annotations: the JSON file.
        image_dir: folder of the images; None means ``images/`` beside the file.
        bad_boxes: what to do with boxes of no area, with NaN or infinity, or outside their image: ``"drop"`` logs them
            and leaves them out, ``"refuse"`` raises. Boxes that only reach over the edge are clipped and are not bad.
        categories: classes that this file must fit (a validation split takes the training split's). A category is
            matched by name; None derives the classes from the file, ordered by category id.

    Returns:
        The dataset, classes mapped to 0..C-1.

    Raises:
        DataError: unreadable JSON, wrong structure, duplicate ids, references to unknown images or categories, a
            missing image file, classes that do not fit ``categories``, or bad boxes under ``"refuse"``.
    """
    if bad_boxes not in ("drop", "refuse"):
        raise DataError(f"bad_boxes must be 'drop' or 'refuse', got {bad_boxes!r}.")
    annotations = Path(annotations)
    image_dir = Path(image_dir) if image_dir is not None else annotations.parent / "images"
    document = _read_json(annotations)
    file = _File(annotations)
    own = _read_categories(file, document)
    target = categories if categories is not None else CategoryMap(tuple(n for n, _ in own), tuple(i for _, i in own))
    class_of = _match_categories(file, own, target)
    entries = _read_images(file, document, image_dir)
    grouped, bad = _read_annotations(file, document, entries, class_of)
    if bad:
        listing = "; ".join(str(box) for box in bad[:_LISTED]) + ("; ..." if len(bad) > _LISTED else "")
        message = f"{annotations}: {len(bad)} unusable box(es): {listing}"
        if bad_boxes == "refuse":
            raise DataError(f"{message}. Correct the file, or drop them with bad_boxes='drop'.")
        logger.warning("%s. They are left out.", message)
    images = tuple(_make_image(entry, grouped.get(image_id, [])) for image_id, entry in entries.items())
    return CocoDataset(annotations, image_dir, target, images, tuple(bad))


@dataclass(frozen=True)
class _File:
    path: Path

    def error(self, where: str, problem: str) -> DataError:
        return DataError(f"{self.path}: {where}: {problem}")


@dataclass(frozen=True)
class _ImageEntry:
    image_id: int | str
    name: str
    path: Path
    height: int
    width: int


@dataclass(frozen=True)
class _Box:
    annotation_id: int | str
    corners: tuple[float, float, float, float]
    label: int
    crowd: bool
    area: float


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"Annotation file {path} does not exist.") from None
    except OSError as error:
        raise DataError(f"Annotation file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); expected COCO JSON.") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}.") from error
    if not isinstance(document, dict):
        raise DataError(
            f"{path}: top level is a {type(document).__name__}; expected images, annotations and categories."
        )
    for key in ("images", "annotations", "categories"):
        if key not in document:
            raise DataError(
                f"{path}: field {key!r} is missing; a COCO detection file has images, annotations, categories."
            )
        if not isinstance(document[key], list):
            raise DataError(f"{path}: field {key!r} is a {type(document[key]).__name__}; expected a list.")
    return document


def _records(file: _File, document: Mapping[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, record in enumerate(document[key]):
        where = f"{key}[{index}]"
        if not isinstance(record, dict):
            raise file.error(where, f"is a {type(record).__name__}; expected an object.")
        yield where, record


def _field(file: _File, where: str, record: Mapping[str, Any], key: str, kinds: tuple[type, ...]) -> Any:
    if key not in record:
        raise file.error(f"{where}.{key}", "is missing.")
    value = record[key]
    if not isinstance(value, kinds) or isinstance(value, bool):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise file.error(f"{where}.{key}", f"is {value!r}; expected {expected}.")
    return value


def _read_categories(file: _File, document: Mapping[str, Any]) -> list[tuple[str, int]]:
    own: dict[int, str] = {}
    names: dict[str, int] = {}
    for where, record in _records(file, document, "categories"):
        category_id = _field(file, where, record, "id", (int,))
        name = _field(file, where, record, "name", (str,))
        if category_id in own:
            raise file.error(f"{where}.id", f"duplicate category id {category_id} (already {own[category_id]!r}).")
        if name in names:
            raise file.error(f"{where}.name", f"duplicate category name {name!r} (already id {names[name]}).")
        own[category_id], names[name] = name, category_id
    if not own:
        raise file.error("categories", "is empty; at least one class is needed.")
    return [(own[category_id], category_id) for category_id in sorted(own)]


def _match_categories(file: _File, own: list[tuple[str, int]], target: CategoryMap) -> dict[int, int]:
    index = {name: class_id for class_id, name in enumerate(target.names)}
    unknown = [name for name, _ in own if name not in index]
    if unknown:
        raise file.error(
            "categories",
            f"class(es) {', '.join(map(repr, unknown))} are not among the model's "
            f"({', '.join(map(repr, target.names))}).",
        )
    return {category_id: index[name] for name, category_id in own}


def _read_images(file: _File, document: Mapping[str, Any], image_dir: Path) -> dict[int | str, _ImageEntry]:
    entries: dict[int | str, _ImageEntry] = {}
    for where, record in _records(file, document, "images"):
        image_id = _field(file, where, record, "id", (int, str))
        if image_id in entries:
            raise file.error(f"{where}.id", f"duplicate image id {image_id!r} (already {entries[image_id].name!r}).")
        name = _field(file, where, record, "file_name", (str,))
        size = {key: _field(file, where, record, key, (int,)) for key in ("height", "width")}
        for key, value in size.items():
            if value <= 0:
                raise file.error(f"{where}.{key}", f"is {value}; expected a positive number of pixels.")
        path = image_dir / name
        if not path.is_file():
            raise file.error(f"{where}.file_name", f"image file {path} does not exist.")
        entries[image_id] = _ImageEntry(image_id, name, path, size["height"], size["width"])
    if not entries:
        raise file.error("images", "is empty; there is nothing to train on or to evaluate.")
    return entries


def _read_annotations(
    file: _File,
    document: Mapping[str, Any],
    entries: Mapping[int | str, _ImageEntry],
    class_of: Mapping[int, int],
) -> tuple[dict[int | str, list[_Box]], list[BadBox]]:
    grouped: dict[int | str, list[_Box]] = {}
    bad: list[BadBox] = []
    seen: set[int | str] = set()
    for where, record in _records(file, document, "annotations"):
        annotation_id = _field(file, where, record, "id", (int, str))
        if annotation_id in seen:
            raise file.error(f"{where}.id", f"duplicate annotation id {annotation_id!r}.")
        seen.add(annotation_id)
        image_id = _field(file, where, record, "image_id", (int, str))
        entry = entries.get(image_id)
        if entry is None:
            raise file.error(f"{where}.image_id", f"annotation {annotation_id!r} refers to unknown image {image_id!r}.")
        category_id = _field(file, where, record, "category_id", (int,))
        if category_id not in class_of:
            known = ", ".join(map(str, sorted(class_of)))
            raise file.error(
                f"{where}.category_id",
                f"annotation {annotation_id!r} refers to unknown category {category_id}; known ids: {known}.",
            )
        crowd = record.get("iscrowd", 0)
        if crowd not in (0, 1):
            raise file.error(f"{where}.iscrowd", f"is {crowd!r}; expected 0 or 1.")
        verdict = _judge_box(record.get("bbox"), entry)
        if isinstance(verdict, str):
            bad.append(BadBox(file.path, annotation_id, entry.name, verdict))
            continue
        area = record.get("area")
        usable = isinstance(area, (int, float)) and math.isfinite(area) and area > 0
        if not usable:
            area = (verdict[2] - verdict[0]) * (verdict[3] - verdict[1])
        grouped.setdefault(image_id, []).append(
            _Box(annotation_id, verdict, class_of[category_id], bool(crowd), float(area))  # type: ignore[arg-type]
        )
    return grouped, bad


def _judge_box(bbox: object, entry: _ImageEntry) -> tuple[float, float, float, float] | str:
    """Clipped corners of a usable COCO box, or the reason why it is not usable."""
    if bbox is None:
        return "has no bbox"
    numbers = isinstance(bbox, list) and len(bbox) == 4
    if not numbers or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in bbox):  # type: ignore[attr-defined]
        return f"bbox {bbox!r} is not four numbers [x, y, width, height]"
    x, y, width, height = (float(v) for v in bbox)  # type: ignore[attr-defined]
    if not all(math.isfinite(v) for v in (x, y, width, height)):
        return f"bbox {bbox!r} is not finite"
    if width <= 0 or height <= 0:
        return f"bbox {bbox!r} has no area"
    x1, y1 = max(x, 0.0), max(y, 0.0)
    x2, y2 = min(x + width, float(entry.width)), min(y + height, float(entry.height))
    if x2 <= x1 or y2 <= y1:
        return f"bbox {bbox!r} lies outside the {entry.width} x {entry.height} image"
    return x1, y1, x2, y2


def _make_image(entry: _ImageEntry, boxes: list[_Box]) -> CocoImage:
    corners = np.array([box.corners for box in boxes], dtype=np.float32).reshape(-1, 4)
    labels = np.array([box.label for box in boxes], dtype=np.int64)
    crowd = np.array([box.crowd for box in boxes], dtype=bool)
    area = np.array([box.area for box in boxes], dtype=np.float64)
    for array in (corners, labels, crowd, area):
        array.setflags(write=False)
    ids = tuple(box.annotation_id for box in boxes)
    return CocoImage(entry.image_id, entry.path, entry.height, entry.width, corners, labels, crowd, area, ids)
