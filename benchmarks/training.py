"""Trains detectors on the tabletop at equal budgets of processor time, and compares what each has learned.

    carpus sim dataset runs/tabletop --train 4000 --heldout 1000 --seed 0
    python benchmarks/training.py families --data runs/tabletop --out runs/families [--minutes 30] [--only NAME ...]
    python benchmarks/training.py ablation --data runs/tabletop --out runs/ablation [--epochs 2] [--only NAME ...]

``families``: the smallest detectors of each family with their ``tabletop`` recipes, each within the same minutes of one
core. ``ablation``: the switches of a recipe one at a time, the same epochs at 192 px each. The clock is this process's
own processor time (one thread, no workers), so other work on the machine does not lengthen it. An interrupted run goes
on where it stopped; a finished one is only read. Writes OUT/table.md, OUT/curves.png and OUT/table.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from carpus.models.engine_history import write_json_atomic
from carpus.models.recipe import Recipe
from carpus.models.recipe_table import get_recipe
from carpus.models.train import train
from carpus.models.train_config import TrainConfig


@dataclass(frozen=True)
class Run:
    """One training: what, at which size, and how its recipe differs from ``tabletop``."""

    name: str
    family: str
    variant: str
    size: tuple[int, int] = (320, 320)
    changes: dict[str, Any] = field(default_factory=dict)
    dense_o2o: bool = True

    def recipe(self) -> Recipe:
        """``tabletop`` with the changes."""
        recipe = replace(get_recipe("tabletop", self.family, self.variant), **self.changes)
        return recipe if self.dense_o2o else recipe.without_dense_o2o()


# Pictures of 4:3 fill a letterbox of 256 x 320 but for 16 rows. Mamba-YOLO's scan without a compiled extension is slow:
# at the size of the others it does not reach one epoch in half an hour.
FAMILIES = (
    Run("deimv2-atto", "deimv2", "atto"),
    Run("deimv2-pico", "deimv2", "pico"),
    Run("deimv2-n", "deimv2", "n"),
    Run("lw_detr-tiny", "lw_detr", "tiny"),
    Run("mamba_yolo-T", "mamba_yolo", "T", (160, 224)),
    Run("yolo_master-esmoe-n", "yolo_master", "esmoe-n", (256, 320)),
)
_ATTO: dict[str, Any] = {"family": "deimv2", "variant": "atto", "size": (192, 192)}
_TINY: dict[str, Any] = {"family": "lw_detr", "variant": "tiny", "size": (192, 192)}
_FLAT: dict[str, Any] = {"input_scales": ()}
ABLATION = (
    Run("deimv2-atto, tabletop", **_ATTO, changes=_FLAT),
    Run("deimv2-atto, varifocal loss for MAL", **_ATTO, changes={**_FLAT, "classification": "vfl"}),
    Run("deimv2-atto, no dense O2O", **_ATTO, changes=_FLAT, dense_o2o=False),
    Run("deimv2-atto, component decay 0.5", **_ATTO, changes={**_FLAT, "component_decay": 0.5}),
    Run("deimv2-atto, layer decay 0.5", **_ATTO, changes={**_FLAT, "layer_decay": 0.5}),
    Run("deimv2-atto, no dense supervision", **_ATTO, changes={**_FLAT, "dense_supervision": False}),
    Run("lw_detr-tiny, tabletop", **_TINY, changes=_FLAT),
    Run("lw_detr-tiny, Group DETR with 4 groups", **_TINY, changes={**_FLAT, "query_groups": 4}),
    Run("lw_detr-tiny, MAL for IA-BCE", **_TINY, changes={**_FLAT, "classification": "mal"}),
    Run(
        "lw_detr-tiny, layer decay 0.8, component decay 0.7",
        **_TINY,
        changes={**_FLAT, "layer_decay": 0.8, "component_decay": 0.7},
    ),
)


def carry_out(run: Run, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains, or goes on, or reads what is finished; returns the history."""
    recipe, minutes = run.recipe(), options.minutes
    if options.plan == "ablation":
        recipe, minutes = recipe.scaled(options.epochs), None
    config = TrainConfig(
        data=options.data,
        out=options.out / run.name.replace(", ", "-").replace(" ", "_"),
        recipe=recipe,
        family=run.family,
        variant=run.variant,
        input_size=run.size,
        max_minutes=minutes,
        eval_every=1 if options.plan == "families" else 100,
        eval_images=250,
        threads=1,
        workers=0,
        accelerator="cpu",
    )
    result = train(config, clock=time.process_time)
    if not result.finished:
        raise KeyboardInterrupt
    return list(result.history)


def summary(run: Run, history: list[dict[str, Any]], images: int) -> dict[str, Any]:
    """What the table says of a run."""
    last = history[-1]
    return {
        "name": run.name,
        "size": f"{run.size[0]} x {run.size[1]}",
        "epochs": len(history),
        "images": images * len(history),
        "minutes": round(sum(record["seconds"] for record in history) / 60, 1),
        "ap": last["ap"],
        "ap50": last["ap50"],
        "history": [{key: record.get(key) for key in ("epoch", "seconds", "ap", "ap50", "loss")} for record in history],
    }


def write(rows: list[dict[str, Any]], out: Path) -> str:
    """Table, curves and JSON; returns the table."""
    lines = ["| training | input | images | minutes | AP | AP50 |", "|---|---|---|---|---|---|"]
    for row in rows:
        figures = f"{row['images']:,} | {row['minutes']:.1f} | {row['ap']:.3f} | {row['ap50']:.3f}"
        lines.append(f"| {row['name']} | {row['size']} | {figures} |")
    table = "\n".join(lines) + "\n"
    (out / "table.md").write_text(table, encoding="utf-8")
    write_json_atomic(rows, out / "table.json")
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for row in rows:
        minutes, scored, spent = [], [], 0.0
        for record in row["history"]:
            spent += record["seconds"] / 60
            if record["ap"] is not None:
                minutes.append(spent)
                scored.append(record["ap"])
        axes.plot(minutes, scored, marker="o", label=f"{row['name']}: {scored[-1]:.3f}")
    axes.set(
        xlabel="processor time of training [min]", ylabel="AP on the held-out split, averaged weights", ylim=(0, None)
    )
    axes.set_xlim(0, None)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(out / "curves.png", dpi=110)
    return table


def main(arguments: list[str]) -> int:
    """Carries out the plan; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=("families", "ablation"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="start of a name")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    plan = FAMILIES if options.plan == "families" else ABLATION
    chosen = [run for run in plan if options.only is None or any(run.name.startswith(name) for name in options.only)]
    if not chosen:
        parser.error(f"--only {' '.join(options.only)}: the plan has {', '.join(run.name for run in plan)}")
    images = len(json.loads((options.data / "train" / "annotations.json").read_text(encoding="utf-8"))["images"])
    rows = []
    try:
        for run in chosen:
            rows.append(summary(run, carry_out(run, options), images))
            sys.stdout.write(write(rows, options.out).splitlines()[-1] + "\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
