"""`carpus models`: what every variant costs, counted here and as published, and what can be done with it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import track

__all__ = ["Models"]


@dataclass(frozen=True)
class Models:
    """List the detector families: parameters and GFLOPs of every variant beside the published figures, and support.

    Counting looks at shapes and runs no arithmetic. GFLOPs are those of one image of the variant's own size, with a
    multiply-accumulate as two operations. Each difference of more than 2 % from a published figure is explained. One
    family: `carpus models lw_detr`; one variant in detail: `carpus models lw_detr tiny`.
    """

    family: Annotated[str | None, tyro.conf.Positional] = None
    """Family to show; all by default."""
    variant: Annotated[str | None, tyro.conf.Positional] = None
    """Variant to show in detail."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Do it; returns the exit code."""
        # Here, because they bring torch, which --help and a wrong option need not wait for.
        from carpus.cli.models_text import detail_text, row_values, table_text
        from carpus.export.support import support_of
        from carpus.models.summary import model_row, variants_of

        names = variants_of(self.family, self.variant)
        rows = [model_row(family, variant) for family, variant in _progress(names)]
        support = {name: support_of(*name) for name in names}
        columns = shutil.get_terminal_size((100, 24)).columns
        if self.json:
            values = [row_values(row, support[row.family, row.variant]) for row in rows]
            sys.stdout.write(json.dumps(values, indent=1) + "\n")
        elif self.variant is not None:
            sys.stdout.write(detail_text(rows[0], support[names[0]], columns))
        else:
            sys.stdout.write(table_text(rows, support, columns))
        return 0


def _progress(names: list[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """The names one by one, with a bar on a terminal."""
    if not sys.stderr.isatty():
        return names
    return track(names, "counting", console=Console(stderr=True), transient=True)
