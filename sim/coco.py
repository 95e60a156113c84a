"""COCO records of simulated pictures.

Beside COCO's own fields every annotation carries ``visibility`` (0..1) and ``amodal_bbox`` (x, y, width, height of the
whole object, which may leave the picture); every image carries its ``camera_matrix``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from carpus.sim.objects import CLASSES
from carpus.sim.tabletop import Sample

__all__ = ["CROWD_PIXELS", "CROWD_VISIBILITY", "annotation_rows", "coco_document", "image_name"]

#: Objects less visible than this are marked ``iscrowd``: finding them counts neither as right nor as wrong.
CROWD_VISIBILITY = 0.25
#: ... and so are objects with fewer visible pixels than this, at 640x480; scaled with the picture's area.
CROWD_PIXELS = 80


def image_name(index: int) -> str:
    """File name of picture ``index`` in the images folder."""
    return f"{index:06d}.jpg"


def annotation_rows(sample: Sample) -> list[dict[str, Any]]:
    """Annotations of one picture, without ids; the category id is the class id plus one."""
    height, width = sample.image.shape[:2]
    few = CROWD_PIXELS * height * width / (480 * 640)
    rows = []
    for box in sample.boxes:
        x0, y0, x1, y1 = box.visible
        a0, b0, a1, b1 = (round(v, 2) for v in box.amodal)
        rows.append(
            {
                "category_id": box.class_id + 1,
                "bbox": [x0, y0, x1 - x0, y1 - y0],
                "area": box.pixels,
                "iscrowd": int(box.visibility < CROWD_VISIBILITY or box.pixels < few),
                "visibility": round(box.visibility, 4),
                "amodal_bbox": [a0, b0, round(a1 - a0, 2), round(b1 - b0, 2)],
            }
        )
    return rows


def coco_document(generator: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Assemble a COCO document.

    Args:
        generator: what the split was made with; has at least ``split``, ``height`` and ``width``.
        records: one per picture in order: ``index``, ``camera_matrix`` and ``annotations`` (rows without ids).
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for record in records:
        image_id = record["index"] + 1
        images.append(
            {
                "id": image_id,
                "file_name": image_name(record["index"]),
                "height": generator["height"],
                "width": generator["width"],
                "camera_matrix": record["camera_matrix"],
            }
        )
        for row in record["annotations"]:
            annotations.append({"id": len(annotations) + 1, "image_id": image_id, **row})
    return {
        "info": {"description": f"Carpus simulated tabletop, split {generator['split']}", "generator": dict(generator)},
        "licenses": [],
        "categories": [{"id": k + 1, "name": name, "supercategory": "tabletop"} for k, name in enumerate(CLASSES)],
        "images": images,
        "annotations": annotations,
    }
