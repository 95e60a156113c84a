"""`carpus export`: a checkpoint to a verified bundle."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from carpus.cli.classes import given_classes
from carpus.runtime.errors import DataError

__all__ = ["Export"]


@dataclass(frozen=True)
class Export:
    """Turn a checkpoint into a bundle, and check on pictures that it still computes what was trained.

    Exit code 0 when the bundle was written, 1 when an exported form strays from the trained model (nothing is
    written), 2 for wrong input.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Carpus training checkpoint (best.pt), what `carpus import` wrote, or published weights (.pth, .pt)."""
    out: Path
    """Where to write the bundle, such as my.carpus."""
    family: str | None = None
    """Architecture family; needed only for published weights."""
    variant: str | None = None
    """Member of the family; needed only for published weights."""
    class_names: Path | None = None
    """Text file with one class name a line, for weights that do not carry them."""
    dataset: Path | None = None
    """Data set (a split's folder or a COCO JSON file) to take class names and ids from."""
    name: str | None = None
    """Short name for people; family and variant by default."""
    description: str = ""
    """One paragraph for people."""
    licence: str | None = None
    """SPDX expression of the weights' licence; by default what imported or published weights state, Apache-2.0 for
    a training from random weights, else NOASSERTION."""
    zip: bool = False
    """Write one .zip file instead of a folder."""
    images: Path | None = None
    """Folder with pictures for the parity check; drawn ones by default."""
    num_images: int = 16
    """Most pictures for the parity check."""
    precision: tuple[Literal["onnx", "fp32", "fp16"], ...] = ("fp32", "fp16")
    """OpenVINO artefacts to write beside the ONNX one; "onnx" alone writes none."""
    score: float | None = None
    """Default score threshold of the bundle, 0 to 1; by default the family's: 0.5, and 0.25 where it suppresses."""
    iou: float | None = None
    """Default IoU threshold of the bundle's non-maximum suppression, 0 to 1; by default the family's 0.7."""
    threads: int | None = None
    """Threads for the check; the backend's choice by default."""

    def run(self) -> int:
        """Do it; returns the exit code."""
        if self.num_images < 1:
            raise DataError(f"--num-images: expected at least 1, got {self.num_images}")
        for option, value in (("--score", self.score), ("--iou", self.iou)):
            if value is not None and not 0.0 <= value <= 1.0:
                raise DataError(f"{option}: expected 0 to 1, got {value}")
        if self.threads is not None and self.threads < 1:
            raise DataError(f"--threads: expected at least 1, got {self.threads}")
        # Here, because they bring torch, which --help and a wrong option need not wait for.
        from carpus.export.images import folder_images, procedural_images
        from carpus.export.pipeline import export_bundle
        from carpus.export.source import load_source
        from carpus.models.published.reader import NO_LICENCE

        source = load_source(
            self.checkpoint,
            family=self.family,
            variant=self.variant,
            classes=given_classes(self.class_names, self.dataset),
            name=self.name,
            licence=self.licence,
            description=self.description,
        )
        if source.licence == NO_LICENCE:
            sys.stderr.write(
                f"carpus export: {self.checkpoint} does not say under which licence its weights stand, so the bundle "
                f"says {NO_LICENCE}; name it with --licence.\n"
            )
        if self.images is None:
            images = procedural_images(min(self.num_images, 8))
        else:
            images = folder_images(self.images, self.num_images)
        out = self.out.with_name(self.out.name + ".zip") if self.zip and self.out.suffix != ".zip" else self.out
        started = time.monotonic()
        done = export_bundle(
            source,
            out,
            images=images,
            openvino=[item for item in self.precision if item != "onnx"],
            score_threshold=self.score,
            iou_threshold=self.iou,
            num_threads=self.threads,
            progress=lambda line: _say(f"[{time.monotonic() - started:5.1f} s] {line}"),
        )
        size = sum(entry.bytes for entry in done.manifest.files)
        _say(f"{done.path}: {len(done.manifest.artefacts)} artefacts, {size / 1e6:.1f} MB, all within the thresholds")
        return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
