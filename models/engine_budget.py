"""How many epochs fit into a time, found by timing a few steps that leave no trace in the training."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lightning_fabric

from carpus.models.data.loader import BatchPlan, SampleAugmenter, training_batches
from carpus.models.data.progressive import size_at
from carpus.models.data.store import ImageStore
from carpus.models.ema import ModelEMA
from carpus.models.engine_optimizer import ParameterGroup, make_optimizer
from carpus.models.engine_step import DetectionLoss, TrainStep
from carpus.models.recipe import Recipe
from carpus.runtime.errors import DataError

__all__ = ["StepCost", "epochs_within", "measure_step"]


@dataclass(frozen=True)
class StepCost:
    """Duration of a training step, split by what it grows with.

    Attributes:
        fixed: part that does not depend on the input size [s].
        per_area: part at the full input size that grows with its area [s].
    """

    fixed: float
    per_area: float

    def seconds(self, area: float) -> float:
        """Duration at a share of the full input's area [s]."""
        return self.fixed + self.per_area * area


def measure_step(
    fabric: lightning_fabric.Fabric,
    loss: DetectionLoss,
    groups: Sequence[ParameterGroup],
    recipe: Recipe,
    store: ImageStore,
    augmenter: Callable[[float], SampleAugmenter],
    plan: BatchPlan,
    *,
    channels_last: bool = True,
    steps: int = 6,
    clock: Callable[[], float] = time.monotonic,
) -> StepCost:
    """Times steps of a copy of the model at full size and at the smallest that the recipe uses.

    Data is prepared before the clock runs: it comes from other processes in training.

    Args:
        fabric: devices and precision.
        loss: model and criterion; copied, not changed.
        groups: rates of the model's parameters.
        recipe: batch size, optimiser and scales.
        store: training images.
        augmenter: makes an augmenter for a factor on the input size.
        plan: batches.
        channels_last: memory format.
        steps: timed steps at each size, after two that are not.
        clock: time source [s].
    """
    times = {}
    smallest = min((factor for _, factor in recipe.input_scales), default=1.0)
    for factor in {1.0, smallest}:
        trial = copy.deepcopy(loss)
        module, optimizer = fabric.setup(trial, make_optimizer(trial.model, groups, recipe))
        ema = ModelEMA(trial.model)
        step = TrainStep(fabric, module, optimizer, ema, recipe, recipe.schedule(plan.batches_per_epoch), seed=0)
        module.train()
        batches = training_batches(store, augmenter(factor), plan, epochs=steps + 2, workers=0)
        elapsed = []
        for iteration, batch in zip(range(steps + 2), batches, strict=False):
            images = batch.nchw(fabric.device, channels_last=channels_last)
            targets = fabric.to_device(batch.targets)
            started = clock()
            step(images, targets, recipe.augment.strong_from, iteration)
            elapsed.append(clock() - started)
        times[factor] = statistics.median(elapsed[2:] or elapsed)
    if smallest == 1.0:
        return StepCost(0.0, times[1.0])
    per_area = max((times[1.0] - times[smallest]) / (1.0 - smallest**2), 0.0)
    return StepCost(max(times[1.0] - per_area, 0.0), per_area)


def epochs_within(
    seconds: float,
    recipe: Recipe,
    cost: StepCost,
    batches_per_epoch: int,
    full: tuple[int, int],
    *,
    evaluation: float = 0.0,
    eval_every: int = 1,
    multiple: int = 32,
) -> int:
    """The greatest number of epochs whose steps and evaluations take no longer than a time.

    Args:
        seconds: the time [s].
        recipe: scaled to each candidate.
        cost: of a step.
        batches_per_epoch: steps in an epoch.
        full: (height, width) of the input [px].
        evaluation: duration of one evaluation [s].
        eval_every: epochs between evaluations.
        multiple: what the sides of the input are multiples of [px].

    Raises:
        DataError: not even one epoch fits.
    """
    sizes = {size_at(start, full, recipe.input_scales, multiple) for start, _ in recipe.input_scales} | {full}
    areas = {size: size[0] * size[1] / (full[0] * full[1]) for size in sizes}

    def duration(epochs: int) -> float:
        scales = recipe.scaled(epochs).input_scales
        steps = sum(cost.seconds(areas[size_at(epoch, full, scales, multiple)]) for epoch in range(epochs))
        return steps * batches_per_epoch + math.ceil(epochs / eval_every) * evaluation

    if duration(1) > seconds:
        raise DataError(
            f"One epoch takes {duration(1) / 60:.1f} minutes here, more than the {seconds / 60:g} minutes allowed; "
            "allow more time, or take fewer images or a smaller input."
        )
    low, high = 1, 2
    while duration(high) <= seconds:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if duration(middle) <= seconds else (low, middle)
    return low
