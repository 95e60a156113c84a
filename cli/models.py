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
            sys.stdout.write(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
        else:
            sys.stdout.write(_table(rows))
        return 0


def _table(rows: list[ModelRow]) -> str:
    """The rows as text that fits 80 columns."""
    lines = [
        "                         parameters                      GFLOPs      COCO AP",
        "model         input      trained   deployed  exported  paper   here  paper  paper",
    ]
    for row in rows:
        published = row.published
        params, gflops, ap = (
            ("-", "-", "-")
            if published is None
            else (f"{published.params_m:.1f}M", f"{published.gflops:.1f}", f"{published.ap:.1f}")
        )
        lines.append(
            f"{row.family + ' ' + row.variant:<13} {f'{row.input_size[1]}x{row.input_size[0]}':<8} "
            f"{row.trainable_params:>9,} {row.deploy_params:>10,} {row.fused_params:>9,} {params:>6} "
            f"{row.gflops:>6.2f} {gflops:>6} {ap:>6}"
        )
    lines.append(
        "deployed: the form and count of the authors; exported: every norm folded, training-only parts dropped"
    )
    unseen = [f"{row.variant} {row.attention_gflops:.1f}" for row in rows if row.attention_gflops]
    if unseen:
        lines += [
            "GFLOPs leave out, as the authors' counter does, products between the tokens of",
            f"transformer backbones: {', '.join(unseen)}",
        ]
    return "\n".join(lines) + "\n"
