"""Bundle in, detections out: what a robot needs, with numpy and OpenCV and never torch."""

from __future__ import annotations

from carpus.runtime.bundle import Bundle
from carpus.runtime.detections import Detections
from carpus.runtime.detector import Detector, Timing
from carpus.runtime.errors import (
    BackendError,
    BundleError,
    CalibrationError,
    CarpusError,
    DataError,
    RetargetError,
)
from carpus.runtime.image import load_image
from carpus.runtime.spec import Manifest, Postprocess, Preprocess

__all__ = [
    "BackendError",
    "Bundle",
    "BundleError",
    "CalibrationError",
    "CarpusError",
    "DataError",
    "Detections",
    "Detector",
    "Manifest",
    "Postprocess",
    "Preprocess",
    "RetargetError",
    "Timing",
    "load_image",
]
