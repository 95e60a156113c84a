"""Pictures for people: boxes drawn into samples, and contact sheets of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from carpus.runtime.errors import DataError
from carpus.sim.boxes import ObjectBox
from carpus.sim.coco import CROWD_VISIBILITY
from carpus.sim.dataset import image_generator
from carpus.sim.objects import CLASSES
from carpus.sim.tabletop import Tabletop

__all__ = ["contact_sheet", "draw_boxes", "write_png"]

_SHOWN, _CROWD, _AMODAL = (60, 230, 60), (240, 70, 60), (90, 160, 255)


def draw_boxes(image: NDArray[np.uint8], boxes: Iterable[ObjectBox], amodal: bool = False) -> NDArray[np.uint8]:
    """Return a copy of an RGB picture with the visible boxes drawn in: green, or red where too little is visible.

    Args:
        image: ``(height, width, 3) uint8`` RGB.
        boxes: ground truth.
        amodal: draw the box of the whole object too, in blue.
    """
    canvas = image.copy()
    for box in boxes:
        if amodal:
            a = [round(v) for v in box.amodal]
            cv2.rectangle(canvas, (a[0], a[1]), (a[2] - 1, a[3] - 1), _AMODAL, 1)
        x0, y0, x1, y1 = box.visible
        paint = _SHOWN if box.visibility >= CROWD_VISIBILITY else _CROWD
        cv2.rectangle(canvas, (x0, y0), (x1 - 1, y1 - 1), paint, 2)
        label = f"{CLASSES[box.class_id]} {box.visibility:.2f}"
        place = (x0, y0 - 4 if y0 > 14 else y1 + 12)
        for thick, ink in ((3, (0, 0, 0)), (1, (255, 255, 255))):
            cv2.putText(canvas, label, place, cv2.FONT_HERSHEY_SIMPLEX, 0.42, ink, thick, cv2.LINE_AA)
    return canvas


def contact_sheet(
    domain: str, rows: int, columns: int, seed: int = 0, size: tuple[int, int] = (480, 640), robot: str = "gr1t2"
) -> NDArray[np.uint8]:
    """Render ``rows * columns`` scenes of a domain with their boxes into one RGB picture."""
    tabletop = Tabletop(domain, robot, size)
    try:
        pictures = []
        for index in range(rows * columns):
            sample = tabletop.sample(image_generator(seed, domain, index))
            pictures.append(draw_boxes(sample.image, sample.boxes))
    finally:
        tabletop.close()
    return np.concatenate([np.concatenate(pictures[r * columns : (r + 1) * columns], 1) for r in range(rows)])


def write_png(path: str | Path, image: NDArray[Any]) -> None:
    """Write an RGB picture as PNG, atomically.

    Raises:
        DataError: the folder does not exist or the file cannot be written.
    """
    path = Path(path)
    _, data = cv2.imencode(".png", cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data.tobytes())
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: cannot write the picture ({error.strerror}); choose a folder that exists") from error
