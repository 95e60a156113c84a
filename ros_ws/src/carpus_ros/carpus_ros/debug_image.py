"""Detections drawn into their image."""

from __future__ import annotations

import cv2
import numpy as np
from carpus.runtime.detections import Detections

__all__ = ["annotate"]


def annotate(image: np.ndarray, detections: Detections) -> np.ndarray:
    """A copy of the image (height, width, 3) uint8 RGB with boxes, names and scores."""
    canvas = np.array(image)
    for box, score, class_id, name in detections:
        left, top, right, bottom = (round(float(value)) for value in box)
        hue = (class_id * 47) % 180
        colour = cv2.cvtColor(np.array([[[hue, 200, 255]]], np.uint8), cv2.COLOR_HSV2RGB)[0, 0].tolist()
        cv2.rectangle(canvas, (left, top), (right, bottom), colour, 2)
        cv2.putText(canvas, f"{name} {score:.2f}", (left + 2, top + 14), cv2.FONT_HERSHEY_SIMPLEX, 0.5, colour, 1)
    return canvas
