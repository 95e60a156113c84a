"""`carpus bench`: latency of a bundle on this machine, part by part."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from carpus.runtime.backends import available_backends
from carpus.runtime.bundle import Bundle
from carpus.runtime.detector import Detector
from carpus.runtime.errors import BackendError, DataError
from carpus.runtime.image import load_image
from carpus.runtime.latency import describe_machine, measure_latency, package_versions

__all__ = ["Bench"]

_PACKAGES = ("carpus", "numpy", "opencv-python-headless", "opencv-python", "pillow", "onnxruntime", "openvino")


@dataclass(frozen=True)
class Bench:
    """Time a bundle: p50, p90 and p99 of preprocess, inference and postprocess apart, with machine and versions."""

    bundle: Annotated[Path, tyro.conf.Positional]
    """Bundle: a .carpus folder or its .zip."""
    backend: Literal["all", "auto", "openvino", "onnxruntime"] = "all"
    """What runs the model; "all" is every one that is installed and can load the bundle."""
    image: Path | None = None
    """Image to run on; by default noise of the size below, from a fixed seed."""
    size: tuple[int, int] = (640, 480)
    """Width and height of the noise image [px]."""
    runs: int = 200
    """Calls to measure."""
    warm_up: int = 20
    """Calls before those."""
    threads: int | None = None
    """Threads for the model; the backend's choice by default."""
    score: float | None = None
    """Least score, which decides how much postprocessing has to do; the bundle's own by default."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Do it; returns the exit code."""
        if min(self.size) < 1:
            raise DataError(f"--size: expected a positive width and height, got {self.size}")
        with Bundle.open(self.bundle) as bundle:
            names = available_backends(bundle) if self.backend == "all" else (self.backend,)
            manifest = bundle.manifest
        if not names:
            raise BackendError(
                f"bundle {str(self.bundle)!r}: no installed backend can load it; pip install 'carpus[onnxruntime]'"
            )
        image = load_image(self.image) if self.image is not None else self._noise()
        report: dict[str, Any] = {
            "bundle": self.bundle.name,
            "model": f"{manifest.family} {manifest.variant}",
            "image": {"width": image.shape[1], "height": image.shape[0]},
            "runs": self.runs,
            "machine": describe_machine(),
            "packages": package_versions(*_PACKAGES),
            "backends": [self._measure(name, image) for name in names],
        }
        sys.stdout.write(json.dumps(report, indent=1) + "\n" if self.json else _table(report))
        return 0

    def _noise(self) -> np.ndarray:
        width, height = self.size
        return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)

    def _measure(self, name: str, image: np.ndarray) -> dict[str, Any]:
        with Detector.open(self.bundle, name, num_threads=self.threads, score_threshold=self.score) as detector:
            latency = measure_latency(detector, image, runs=self.runs, warm_up=self.warm_up)
            backend = detector.backend
            return {
                "backend": backend.name,
                "version": backend.version,
                "device": backend.device,
                "precision": backend.precision,
                "threads": backend.num_threads or "its own choice",
                "milliseconds": {part: dict(values) for part, values in latency.parts.items()},
            }


def _table(report: dict[str, Any]) -> str:
    machine, image = report["machine"], report["image"]
    lines = [
        f"{report['model']} ({report['bundle']}), one {image['width']} x {image['height']} image a call, "
        f"{report['runs']} calls",
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}",
        ", ".join(f"{name} {version}" for name, version in report["packages"].items()),
        "",
        f"{'milliseconds':<34}{'p50':>9}{'p90':>9}{'p99':>9}",
    ]
    for row in report["backends"]:
        title = f"{row['backend']} {row['version']} {row['precision']}"
        lines.append(f"{title} ({row['device']}, threads: {row['threads']})")
        for part, values in row["milliseconds"].items():
            lines.append(f"  {part:<32}" + "".join(f"{values[name]:>9.3f}" for name in ("p50", "p90", "p99")))
    return "\n".join(lines) + "\n"
