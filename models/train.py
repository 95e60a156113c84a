"""Trains a detector: puts data, model, optimiser and loop together, and resumes what was interrupted.

The same command continues an interrupted run and does nothing to a finished one. On a CPU the same seed and number of
threads give the same weights, interrupted or not.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import lightning_fabric
import torch
from lightning_fabric.strategies import DDPStrategy, Strategy

from carpus.models.build import build_criterion, build_model
from carpus.models.data.batch_augment import BatchAugmenter
from carpus.models.data.coco import CategoryMap, CocoDataset, locate_split
from carpus.models.data.coco_reader import load_coco
from carpus.models.data.loader import BatchPlan
from carpus.models.data.progressive import ProgressiveAugmenter
from carpus.models.data.store import ImageStore
from carpus.models.ema import ModelEMA
from carpus.models.engine import Engine
from carpus.models.engine_checkpoint import load_checkpoint
from carpus.models.engine_events import LogListener, TrainListener
from carpus.models.engine_fit import fit_recipe, training_sizes
from carpus.models.engine_history import open_event_writer
from carpus.models.engine_init import adapt_to, initialise
from carpus.models.engine_interrupt import InterruptGuard
from carpus.models.engine_optimizer import make_optimizer
from carpus.models.engine_parts import EngineParts, Progress
from carpus.models.engine_step import DetectionLoss, TrainStep, synchronised
from carpus.models.recipe import Recipe
from carpus.models.train_config import TrainConfig
from carpus.models.train_families import TRAIN_FAMILIES
from carpus.runtime.errors import DataError
from carpus.runtime.names import lookup

__all__ = ["TrainResult", "train"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """How a training ended.

    Attributes:
        finished: False when it was interrupted; the same command goes on.
        out: folder of the run.
        best: metrics of ``best.pt`` with its ``epoch``; empty before there is one.
        history: the records of history.json.
    """

    finished: bool
    out: Path
    best: dict[str, Any]
    history: tuple[dict[str, Any], ...]

    @property
    def best_checkpoint(self) -> Path:
        """The averaged weights that scored best (without validation: the last ones)."""
        return self.out / "best.pt"


def train(
    config: TrainConfig,
    listener: TrainListener | None = None,
    guard: InterruptGuard | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TrainResult:
    """Trains, or goes on training.

    Args:
        config: what, on what, how and where to.
        listener: hears about progress; None writes it to the log.
        guard: carries a request to stop; None handles SIGINT and SIGTERM here.
        clock: time source [s] of ``max_minutes``, reports and history. `time.process_time` with ``workers=0`` counts
            processor time, which other work on the machine does not lengthen.

    Returns:
        What came out.

    Raises:
        DataError: data or checkpoint cannot be used, or the folder holds a run with other settings.
        TrainingError: the loss is not finite.
    """
    fabric = _launch(config)
    cv2.setNumThreads(0)  # the cores belong to torch and to the workers
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    listener = listener if listener is not None else LogListener()
    data, val = _datasets(config)
    out = Path(config.out)
    new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    fingerprint = hashlib.sha256(data.annotations.read_bytes()).hexdigest()
    resumed = _resume_state(config, data, fingerprint)
    with guard if guard is not None else InterruptGuard() as active:
        try:
            engine = _assemble(config, fabric, data, val, fingerprint, resumed, listener, clock)
        except DataError:
            if new:
                with contextlib.suppress(OSError):  # another process was first, or something is in it
                    out.rmdir()
            raise
        try:
            finished = engine.run(active)
        finally:
            if engine.parts.writer is not None:
                engine.parts.writer.close()
    if not finished:
        listener.on_message(f"interrupted; the same command goes on from {out / 'last.pt'}")
    return TrainResult(finished, out, dict(engine.progress.best), tuple(engine.progress.history))


def _launch(config: TrainConfig) -> lightning_fabric.Fabric:
    gpu = config.accelerator == "gpu" or (config.accelerator == "auto" and torch.cuda.is_available())
    precision: Any = config.precision
    if precision is None:
        precision = ("bf16-mixed" if torch.cuda.is_bf16_supported() else "16-mixed") if gpu else "32-true"
    strategy: str | Strategy = "auto"
    if config.devices * config.num_nodes > 1:
        # A batch without any object leaves the denoising embedding without gradient.
        strategy = DDPStrategy(process_group_backend="nccl" if gpu else "gloo", find_unused_parameters=True)
    if gpu and not torch.cuda.is_available():
        raise DataError("accelerator 'gpu': torch finds no GPU on this machine; take 'cpu' or 'auto'")
    try:
        fabric = lightning_fabric.Fabric(
            accelerator="gpu" if gpu else "cpu",
            devices=config.devices,
            num_nodes=config.num_nodes,
            strategy=strategy,
            precision=precision,
        )
    except ValueError as error:
        raise DataError(f"precision {precision!r} or devices {config.devices}: {error}") from error
    fabric.launch()
    return fabric


def _datasets(config: TrainConfig) -> tuple[CocoDataset, CocoDataset | None]:
    annotations, images = locate_split(config.data, "train", config.images)
    data = load_coco(annotations, images, bad_boxes=config.bad_boxes)
    data.require_objects("learn from")
    val_path = config.val
    if val_path is None:
        root = Path(config.data)
        candidates = [root / name for name in ("heldout", "val") if (root / name / "annotations.json").is_file()]
        if not candidates:
            logger.info("no validation split: the last averaged weights are kept as best.pt")
            return data, None
        val_path = candidates[0]
    annotations, images = locate_split(val_path, None, config.val_images)
    val = load_coco(annotations, images, bad_boxes=config.bad_boxes, categories=data.categories)
    val.require_objects("judge the training by")
    return data, val


def _resume_state(config: TrainConfig, data: CocoDataset, fingerprint: str) -> dict[str, Any] | None:
    """The checkpoint of an earlier start of this very run, or None."""
    path = Path(config.out) / "last.pt"
    if not path.is_file():
        return None
    state = load_checkpoint(path)
    wanted, found = config.identity(), state.get("identity", {})
    different = [
        f"{name} is {found.get(name)!r} there and {wanted.get(name)!r} here"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    if state.get("data") != fingerprint:
        different.append(f"its training data is not {data.annotations}")
    if different:
        raise DataError(
            f"{path} belongs to a run with other settings: {'; '.join(different)}. Give the run another folder, or "
            "delete this one."
        )
    return state


def _assemble(
    config: TrainConfig,
    fabric: lightning_fabric.Fabric,
    data: CocoDataset,
    val: CocoDataset | None,
    fingerprint: str,
    resumed: Mapping[str, Any] | None,
    listener: TrainListener,
    clock: Callable[[], float],
) -> Engine:
    family = lookup("model family", config.family, TRAIN_FAMILIES)
    family.check(config.family, config.recipe)
    model = _model(config, data.categories, listener, resumed)
    full, multiple = model.config.input_size, family.multiple(model)
    family.check_sizes(model, training_sizes(config.recipe, full, multiple))
    criterion: Any = build_criterion(config.family, config.variant, len(data.categories))
    family.apply(model, criterion, config.recipe)
    store = ImageStore(data, short_side=round(config.cache_scale * min(full)) or None, budget_gb=config.cache_gb)
    store.fill()
    plan = BatchPlan(
        num_samples=len(data),
        batch_size=config.recipe.batch_size // fabric.world_size,
        seed=config.seed,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
    )
    preprocess = family.preprocess(model)
    loss = DetectionLoss(
        model,
        criterion,
        extras=family.extras(model, config.recipe),
        freeze_norm=config.freeze_norm,
        mean=preprocess.mean,
        std=preprocess.std,
    )
    if resumed is not None:
        recipe = Recipe.from_dict(resumed["recipe"])
    else:
        recipe = fit_recipe(config, fabric, loss, store, plan, val, preprocess, listener, clock)
    family.apply(model, criterion, recipe)
    if fabric.world_size > 1 and fabric.device.type == "cuda" and not config.freeze_norm:
        synchronised(loss)
    optimizer = make_optimizer(model, family.parameter_groups(model, recipe), recipe)
    module, fabric_optimizer = fabric.setup(loss, optimizer)
    ema = ModelEMA(model, decay=recipe.ema_decay, warmups=recipe.ema_warmups)
    progress, running = Progress(), None
    if resumed is not None:
        model.load_state_dict(resumed["model"])
        ema.load_state_dict(resumed["ema"])
        optimizer.load_state_dict(resumed["optimizer"])
        if resumed.get("scaler"):  # the loss scale of 16-mixed; other precisions have none
            fabric.strategy.precision.load_state_dict(resumed["scaler"])
        seconds, best, history = resumed["seconds"], resumed["best"], resumed["history"]
        progress = Progress(**resumed["progress"], best=best, history=history, seconds=seconds)
        running = resumed["running"]
        listener.on_message(f"resuming at epoch {progress.epoch + 1} of {recipe.epochs}, batch {progress.batch}")
    if config.compile:
        model.compile()
    main = fabric.global_rank == 0
    events = Path(config.out) / "tensorboard"
    parts = EngineParts(
        config=config,
        recipe=recipe,
        fabric=fabric,
        module=module,
        model=model,
        optimizer=optimizer,
        step=TrainStep(
            fabric,
            module,
            fabric_optimizer,
            ema,
            recipe,
            recipe.schedule(plan.batches_per_epoch),
            config.seed,
            multiple,
        ),
        ema=ema,
        store=store,
        augmenter=ProgressiveAugmenter(recipe.augment, full, recipe.input_scales, multiple),
        plan=plan,
        mixer=BatchAugmenter(recipe.augment),
        categories=data.categories,
        val=val,
        preprocess=preprocess,
        postprocess=family.postprocess,
        fingerprint=fingerprint,
        listener=listener if main else None,
        writer=open_event_writer(events, progress.step) if main and config.tensorboard else None,
    )
    return Engine(parts, progress, running, clock)


def _model(
    config: TrainConfig, categories: CategoryMap, listener: TrainListener, resumed: Mapping[str, Any] | None
) -> Any:
    """The detector with its starting weights, or ready for those of the checkpoint that training resumes from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model: Any = build_model(config.family, config.variant, len(categories), config.input_size)
        if resumed is not None:
            adapt_to(model, resumed["model"])
        elif config.init is not None:
            listener.on_message(initialise(model, config.family, config.init, categories))
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    return model.to(memory_format=memory_format)
