"""The training loop: epochs of steps, evaluations of the averaged weights, checkpoints; stoppable after any step."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from carpus.models.data.coco import CocoDataset
from carpus.models.data.loader import Batch, training_batches
from carpus.models.engine_checkpoint import load_trained_weights
from carpus.models.engine_events import StepReport
from carpus.models.engine_folder import RunFolder
from carpus.models.engine_history import RunningMeans
from carpus.models.engine_interrupt import InterruptGuard
from carpus.models.engine_parts import EngineParts, Progress
from carpus.models.engine_pictures import detections_sheet, targets_sheet
from carpus.models.engine_step import StepLosses
from carpus.models.evaluate import evaluate_coco
from carpus.models.predict import ModelDetector
from carpus.runtime.errors import CarpusError

__all__ = ["Engine", "TrainingError"]

_MIX = 2  # separates the random stream of batch-level mixing from order (0) and samples (1)
_SCALAR_EVERY = 20  # steps between TensorBoard scalars


class TrainingError(CarpusError):
    """Training cannot go on: the loss is no longer finite."""

    exit_code = 1


class _Stopped(Exception):
    """Unwinds an evaluation when a stop was asked for."""


class Engine:
    """Runs a training from where its progress stands to the end or to an interruption."""

    def __init__(
        self,
        parts: EngineParts,
        progress: Progress | None = None,
        running: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            parts: what to work with, restored to ``progress``.
            progress: where to start; None at the beginning.
            running: state of the running means of the epoch in progress.
            clock: time source [s]; nothing but reports and the time of checkpoints depends on it.
        """
        self.parts = parts
        self.progress = progress if progress is not None else Progress()
        self._folder = RunFolder(parts, self.progress)
        self._running = RunningMeans()
        if running is not None:
            self._running.load_state_dict(running)
        self._clock = clock

    def run(self, guard: InterruptGuard) -> bool:
        """Trains.

        Args:
            guard: asked after every step whether to stop.

        Returns:
            True when training is complete, False when it was stopped; either way it is saved.

        Raises:
            TrainingError: the loss is not finite. The last checkpoint is kept.
        """
        parts, progress = self.parts, self.progress
        batches = training_batches(
            parts.store,
            parts.augmenter,
            parts.plan,
            first_epoch=progress.epoch,
            first_batch=progress.batch,
            epochs=parts.recipe.epochs,
            workers=parts.config.workers,
        )
        parts.module.train()
        while progress.epoch < parts.recipe.epochs:
            if progress.batch == 0 and progress.epoch == parts.recipe.ema_restart_epoch:
                self._folder.restore_best()
            saved = self._clock()
            while progress.batch < parts.plan.batches_per_epoch:
                started = self._clock()
                batch = next(batches)
                self._train_batch(batch, started)
                now = self._clock()
                progress.seconds += now - started
                if self._stop(guard):
                    self._folder.save_last(self._running)
                    return False
                if now - saved > parts.config.checkpoint_minutes * 60.0 > 0.0:
                    self._folder.save_last(self._running)
                    saved = self._clock()
            try:
                self._finish_epoch(guard)
            except _Stopped:
                self._folder.save_last(self._running)
                return False
        return True

    def _train_batch(self, batch: Batch, started: float) -> None:
        parts, progress = self.parts, self.progress
        waited = self._clock() - started
        images = batch.nchw(parts.fabric.device, channels_last=parts.config.channels_last)
        targets = parts.fabric.to_device(batch.targets)
        if parts.mixer.active(progress.epoch):
            rng = np.random.default_rng([parts.config.seed, progress.step, _MIX, parts.fabric.global_rank])
            images, targets = parts.mixer(images, targets, rng, progress.epoch)
        if progress.batch == 0 and self._pictures_due():
            self._folder.picture("batch", targets_sheet(images, targets, parts.categories.names))
        losses = parts.step(images, targets, progress.epoch, progress.step)
        if not math.isfinite(losses.total):
            terms = ", ".join(f"{name} {value:.4g}" for name, value in losses.terms.items())
            raise TrainingError(
                f"The loss is {losses.total} at epoch {progress.epoch}, batch {progress.batch} ({terms}). "
                f"{self._before()}Train again with a lower learning rate or clip norm."
            )
        progress.batch += 1
        progress.step += 1
        self._running.add({"loss": losses.total, **losses.terms, "grad_norm": losses.grad_norm})
        self._report_step(losses, self._clock() - started, waited)

    def _report_step(self, losses: StepLosses, seconds: float, waited: float) -> None:
        parts, progress = self.parts, self.progress
        if parts.writer is not None and progress.step % _SCALAR_EVERY == 0:
            values = {"loss": losses.total, **losses.terms, "lr": losses.lr, "grad_norm": losses.grad_norm}
            for name, value in values.items():
                parts.writer.add_scalar(f"step/{name}", value, progress.step)
        if parts.listener is not None:
            report = StepReport(
                epoch=progress.epoch,
                epochs=parts.recipe.epochs,
                batch=progress.batch,
                batches=parts.plan.batches_per_epoch,
                images=parts.plan.batch_size * parts.plan.world_size,
                seconds=seconds,
                data_seconds=waited,
                losses=losses,
            )
            parts.listener.on_step(report)

    def _before(self) -> str:
        last = self._folder.last
        return f"The checkpoint {last} is from before. " if last.is_file() else ""

    def _stop(self, guard: InterruptGuard) -> bool:
        """Whether any process was asked to stop; all answer alike."""
        if self.parts.fabric.world_size == 1:
            return guard.requested
        asked = torch.tensor(float(guard.requested), device=self.parts.fabric.device)
        return bool(self.parts.fabric.all_reduce(asked, reduce_op="sum") > 0)  # type: ignore[operator]

    def _finish_epoch(self, guard: InterruptGuard) -> None:
        """Evaluates, records and saves."""
        parts, progress = self.parts, self.progress
        done = progress.epoch + 1
        last = done == parts.recipe.epochs
        due = last or done % parts.config.eval_every == 0
        restart = parts.recipe.ema_restart_epoch
        second_stage = restart is not None and progress.epoch >= restart
        metrics: dict[str, Any] = {}
        if parts.val is not None:
            if last:
                metrics = self._evaluate(parts.val, parts.ema.module, guard, pictures=True)
                self._judge_best(parts.val, guard)
            elif due or second_stage:
                some = parts.val.subset(parts.config.eval_images) if parts.config.eval_images else parts.val
                metrics = self._evaluate(some, parts.ema.module, guard, pictures=True)
        record = {
            "epoch": done,
            "step": progress.step,
            "lr": parts.recipe.lr * parts.recipe.schedule(parts.plan.batches_per_epoch).factor(progress.step - 1),
            **self._running.means(),
            "seconds": round(progress.seconds, 2),
            "images_per_second": round(parts.plan.images_per_epoch / max(progress.seconds, 1e-9), 2),
            **metrics,
        }
        progress.history.append({key: _finite(value) for key, value in record.items()})
        progress.epoch, progress.batch, progress.seconds = done, 0, 0.0
        self._running = RunningMeans()
        if parts.val is None or (metrics and (metrics["ap"] or 0.0) >= (progress.best.get("ap") or 0.0)):
            progress.best = {"epoch": done, **metrics}
            self._folder.save_best()
        elif metrics and second_stage:
            # DEIMv2: without progress the second stage starts over from the best weights, averaging more recent ones.
            self._folder.restore_best()
            parts.ema.decay = max(parts.ema.decay - 1e-4, 0.0)
        self._folder.save_last(self._running)
        self._folder.report(progress.history[-1], curve=due)

    def _judge_best(self, val: CocoDataset, guard: InterruptGuard) -> None:
        """Scores the best weights so far on all images, when only some had judged them."""
        parts, progress = self.parts, self.progress
        if not progress.best or progress.best.get("images") == len(val):
            return
        module = copy.deepcopy(parts.ema.module)
        module.load_state_dict(load_trained_weights(self._folder.best).state_dict)
        progress.best = {"epoch": progress.best["epoch"], **self._evaluate(val, module, guard)}
        self._folder.restate_best()

    def _evaluate(
        self, val: CocoDataset, module: nn.Module, guard: InterruptGuard, *, pictures: bool = False
    ) -> dict[str, Any]:
        parts = self.parts
        values: dict[str, Any] | None = None
        if parts.fabric.global_rank == 0:
            detector = ModelDetector(
                module,
                parts.categories.names,
                parts.preprocess,
                parts.postprocess,
                device=parts.fabric.device,
                channels_last=parts.config.channels_last,
            )

            def progressed(images: int, total: int) -> None:
                if parts.listener is not None:
                    parts.listener.on_evaluation(images, total)
                if guard.requested:
                    raise _Stopped

            try:
                values = evaluate_coco(detector, val, batch_size=16, progress=progressed).as_dict()
            except _Stopped:
                values = None
            if values is not None and pictures and self._pictures_due():
                self._folder.picture("validation", detections_sheet(detector, val, count=9))
        values = parts.fabric.broadcast(values)
        if values is None:
            raise _Stopped
        return values

    def _pictures_due(self) -> bool:
        every = self.parts.config.picture_every
        if not every or self.parts.listener is None:
            return False
        return self.progress.epoch % every == 0 or self.progress.epoch + 1 == self.parts.recipe.epochs


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
