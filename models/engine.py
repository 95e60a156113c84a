"""The training loop: epochs of steps, evaluations of the averaged weights, checkpoints; stoppable after any step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning_fabric
import numpy as np
import torch
from torch import nn

from carpus.models.data.batch_augment import BatchAugmenter
from carpus.models.data.coco import CategoryMap, CocoDataset
from carpus.models.data.loader import Batch, BatchPlan, SampleAugmenter, training_batches
from carpus.models.data.store import ImageStore
from carpus.models.ema import ModelEMA
from carpus.models.engine_checkpoint import load_checkpoint, save_atomic
from carpus.models.engine_events import StepReport, TrainListener
from carpus.models.engine_history import EventWriter, RunningMeans, draw_learning_curve, write_json_atomic
from carpus.models.engine_interrupt import InterruptGuard
from carpus.models.engine_pictures import detections_sheet, targets_sheet
from carpus.models.engine_step import TrainStep
from carpus.models.evaluate import DetectionMetrics, evaluate_coco
from carpus.models.predict import ModelDetector
from carpus.models.recipe import Recipe
from carpus.models.train_config import TrainConfig
from carpus.runtime.errors import CarpusError
from carpus.runtime.spec import Preprocess

__all__ = ["Engine", "EngineParts", "Progress", "TrainingError"]

_MIX = 2  # separates the random stream of batch-level mixing from order (0) and samples (1)


class TrainingError(CarpusError):
    """Training cannot go on: the loss is no longer finite."""

    exit_code = 1


class _Stopped(Exception):
    """Unwinds an evaluation when a stop was asked for."""


@dataclass
class Progress:
    """Where training stands.

    Attributes:
        epoch: epoch in progress, from 0.
        batch: batches of it that are done.
        step: steps done in all.
        best: metrics of best.pt, with its ``epoch``; empty before there is one.
        history: a record an epoch.
        seconds: time spent in this epoch so far, interruptions left out [s].
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    best: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class EngineParts:
    """What the loop works with; `carpus.models.train` puts it together.

    Attributes:
        config: the run; its ``recipe`` is the wish, ``recipe`` below what is carried out.
        recipe: scaled and fitted to the run.
        fabric: devices, precision and processes.
        module: the `DetectionLoss` wrapped by ``fabric``.
        model: the detector in it, unwrapped.
        optimizer: unwrapped.
        step: carries out a step.
        ema: averaged weights.
        store, augmenter, plan: training data.
        mixer: batch-level augmentation.
        categories: the classes.
        val: validation data, or None.
        preprocess: how validation images enter the model.
        fingerprint: SHA-256 of the training annotations.
        listener: hears about progress; None in all processes but the main one.
        writer: TensorBoard, or None.
    """

    config: TrainConfig
    recipe: Recipe
    fabric: lightning_fabric.Fabric
    module: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: TrainStep
    ema: ModelEMA
    store: ImageStore
    augmenter: SampleAugmenter
    plan: BatchPlan
    mixer: BatchAugmenter
    categories: CategoryMap
    val: CocoDataset | None
    preprocess: Preprocess
    fingerprint: str
    listener: TrainListener | None
    writer: EventWriter | None


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
        self._running = RunningMeans()
        if running is not None:
            self._running.load_state_dict(running)
        self._clock = clock
        self._out = Path(parts.config.out)

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
                self._restart_from_best()
            saved = self._clock()
            while progress.batch < parts.plan.batches_per_epoch:
                batch_started = self._clock()
                batch = next(batches)
                self._train_batch(batch, batch_started)
                now = self._clock()
                progress.seconds += now - batch_started
                if self._stop(guard):
                    self.save()
                    return False
                if now - saved > parts.config.checkpoint_minutes * 60.0 > 0.0:
                    self.save()
                    saved = self._clock()
            if not self._finish_epoch(guard):
                self.save()
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
            self._picture("batch", targets_sheet(images, targets, parts.categories.names))
        losses = parts.step(images, targets, progress.epoch, progress.step)
        if not math.isfinite(losses.total):
            terms = ", ".join(f"{name} {value:.4g}" for name, value in losses.terms.items())
            raise TrainingError(
                f"The loss is {losses.total} at epoch {progress.epoch}, batch {progress.batch} ({terms}). The "
                f"checkpoint in {self._out} is from before; train again with a lower learning rate or clip norm."
            )
        progress.batch += 1
        progress.step += 1
        self._running.add({"loss": losses.total, **losses.terms, "grad_norm": losses.grad_norm})
        if parts.writer is not None and progress.step % 20 == 0:
            for name, value in {"loss": losses.total, **losses.terms}.items():
                parts.writer.add_scalar(f"step/{name}", value, progress.step)
            parts.writer.add_scalar("step/lr", losses.lr, progress.step)
            parts.writer.add_scalar("step/grad_norm", losses.grad_norm, progress.step)
        if parts.listener is not None:
            parts.listener.on_step(
                StepReport(
                    progress.epoch,
                    parts.recipe.epochs,
                    progress.batch,
                    parts.plan.batches_per_epoch,
                    parts.plan.batch_size * parts.plan.world_size,
                    self._clock() - started,
                    waited,
                    losses,
                )
            )

    def _stop(self, guard: InterruptGuard) -> bool:
        """Whether any process was asked to stop; all answer alike."""
        if self.parts.fabric.world_size == 1:
            return guard.requested
        asked = torch.tensor(float(guard.requested), device=self.parts.fabric.device)
        return bool(self.parts.fabric.all_reduce(asked, reduce_op="sum") > 0)  # type: ignore[operator]

    def _finish_epoch(self, guard: InterruptGuard) -> bool:
        """Evaluates, records and saves; False when it was stopped on the way."""
        parts, progress = self.parts, self.progress
        done = progress.epoch + 1
        last = done == parts.recipe.epochs
        restart = parts.recipe.ema_restart_epoch
        second_stage = restart is not None and progress.epoch >= restart
        metrics: dict[str, Any] = {}
        if parts.val is not None and (last or second_stage or done % parts.config.eval_every == 0):
            limited = parts.config.eval_images and not last
            val = parts.val.subset(parts.config.eval_images) if limited else parts.val
            try:
                metrics = self._evaluate(val, guard)
            except _Stopped:
                return False
        record = {
            "epoch": done,
            "step": progress.step,
            "lr": parts.recipe.lr * parts.recipe.schedule(parts.plan.batches_per_epoch).factor(progress.step - 1),
            **self._running.means(),
            "seconds": round(progress.seconds, 2),
            "images_per_second": round(
                parts.plan.batches_per_epoch
                * parts.plan.batch_size
                * parts.plan.world_size
                / max(progress.seconds, 1e-9),
                2,
            ),
            **metrics,
        }
        progress.history.append({key: _finite(value) for key, value in record.items()})
        progress.epoch, progress.batch, progress.seconds = done, 0, 0.0
        self._running = RunningMeans()
        better = parts.val is None or (bool(metrics) and (metrics["ap"] or 0.0) >= (progress.best.get("ap") or 0.0))
        if better:
            progress.best = {"epoch": done, **metrics}
            self._save_best()
        elif second_stage and metrics:
            self._restart_from_best()
            parts.ema.decay = max(parts.ema.decay - 1e-4, 0.0)
        self.save()
        self._report(progress.history[-1])
        return True

    def _evaluate(self, val: CocoDataset, guard: InterruptGuard) -> dict[str, Any]:
        parts = self.parts
        metrics: DetectionMetrics | None = None
        stopped = False
        if parts.fabric.global_rank == 0:
            detector = ModelDetector(
                parts.ema.module,
                parts.categories.names,
                parts.preprocess,
                device=parts.fabric.device,
                channels_last=parts.config.channels_last,
            )

            def progressed(images: int, total: int) -> None:
                if parts.listener is not None:
                    parts.listener.on_evaluation(images, total)
                if guard.requested:
                    raise _Stopped

            try:
                metrics = evaluate_coco(detector, val, batch_size=16, progress=progressed)
            except _Stopped:
                stopped = True
            if metrics is not None and self._pictures_due():
                self._picture("validation", detections_sheet(detector, val, count=9))
        values = None if metrics is None else metrics.as_dict()
        values, stopped = parts.fabric.broadcast((values, stopped))
        if stopped or values is None:
            raise _Stopped
        return values

    def _pictures_due(self) -> bool:
        every = self.parts.config.picture_every
        if not every or self.parts.listener is None:
            return False
        return self.progress.epoch % every == 0 or self.progress.epoch + 1 == self.parts.recipe.epochs

    def _picture(self, name: str, sheet: np.ndarray) -> None:
        import cv2

        folder = self._out / "pictures"
        folder.mkdir(exist_ok=True)
        encoded, data = cv2.imencode(".jpg", np.ascontiguousarray(sheet[..., ::-1]), [cv2.IMWRITE_JPEG_QUALITY, 90])
        if encoded:
            (folder / f"{name}_{self.progress.epoch + 1:04d}.jpg").write_bytes(data.tobytes())
        if self.parts.writer is not None:
            self.parts.writer.add_image(f"pictures/{name}", sheet, self.progress.step, dataformats="HWC")

    def _restart_from_best(self) -> None:
        """DEIMv2's second stage starts from the best weights of the first."""
        path = self._out / "best.pt"
        self.parts.fabric.barrier()
        if not path.is_file():
            return
        best = load_checkpoint(path)
        self.parts.model.load_state_dict(best["model"])
        decay = self.parts.ema.decay
        self.parts.ema.load_state_dict(best["ema"])
        self.parts.ema.decay = decay

    def _common(self) -> dict[str, Any]:
        parts, progress = self.parts, self.progress
        return {
            "family": parts.config.family,
            "variant": parts.config.variant,
            "input_size": list(parts.preprocess.size),
            "classes": {"names": list(parts.categories.names), "dataset_ids": list(parts.categories.dataset_ids)},
            "recipe": parts.recipe.as_dict(),
            "seed": parts.config.seed,
            "data": parts.fingerprint,
            "progress": {"epoch": progress.epoch, "batch": progress.batch, "step": progress.step},
            "metrics": dict(progress.best),
        }

    def _save_best(self) -> None:
        parts = self.parts
        if parts.fabric.global_rank == 0:
            content = {**self._common(), "ema": parts.ema.state_dict()}
            if parts.recipe.ema_restart_epoch is not None:
                content["model"] = parts.model.state_dict()
            save_atomic(content, self._out / "best.pt")
        parts.fabric.barrier()

    def save(self) -> None:
        """Writes last.pt, from which the run goes on."""
        parts, progress = self.parts, self.progress
        if parts.fabric.global_rank == 0:
            save_atomic(
                {
                    **self._common(),
                    "identity": parts.config.identity(),
                    "model": parts.model.state_dict(),
                    "ema": parts.ema.state_dict(),
                    "optimizer": parts.optimizer.state_dict(),
                    "running": self._running.state_dict(),
                    "seconds": progress.seconds,
                    "best": dict(progress.best),
                    "history": progress.history,
                },
                self._out / "last.pt",
            )
        parts.fabric.barrier()

    def _report(self, record: Mapping[str, Any]) -> None:
        parts, progress = self.parts, self.progress
        if parts.fabric.global_rank == 0:
            write_json_atomic(progress.history, self._out / "history.json")
            title = f"{parts.config.family}-{parts.config.variant}, {len(parts.store)} images"
            draw_learning_curve(progress.history, self._out / "learning_curve.png", title)
        if parts.writer is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)):
                    parts.writer.add_scalar(f"epoch/{name}", value, record["epoch"])
            parts.writer.flush()
        if parts.listener is not None:
            parts.listener.on_epoch(record)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
