"""`carpus import`: a published checkpoint to checked weights of this project's own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from carpus.cli.classes import given_classes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

__all__ = ["Import"]


@dataclass(frozen=True)
class Import:
    """Bring a published checkpoint in: check every key, write safetensors, their configuration and a report.

    Files of DEIMv2, LW-DETR, Mamba-YOLO and YOLO-Master are read as their authors publish them, without running code
    from them. Exit code 0 when every key matched, 2 when one did not, or the file cannot be read: then nothing is
    written.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Published file (.pth, .pt, .safetensors)."""
    out: Path | None = None
    """Folder to write, or a file that ends in .safetensors; FAMILY-VARIANT by default."""
    family: str | None = None
    """Architecture family; recognised by names and shapes when left out."""
    variant: str | None = None
    """Member of the family; recognised likewise."""
    weights: Literal["ema", "model"] | None = None
    """Averaged or trained weights, where a file holds both; the averaged ones by default."""
    class_names: Path | None = None
    """Text file with one class name a line; by default what the file says, or COCO's by their number."""
    dataset: Path | None = None
    """Data set (a split's folder or a COCO JSON file) to take class names and ids from."""
    licence: str | None = None
    """SPDX expression of the weights' licence; by default what the file says."""
    input_size: tuple[int, int] | None = None
    """Height and width of the input [px]; the variant's own by default."""
    every_key: bool = False
    """List the keys that match as well; those that do not are always listed."""
    report: Path | None = None
    """Write the report to this JSON file too, also when keys do not match."""

    def run(self) -> int:
        """Do it; returns the exit code."""
        classes = given_classes(self.class_names, self.dataset)
        # Here, because they bring torch, which --help and a wrong option need not wait for.
        from carpus.models.figures import licence_of
        from carpus.models.published.folder import write_imported
        from carpus.models.published.importer import UnmatchedError, import_weights
        from carpus.models.published.reader import NO_LICENCE

        try:
            imported, report = import_weights(
                self.checkpoint,
                family=self.family,
                variant=self.variant,
                choice=self.weights,
                classes=classes,
                licence=self.licence,
                input_size=self.input_size,
            )
        except UnmatchedError as error:
            self._show(error.report)
            raise
        self._show(report)
        out = self.out or Path(f"{imported.family}-{imported.variant}")
        files = write_imported(imported, report, out)
        sizes = ", ".join(f"{file.name} ({_bytes(file.stat().st_size)})" for file in files)
        lines = [f"wrote {files[0].parent}: {sizes}"]
        if imported.licence == NO_LICENCE:
            usual = licence_of(imported.family, imported.variant)
            authors = f"; the authors publish this variant under: {usual}" if usual else ""
            lines.append(f"the file states no licence{authors}. Say it with --licence, so that bundles carry it")
        sys.stdout.write("\n".join(lines) + "\n")
        return 0

    def _show(self, report: Mapping[str, Any]) -> None:
        from carpus.models.published.report import report_lines
        from carpus.runtime.results import write_json

        sys.stdout.write("\n".join(report_lines(report, every_key=self.every_key)) + "\n")
        sys.stdout.flush()
        if self.report is not None:
            write_json(self.report, report)


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
