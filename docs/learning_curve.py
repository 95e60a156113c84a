"""Draw docs/images/learning_curve.png of a training run: python docs/learning_curve.py RUN."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main(arguments: list[str]) -> int:
    """Write the picture from the run's history.json; returns the exit code."""
    if len(arguments) != 1:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    records = json.loads((Path(arguments[0]) / "history.json").read_text(encoding="utf-8"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    epochs = range(1, len(records) + 1)
    left.plot(epochs, [record["loss"] for record in records])
    left.set(xlabel="epoch", ylabel="training loss")
    scored = [(epoch, record) for epoch, record in zip(epochs, records, strict=True) if "ap" in record]
    for key, label in (("ap", "AP (0.50:0.95)"), ("ap50", "AP50")):
        values = [record[key] for _, record in scored]
        right.plot([epoch for epoch, _ in scored], values, marker=".", label=f"{label}, last {values[-1]:.3f}")
    right.set(xlabel="epoch", ylabel="held-out split, averaged weights", ylim=(0, 1))
    right.grid(alpha=0.3)
    right.legend(loc="upper left")
    figure.savefig(Path(__file__).parent / "images" / "learning_curve.png", dpi=100)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
