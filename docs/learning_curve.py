"""Draw the learning curve of training runs that follow on each other: python docs/learning_curve.py RUN [RUN ...]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main(runs: list[str]) -> int:
    """Write docs/images/learning_curve.png from each run's history.json; returns the exit code."""
    if not runs:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    records, starts = [], []
    for run in runs:
        starts.append(len(records))
        records += json.loads((Path(run) / "history.json").read_text(encoding="utf-8"))
    epochs = range(1, len(records) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(epochs, [record["loss"] for record in records])
    left.set(xlabel="epoch", ylabel="training loss")
    scored = [(epoch, record) for epoch, record in zip(epochs, records, strict=True) if "ap" in record]
    for key, label in (("ap", "AP (0.50:0.95)"), ("ap50", "AP50")):
        values = [record[key] for _, record in scored]
        right.plot([epoch for epoch, _ in scored], values, marker=".", label=f"{label}, last {values[-1]:.3f}")
    right.set(xlabel="epoch", ylabel="held-out split, averaged weights", ylim=(0, 1))
    right.grid(alpha=0.3)
    right.legend(loc="upper left")
    for axis in (left, right):
        for start in starts[1:]:
            axis.axvline(start + 0.5, color="grey", linestyle=":")
    figure.savefig(Path(__file__).parent / "images" / "learning_curve.png", dpi=100)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
