"""`carpus verify`: is this bundle whole, and does it compute here what the trained model computed?"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from carpus.runtime.codec import encode
from carpus.runtime.verify import VerifyReport, VerifyRow, verify_bundle

__all__ = ["Verify"]


@dataclass(frozen=True)
class Verify:
    """Check a bundle's hashes and graphs, and run every backend of this machine against the stored reference.

    Exit code 0 when every installed backend is within the thresholds, 1 when one is not or none is installed, 2 when
    the bundle itself is broken.
    """

    bundle: Annotated[Path, tyro.conf.Positional]
    """Bundle: a .carpus folder or its .zip."""
    backend: tuple[Literal["openvino", "onnxruntime"], ...] = ()
    """Backends to run; all by default."""
    threads: int | None = None
    """Threads for the model; the backend's choice by default."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Do it; returns the exit code."""
        report = verify_bundle(self.bundle, self.backend or None, num_threads=self.threads)
        if self.json:
            sys.stdout.write(json.dumps(_as_json(report), indent=1, ensure_ascii=False) + "\n")
        else:
            _print_table(report)
        return 0 if report.passed else 1


def _as_json(report: VerifyReport) -> dict[str, Any]:
    return {"bundle": report.path, "passed": report.passed, "files": list(report.files), "rows": encode(report.rows)}


def _print_table(report: VerifyReport) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    manifest = report.manifest
    console = Console()
    console.print(
        f"{report.path}: {manifest.family} {manifest.variant}, {len(manifest.classes)} classes; schema version "
        f"{manifest.schema_version}, {len(report.files)} files with the right sha256",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    # Without a frame, and with one space between columns, the figures fit 80 columns unbroken.
    table = Table(
        *("backend", "weights", "images", "box error, px", "score error", "differ", "verdict"),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    for row in report.rows:
        table.add_row(row.backend, row.precision, *_figures(row), row.status)
    console.print(table)
    for row in report.rows:
        if row.reason:
            line = f"{row.backend} ({row.precision}) {row.status}: {row.reason}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if not report.passed and not report.failures:
        console.print("no installed backend can load this bundle, so nothing was verified", highlight=False)


def _figures(row: VerifyRow) -> tuple[str, str, str, str]:
    """Images, box error, score error and differing detections, each with its limit."""
    if row.record is None:
        return "-", "-", "-", "-"
    metrics, limits = row.record.metrics, row.record.thresholds
    return (
        str(row.record.images),
        _against(metrics["max_box_px"], limits["max_box_px"]),
        _against(metrics["max_score"], limits["max_score"]),
        f"{metrics['detections_differ']:.0f} of {metrics['detections']:.0f}",
    )


def _against(value: float, limit: float) -> str:
    """A figure beside its limit."""
    return f"{value:.1e} {'<' if value <= limit else '>'} {limit:g}"
