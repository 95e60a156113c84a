"""The recipe that is carried out: fitted to time, data and input size before the first step."""

from __future__ import annotations

import time
from collections.abc import Callable

import lightning_fabric
from torch import nn

from carpus.models.data.coco import CocoDataset
from carpus.models.data.loader import BatchPlan
from carpus.models.data.progressive import ProgressiveAugmenter, size_at
from carpus.models.data.store import ImageStore
from carpus.models.engine_budget import epochs_within, measure_step
from carpus.models.engine_events import TrainListener
from carpus.models.engine_step import DetectionLoss, random_sides
from carpus.models.predict import ModelDetector
from carpus.models.recipe import Recipe
from carpus.models.train_config import TrainConfig
from carpus.models.train_families import TRAIN_FAMILIES
from carpus.runtime.spec import Preprocess

__all__ = ["fit_recipe", "training_sizes"]


def training_sizes(recipe: Recipe, full: tuple[int, int], multiple: int) -> dict[float, tuple[int, int]]:
    """(height, width) [px] that a recipe trains on, by factor on the full size; of random sizes the least."""
    factors = [1.0, *(factor for _, factor in recipe.input_scales)]
    sizes = {factor: size_at(0, full, ((0, factor),), multiple) for factor in factors}
    if recipe.multi_scale_repeat and recipe.multi_scale_until:
        for factor, (height, width) in list(sizes.items()):
            least = min([*random_sides(height, multiple)[0], height])
            small = (least, max(round(width * least / height / multiple), 1) * multiple)
            sizes.setdefault(factor * least / height, small)
    return sizes


def fit_recipe(
    config: TrainConfig,
    fabric: lightning_fabric.Fabric,
    loss: DetectionLoss,
    store: ImageStore,
    plan: BatchPlan,
    val: CocoDataset | None,
    preprocess: Preprocess,
    listener: TrainListener,
    clock: Callable[[], float] = time.monotonic,
) -> Recipe:
    """The recipe that is carried out: as many epochs as the time allows, warm-up and averaging that fit into them."""
    recipe, family = config.recipe, TRAIN_FAMILIES[config.family]
    full, multiple = preprocess.size, family.multiple(loss.model)
    if config.max_minutes is not None:

        def augmenter(factor: float) -> ProgressiveAugmenter:
            return ProgressiveAugmenter(recipe.augment, size_at(0, full, ((0, factor),), multiple))

        cost = measure_step(
            fabric,
            loss,
            family.parameter_groups(loss.model, recipe),
            recipe,
            store,
            augmenter,
            plan,
            channels_last=config.channels_last,
            clock=clock,
        )
        epochs = epochs_within(
            config.max_minutes * 60.0,
            recipe,
            cost,
            plan.batches_per_epoch,
            full,
            evaluation=_evaluation_seconds(config, loss.model, store, val, preprocess, clock),
            eval_every=config.eval_every,
            multiple=multiple,
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
    config: TrainConfig,
    model: nn.Module,
    store: ImageStore,
    val: CocoDataset | None,
    preprocess: Preprocess,
    clock: Callable[[], float],
) -> float:
    """How long an evaluation will take, from a few training images [s]."""
    if val is None:
        return 0.0
    postprocess = TRAIN_FAMILIES[config.family].postprocess
    names = [str(index) for index in range(model.config.num_classes)]  # type: ignore[union-attr, arg-type]
    detector = ModelDetector(model, names, preprocess, postprocess, channels_last=config.channels_last)
    images = [store[index % len(store)].image for index in range(16)]
    detector(images)
    started = clock()
    detector(images)
    count = min(config.eval_images or len(val), len(val))
    return (clock() - started) / len(images) * count
