"""`carpus models`: what every variant costs, counted here and as published."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from carpus.models.summary import ModelRow, model_table

__all__ = ["Models"]


@dataclass(frozen=True)
class Models:
    """Print parameters and GFLOPs of every variant beside the published figures.

    GFLOPs are 2 x multiply-accumulates for one image of the variant's own size, as the authors count them.
    """

    family: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Families to show; all by default."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Do it; returns the exit code."""
        rows = model_table(self.family or None)
        if self.json:
            text = json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
            sys.stdout.write(text + "\n")
        else:
            _print_table(rows)
        return 0


def _print_table(rows: list[ModelRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "input", "trained", "deployed", "exported", "paper", "GFLOPs", "paper", "COCO AP, paper")
    for row in rows:
        published = row.published
        table.add_row(
            f"{row.family} {row.variant}",
            f"{row.input_size[1]}x{row.input_size[0]}",
            f"{row.trainable_params:,}",
            f"{row.deploy_params:,}",
            f"{row.fused_params:,}",
            "-" if published is None else f"{published.params_m:g} M",
            f"{row.gflops:.2f}",
            "-" if published is None else f"{published.gflops:g}",
            "-" if published is None else f"{published.ap:g}",
        )
    Console().print(table)
