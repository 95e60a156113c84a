"""How long a detector takes, part by part, and on what machine that was measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from carpus.runtime.detector import Detector
from carpus.runtime.errors import DataError

__all__ = ["Latency", "describe_machine", "measure_latency", "package_versions"]

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Latency:
    """Percentiles of the parts of single-image calls [ms].

    Attributes:
        runs: calls measured.
        parts: "preprocess", "inference", "postprocess" and "total", each with "p50", "p90" and "p99" [ms].
    """

    runs: int
    parts: Mapping[str, Mapping[str, float]]

    def metrics(self) -> dict[str, float]:
        """The same figures as a bundle's benchmark record holds them: ``{"inference_p50_ms": ...}``."""
        return {f"{part}_{name}_ms": value for part, values in self.parts.items() for name, value in values.items()}


def measure_latency(detector: Detector, image: np.ndarray, *, runs: int = 200, warm_up: int = 20) -> Latency:
    """Time single-image calls of a detector.

    Args:
        detector: an open detector.
        image: (h, w, 3) uint8 RGB.
        runs: calls to measure.
        warm_up: calls before those, not measured.

    Raises:
        DataError: ``runs`` is not positive.
    """
    if runs < 1 or warm_up < 0:
        raise DataError(f"runs: expected at least 1 (and warm_up at least 0), got {runs} and {warm_up}")
    for _ in range(warm_up):
        detector(image)
    samples = np.empty((runs, 4))
    for index in range(runs):
        detector(image)
        timing = detector.last_timing
        samples[index] = (*timing, timing.total)
    figures = np.percentile(samples * 1e3, _PERCENTILES, axis=0)
    names = ("preprocess", "inference", "postprocess", "total")
    parts = {
        name: {f"p{percent}": round(float(figures[row, column]), 4) for row, percent in enumerate(_PERCENTILES)}
        for column, name in enumerate(names)
    }
    return Latency(runs, parts)


def describe_machine() -> dict[str, str]:
    """Processor, usable cores and system of this machine, in words."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        cores = os.cpu_count() or 1
    return {
        "processor": _processor(),
        "cores": str(cores),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def package_versions(*names: str) -> dict[str, str]:
    """Versions of those of the named distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    for path, key in (("/proc/cpuinfo", "model name"), ("/proc/device-tree/model", "")):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if not key:
            return text.strip("\x00\n ")
        for line in text.splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
