"""The recipe that is carried out: fitted to time, data and input size before the first step."""

from __future__ import annotations

import time

import lightning_fabric
from torch import nn

from carpus.models.data.coco import CocoDataset
from carpus.models.data.loader import BatchPlan
from carpus.models.data.progressive import ProgressiveAugmenter, size_at
from carpus.models.data.store import ImageStore
from carpus.models.deimv2.config import DEIMv2Config
from carpus.models.engine_budget import epochs_within, measure_step
from carpus.models.engine_events import TrainListener
from carpus.models.engine_step import DetectionLoss
from carpus.models.predict import ModelDetector
from carpus.models.recipe import Recipe
from carpus.models.train_config import TrainConfig
from carpus.runtime.errors import DataError
from carpus.runtime.spec import Preprocess

__all__ = ["check_sizes", "fit_recipe"]


def check_sizes(model_config: DEIMv2Config, recipe: Recipe) -> None:
    """Refuses inputs with fewer positions than the decoder has queries."""
    queries = model_config.decoder.num_queries
    for start, factor in ((0, 1.0), *recipe.input_scales):
        height, width = size_at(start, model_config.input_size, ((start, factor),))
        positions = sum((height // stride) * (width // stride) for stride in model_config.feature_strides)
        if positions < queries:
            of = "" if factor == 1.0 else f" (the factor {factor:g} of input_scales from epoch {start})"
            raise DataError(
                f"Input of {height} x {width} px{of} has {positions} positions for {queries} queries of "
                f"{model_config.variant}; take a larger input size{' or `--input-scales 0 1.0`' if of else ''}."
            )


def fit_recipe(
    config: TrainConfig,
    fabric: lightning_fabric.Fabric,
    loss: DetectionLoss,
    store: ImageStore,
    plan: BatchPlan,
    val: CocoDataset | None,
    preprocess: Preprocess,
    listener: TrainListener,
) -> Recipe:
    """The recipe that is carried out: as many epochs as the time allows, warm-up and averaging that fit into them."""
    recipe = config.recipe
    full = preprocess.size
    if config.max_minutes is not None:

        def augmenter(factor: float) -> ProgressiveAugmenter:
            return ProgressiveAugmenter(recipe.augment, size_at(0, full, ((0, factor),)))

        last = config.channels_last
        cost = measure_step(fabric, loss, recipe, store, augmenter, plan, channels_last=last)
        epochs = epochs_within(
            config.max_minutes * 60.0,
            recipe,
            cost,
            plan.batches_per_epoch,
            full,
            evaluation=_evaluation_seconds(config, loss.model, store, val, preprocess),
            eval_every=config.eval_every,
        )
        epochs = fabric.broadcast(epochs)
        recipe = recipe.scaled(epochs)
        speed = plan.batch_size * plan.world_size / cost.seconds(1.0)
        listener.on_message(
            f"{speed:.1f} images/s at full size: {epochs} epochs fit into {config.max_minutes:g} minutes "
            f"(--epochs {epochs} repeats this run)"
        )
    fitted = recipe.fitted(recipe.epochs * plan.batches_per_epoch)
    if fitted != recipe:
        listener.on_message(
            f"short training: warm-up {fitted.warmup_iterations} iterations, averaging decay {fitted.ema_decay:.5f}"
        )
    return fitted


def _evaluation_seconds(
    config: TrainConfig, model: nn.Module, store: ImageStore, val: CocoDataset | None, preprocess: Preprocess
) -> float:
    """How long an evaluation will take, from a few training images [s]."""
    if val is None:
        return 0.0
    names = [str(index) for index in range(model.config.num_classes)]  # type: ignore[union-attr, arg-type]
    detector = ModelDetector(model, names, preprocess, channels_last=config.channels_last)
    images = [store[index % len(store)].image for index in range(16)]
    detector(images)
    started = time.monotonic()
    detector(images)
    count = min(config.eval_images or len(val), len(val))
    return (time.monotonic() - started) / len(images) * count
