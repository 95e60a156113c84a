"""What a training run leaves to be read: history.json, a learning curve, TensorBoard scalars."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["EventWriter", "RunningMeans", "draw_learning_curve", "open_event_writer", "write_json_atomic"]


class EventWriter(Protocol):
    """The part of TensorBoard's ``SummaryWriter`` that training uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def add_image(self, tag: str, img_tensor: NDArray[np.uint8], global_step: int, *, dataformats: str) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class RunningMeans:
    """Means of named values over an epoch, with a state that can be saved."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._count = 0

    def add(self, values: Mapping[str, float]) -> None:
        """Counts one more observation of every value."""
        self._count += 1
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Mean of each value; empty before the first observation."""
        return {name: value / self._count for name, value in self._sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"sums": dict(self._sums), "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self._sums = dict(state["sums"])
        self._count = int(state["count"])


def write_json_atomic(content: Any, path: Path) -> None:
    """Writes JSON to a temporary name and renames it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(
            json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
        )
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def open_event_writer(folder: Path, first_step: int) -> EventWriter:
    """A TensorBoard writer; events from ``first_step`` on that an interrupted run left are superseded."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=first_step)


def draw_learning_curve(history: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> None:
    """Draws loss, AP and learning rate over the epochs as PNG.

    Args:
        history: the records of history.json: ``epoch``, ``loss``, ``lr`` and where evaluated ``ap``, ``ap50``.
        path: PNG to write.
        title: heading.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = [record["epoch"] for record in history]
    left.plot(epochs, [record["loss"] for record in history], color="tab:blue", label="training loss")
    left.set_xlabel("epoch")
    left.set_ylabel("loss")
    rate = left.twinx()
    rate.plot(epochs, [record["lr"] for record in history], color="tab:grey", linestyle=":", label="learning rate")
    rate.set_ylabel("learning rate", color="tab:grey")
    rate.set_ylim(bottom=0)
    scored = [record for record in history if record.get("ap") is not None]
    for key, label, colour in (("ap", "AP (0.50:0.95)", "tab:green"), ("ap50", "AP50", "tab:olive")):
        marked = [record for record in scored if record.get(key) is not None]
        if marked:
            values = [record[key] for record in marked]
            right.plot(
                [r["epoch"] for r in marked], values, marker=".", color=colour, label=f"{label}, last {values[-1]:.3f}"
            )
    right.set_xlabel("epoch")
    right.set_ylabel("average precision, averaged weights")
    right.set_ylim(0, 1)
    right.grid(alpha=0.3)
    if scored:
        right.legend(loc="upper left")
    if title:
        figure.suptitle(title)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=110)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
