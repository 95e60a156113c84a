"""Detections as JSON and as COCO results."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from carpus.runtime.detections import Detections
from carpus.runtime.errors import DataError
from carpus.runtime.spec import ClassInfo

__all__ = ["coco_results", "detections_record", "read_coco_image_ids", "write_json"]


def detections_record(detections: Detections, image: str, **more: Any) -> dict[str, Any]:
    """One image's detections as plain JSON types.

    Args:
        detections: the detections.
        image: name of the image.
        more: further keys for the record, such as the frame number.

    Returns:
        ``{"image", "width", "height", ..., "detections": [{"class", "class_id", "score", "xyxy"}]}`` with boxes in
        pixels of the source image to a hundredth, and scores to a millionth.
    """
    return {
        "image": image,
        "width": detections.image_size[1],
        "height": detections.image_size[0],
        **more,
        "detections": [
            {
                "class": name,
                "class_id": class_id,
                "score": round(score, 6),
                "xyxy": [round(float(value), 2) for value in box],
            }
            for box, score, class_id, name in detections
        ],
    }


def coco_results(detections: Detections, image_id: int, classes: tuple[ClassInfo, ...]) -> list[dict[str, Any]]:
    """One image's detections as entries of a COCO results file: data set ids and xywh boxes.

    Args:
        detections: the detections.
        image_id: the image's id in the annotation file.
        classes: the manifest's classes, which map class ids to data set ids.
    """
    return [
        {
            "image_id": image_id,
            "category_id": classes[class_id].dataset_id,
            "bbox": [float(value) for value in box],
            "score": float(score),
        }
        for box, score, class_id in zip(detections.xywh, detections.score, detections.class_id, strict=True)
    ]


def read_coco_image_ids(path: str | os.PathLike[str]) -> dict[str, int]:
    """Image ids by file name, from a COCO annotation file.

    Raises:
        DataError: the file is missing or is not COCO JSON.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return {str(image["file_name"]): int(image["id"]) for image in data["images"]}
    except OSError as error:
        raise DataError(f"COCO annotations {str(path)!r}: cannot be read ({error})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"COCO annotations {str(path)!r}: expected JSON with images, each with file_name and id ({error!r})"
        ) from None


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write JSON whole or not at all: to a temporary name in the same folder, then renamed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(data, stream, ensure_ascii=False, indent=1)
            stream.write("\n")
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
