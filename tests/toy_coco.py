"""A tiny dataset of coloured rectangles in COCO layout, for training tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np

COLOURS = {"rot": (220, 40, 40), "grün": (40, 200, 60), "青": (50, 80, 230)}
IDS = {"rot": 7, "grün": 3, "青": 90}


def document(images: list[dict[str, Any]], annotations: list[dict[str, Any]]) -> dict[str, Any]:
    """A COCO document over the three classes, whose ids are neither contiguous nor in order."""
    return {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": IDS[name], "name": name} for name in COLOURS],
    }


def write_split(
    folder: Path, count: int, seed: int, size: tuple[int, int] = (120, 160), sides: tuple[int, int] = (24, 60)
) -> Path:
    """Draws ``count`` images of (height, width) with one to three rectangles each; returns the annotation file."""
    (folder / "images").mkdir(parents=True)
    rng = np.random.default_rng(seed)
    height, width = size
    images, annotations = [], []
    for index in range(count):
        picture = rng.integers(90, 140, (height, width, 3), dtype=np.uint8)
        for _ in range(rng.integers(1, 4)):
            w, h = (int(v) for v in rng.integers(*sides, 2))
            x, y = int(rng.integers(0, width - w)), int(rng.integers(0, height - h))
            name = list(COLOURS)[int(rng.integers(len(COLOURS)))]
            picture[y : y + h, x : x + w] = COLOURS[name]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": index + 1,
                    "category_id": IDS[name],
                    "bbox": [x, y, w, h],
                    "area": w * h,
                    "iscrowd": 0,
                }
            )
        cv2.imwrite(str(folder / "images" / f"{index:04d}.png"), picture[..., ::-1])
        images.append({"id": index + 1, "file_name": f"{index:04d}.png", "height": height, "width": width})
    file = folder / "annotations.json"
    file.write_text(json.dumps(document(images, annotations), ensure_ascii=False), encoding="utf-8")
    return file


def write_toy(root: Path, train: int = 32, heldout: int = 8) -> Path:
    """A root with ``train`` and ``heldout`` splits."""
    write_split(root / "train", train, seed=0)
    write_split(root / "heldout", heldout, seed=1)
    return root
