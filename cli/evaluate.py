"""`carpus evaluate`: COCO average precision of a bundle, through the runtime that a robot uses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from carpus.models.data.coco import CategoryMap, locate_split
from carpus.models.data.coco_reader import load_coco
from carpus.models.evaluate import DetectionMetrics, evaluate_coco
from carpus.runtime.detector import Detector
from carpus.runtime.errors import DataError
from carpus.runtime.results import write_json

__all__ = ["Evaluate"]


@dataclass(frozen=True)
class Evaluate:
    """Measure COCO average precision of a bundle on a data set."""

    bundle: Annotated[Path, tyro.conf.Positional]
    """Bundle: a .carpus folder or its .zip."""
    dataset: Annotated[Path, tyro.conf.Positional]
    """A split's folder (annotations.json and images/) or a COCO JSON file."""
    backend: Literal["auto", "openvino", "onnxruntime"] = "auto"
    """What runs the model."""
    precision: Literal["fp32", "fp16", "int8"] | None = None
    """Which artefact; the backend's first by default."""
    limit: int | None = None
    """Use only so many images, spread evenly over the data set."""
    batch: int = 8
    """Images in one inference."""
    threads: int | None = None
    """Threads for the model; the backend's choice by default."""
    json: Path | None = None
    """Write the metrics to this file as well."""

    def run(self) -> int:
        """Do it; returns the exit code."""
        for option, value in (("limit", self.limit), ("batch", self.batch)):
            if value is not None and value < 1:
                raise DataError(f"--{option}: expected at least 1, got {value}")
        with Detector.open(
            self.bundle, self.backend, num_threads=self.threads, evaluation=True, precision=self.precision
        ) as detector:
            # Whatever the bundle's own: cutting weak detections cuts the precision-recall curve. Suppression keeps the
            # published 0.001, below which there are thousands of candidates an image.
            detector.score_threshold = 0.001 if detector.suppresses else 0.0
            manifest = detector.manifest
            categories = CategoryMap(manifest.class_names, tuple(info.dataset_id for info in manifest.classes))
            dataset = load_coco(*locate_split(self.dataset), categories=categories)
            if self.limit is not None:
                dataset = dataset.subset(self.limit)
            if not len(dataset):
                raise DataError(f"{self.dataset}: the data set has no images to evaluate on")
            dataset.require_objects("score against")
            with _progress() as advance:
                metrics = evaluate_coco(
                    lambda images: detector.detect_batch(images, batch_size=self.batch),
                    dataset,
                    batch_size=self.batch,
                    progress=advance,
                )
            record = {
                "bundle": self.bundle.name,
                "dataset": self.dataset.name,
                "backend": detector.backend_name,
                "precision": detector.backend.precision,
                "metrics": metrics.as_dict(),
            }
        _print(record["backend"], record["precision"], metrics)
        if self.json is not None:
            write_json(self.json, record)
        return 0


def _print(backend: object, precision: object, metrics: DetectionMetrics) -> None:
    lines = [
        f"{metrics.images} images, {backend} {precision}",
        f"AP {metrics.ap:.3f}   AP50 {metrics.ap50:.3f}   AP75 {metrics.ap75:.3f}   AR100 {metrics.ar100:.3f}",
        f"small {metrics.ap_small:.3f}   medium {metrics.ap_medium:.3f}   large {metrics.ap_large:.3f}",
    ]
    width = max(map(len, metrics.per_class), default=0)
    lines += [f"  {name:<{width}}  {value:.3f}" for name, value in metrics.per_class.items()]
    sys.stdout.write("\n".join(lines) + "\n")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(
        *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    ) as bar:
        task = bar.add_task("evaluating", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
