"""The folder of a training run: checkpoints, history, curve, pictures, events. Only the main process writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from carpus.models.engine_checkpoint import load_checkpoint, save_atomic
from carpus.models.engine_history import RunningMeans, draw_learning_curve, write_json_atomic
from carpus.models.engine_parts import EngineParts, Progress

__all__ = ["RunFolder"]


class RunFolder:
    """Writes what a run leaves.

    Attributes:
        last: checkpoint that resumes the run.
        best: averaged weights that scored best.
    """

    def __init__(self, parts: EngineParts, progress: Progress) -> None:
        """
        Args:
            parts: the run.
            progress: where it stands, followed as it goes on.
        """
        self._parts = parts
        self._progress = progress
        self._path = Path(parts.config.out)
        self._main = parts.fabric.global_rank == 0
        self.last = self._path / "last.pt"
        self.best = self._path / "best.pt"

    def save_last(self, running: RunningMeans) -> None:
        """Writes the checkpoint from which the run goes on."""
        parts, progress = self._parts, self._progress
        if self._main:
            content = {
                **self._description(),
                "identity": parts.config.identity(),
                "model": parts.model.state_dict(),
                "ema": parts.ema.state_dict(),
                "optimizer": parts.optimizer.state_dict(),
                "scaler": parts.fabric.strategy.precision.state_dict(),
                "running": running.state_dict(),
                "seconds": progress.seconds,
                "best": dict(progress.best),
                "history": progress.history,
            }
            save_atomic(content, self.last)
        parts.fabric.barrier()

    def save_best(self) -> None:
        """Writes the averaged weights, and the trained ones where the second stage will start from them."""
        parts = self._parts
        if self._main:
            content = {**self._description(), "ema": parts.ema.state_dict()}
            if parts.recipe.ema_restart_epoch is not None:
                content["model"] = parts.model.state_dict()
            save_atomic(content, self.best)
        parts.fabric.barrier()

    def restate_best(self) -> None:
        """Writes new metrics beside the weights that are already kept as the best."""
        if self._main:
            save_atomic({**load_checkpoint(self.best), "metrics": dict(self._progress.best)}, self.best)
        self._parts.fabric.barrier()

    def restore_best(self) -> None:
        """Takes trained and averaged weights back from `best`, if there is one; the decay stays."""
        parts = self._parts
        parts.fabric.barrier()
        if self.best.is_file():
            state = load_checkpoint(self.best)
            parts.model.load_state_dict(state["model"])
            decay = parts.ema.decay
            parts.ema.load_state_dict(state["ema"])
            parts.ema.decay = decay

    def report(self, record: Mapping[str, Any], *, curve: bool) -> None:
        """Writes the history after an epoch, with ``curve`` the curve too (a second of work); tells the listener."""
        parts, progress = self._parts, self._progress
        if self._main:
            write_json_atomic(progress.history, self._path / "history.json")
        if self._main and curve:
            title = f"{parts.config.family}-{parts.config.variant}, {len(parts.store)} images"
            draw_learning_curve(progress.history, self._path / "learning_curve.png", title)
        if parts.writer is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)):
                    parts.writer.add_scalar(f"epoch/{name}", value, record["epoch"])
            parts.writer.flush()
        if parts.listener is not None:
            parts.listener.on_epoch(record)

    def picture(self, name: str, sheet: NDArray[np.uint8]) -> None:
        """Writes a picture of the epoch in progress, (H, W, 3) uint8 RGB, as PNG."""
        folder = self._path / "pictures"
        folder.mkdir(exist_ok=True)
        encoded, data = cv2.imencode(".png", np.ascontiguousarray(sheet[..., ::-1]))
        if encoded:
            (folder / f"{name}_{self._progress.epoch + 1:04d}.png").write_bytes(data.tobytes())
        if self._parts.writer is not None:
            self._parts.writer.add_image(f"pictures/{name}", sheet, self._progress.step, dataformats="HWC")

    def _description(self) -> dict[str, Any]:
        parts, progress = self._parts, self._progress
        return {
            "family": parts.config.family,
            "variant": parts.config.variant,
            "input_size": list(parts.preprocess.size),
            "classes": {"names": list(parts.categories.names), "dataset_ids": list(parts.categories.dataset_ids)},
            "recipe": parts.recipe.as_dict(),
            "seed": parts.config.seed,
            "init": None if parts.config.init is None else str(parts.config.init),
            "data": parts.fingerprint,
            "progress": {"epoch": progress.epoch, "batch": progress.batch, "step": progress.step},
            "metrics": dict(progress.best),
        }
