"""What a running training tells the outside, and the listener that writes it to the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from carpus.models.engine_step import StepLosses

__all__ = ["LogListener", "StepReport", "TrainListener", "format_duration"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """A finished step.

    Attributes:
        epoch, epochs: epoch in progress, from 0, and their number.
        batch, batches: batches done in this epoch, and their number.
        images: images of the step, over all processes.
        seconds: duration of the step, waiting for data included [s].
        data_seconds: time waited for data [s].
        losses: losses and learning rate.
    """

    epoch: int
    epochs: int
    batch: int
    batches: int
    images: int
    seconds: float
    data_seconds: float
    losses: StepLosses

    @property
    def steps_left(self) -> int:
        """Steps to the end of training."""
        return (self.epochs - self.epoch) * self.batches - self.batch


class TrainListener(Protocol):
    """Hears about a training run; called in the main process only."""

    def on_message(self, text: str) -> None:
        """Something worth a line."""

    def on_step(self, report: StepReport) -> None:
        """After every step."""

    def on_evaluation(self, done: int, total: int) -> None:
        """While evaluating: images done."""

    def on_epoch(self, record: Mapping[str, Any]) -> None:
        """After every epoch, with its record of history.json."""


class LogListener:
    """Writes progress as log lines, at most one every few seconds."""

    def __init__(self, every: float = 15.0, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            every: least time between two lines about steps [s].
            clock: time source [s].
        """
        self._every = every
        self._clock = clock
        self._last = clock()
        self._images = 0
        self._steps = 0
        self._waited = 0.0

    def on_message(self, text: str) -> None:
        """Logs it."""
        logger.info("%s", text)

    def on_step(self, report: StepReport) -> None:
        """Logs rates and loss when it is time."""
        self._images += report.images
        self._steps += 1
        self._waited += report.data_seconds
        elapsed = self._clock() - self._last
        if elapsed < self._every:
            return
        logger.info(
            "epoch %d/%d, batch %d/%d: loss %.3f, lr %.2e, grad %.2f, %.1f images/s, %.2f it/s, "
            "%.0f %% waiting for data, %s left",
            report.epoch + 1,
            report.epochs,
            report.batch,
            report.batches,
            report.losses.total,
            report.losses.lr,
            report.losses.grad_norm,
            self._images / elapsed,
            self._steps / elapsed,
            100.0 * self._waited / elapsed,
            format_duration(report.steps_left * elapsed / self._steps),
        )
        self._last += elapsed
        self._images, self._steps, self._waited = 0, 0, 0.0

    def on_evaluation(self, done: int, total: int) -> None:
        """Keeps evaluation out of the training rates."""
        if done >= total:
            self._last = self._clock()
            self._images, self._steps, self._waited = 0, 0, 0.0

    def on_epoch(self, record: Mapping[str, Any]) -> None:
        """Logs the epoch's means and metrics."""
        scores = "".join(
            f", {label} {record[key]:.3f}"
            for key, label in (("ap", "AP"), ("ap50", "AP50"), ("ap75", "AP75"))
            if record.get(key) is not None
        )
        logger.info("epoch %d done: loss %.3f%s, %.0f s", record["epoch"], record["loss"], scores, record["seconds"])


def format_duration(seconds: float) -> str:
    """``75 s``, ``12 min`` or ``3 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
