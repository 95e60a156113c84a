"""One training step: forward, loss, backward, clipped update, averaging."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning_fabric
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.ema import ModelEMA
from carpus.models.recipe import Recipe
from carpus.models.schedule import FlatCosine

__all__ = ["DetectionLoss", "Extras", "StepLosses", "TrainStep", "random_sides", "resized", "synchronised"]


Extras = Callable[[Sequence[dict[str, Tensor]], torch.Generator], dict[str, Any]]
"""(targets, generator) -> what a network takes in training beside the images."""


class DetectionLoss(nn.Module):
    """A detector and its criterion as one module, so that what crosses Fabric's and DDP's wrappers is tensors.

    Attributes:
        model: the detector.
        criterion: outputs, targets, epoch -> weighted losses.
        extras: what the detector takes beside the images, such as denoising queries; None for nothing.
        freeze_norm: keep batch normalisation in eval mode.
        mean, std: (3, 1, 1) what the detector's preprocessing does to images in 0..1.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module,
        *,
        extras: Extras | None = None,
        freeze_norm: bool = False,
        mean: tuple[float, float, float] = (0.0, 0.0, 0.0),
        std: tuple[float, float, float] = (1.0, 1.0, 1.0),
    ) -> None:
        super().__init__()
        self.normalise = any(mean) or any(value != 1.0 for value in std)
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)
        self.model = model
        self.criterion = criterion
        self.extras = extras
        self.freeze_norm = freeze_norm

    def train(self, mode: bool = True) -> DetectionLoss:
        """Sets training mode, except for batch normalisation when it is frozen."""
        super().train(mode)
        if mode and self.freeze_norm:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def forward(
        self, images: Tensor, targets: list[dict[str, Tensor]], epoch: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Weighted losses of a batch.

        Args:
            images: (B, 3, H, W) float32 in 0..1.
            targets: per image ``labels`` (n,) int64 and ``boxes`` (n, 4) float32 cxcywh in 0..1.
            epoch: epoch, from 0.
            generator: of whatever the extras draw.

        Returns:
            Weighted losses by name; their sum is the loss.
        """
        extras = {} if self.extras is None else self.extras(targets, generator)
        # After mixup and copy-blend, which are linear: the order makes no difference.
        if self.normalise:
            images = (images - self.mean) / self.std
        outputs = self.model(images, **extras)
        with torch.autocast(images.device.type, enabled=False):
            return self.criterion(outputs, targets, epoch)


def synchronised(module: nn.Module) -> None:
    """Makes a module's batch normalisation count over all processes, except norms that are frozen for good."""
    for name, child in module.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            child.train()
            if child.training:
                setattr(module, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))
        else:
            synchronised(child)


def random_sides(height: int, multiple: int = 32) -> tuple[list[int], list[int]]:
    """The heights below and above a batch's own that `resized` draws from, both ascending [px]."""
    smallest = max(int(height * 0.75 / multiple), 1) * multiple
    smaller = list(range(smallest, height, multiple))
    return smaller, [2 * height - side for side in reversed(smaller)]


def resized(images: Tensor, repeat: int, rng: np.random.Generator, multiple: int = 32) -> Tensor:
    """A batch at a random size, by nearest neighbour, as published: 0.75 to 1.25 times its own in steps of 32 px.

    Args:
        images: (B, C, H, W).
        repeat: how many times the batch's own size counts among the others.
        rng: draws the size.
        multiple: what the sides must be multiples of, and the step, where that is not 32 px.

    Returns:
        (B, C, h, w), h and w with about the aspect of H and W.
    """
    height, width = images.shape[2:]
    smaller, larger = random_sides(height, multiple)
    side = int(rng.choice([*smaller, *[height] * repeat, *larger]))
    if side == height:
        return images
    return F.interpolate(images, size=(side, max(round(width * side / height / multiple), 1) * multiple))


@dataclass(frozen=True)
class StepLosses:
    """What a step gave.

    Attributes:
        total: the loss.
        terms: its parts by kind (such as mal, bbox, giou), each summed over the output sets.
        grad_norm: norm of the gradients before clipping; NaN when clipping is off.
        lr: learning rate of encoder and decoder in this step.
    """

    total: float
    terms: dict[str, float]
    grad_norm: float
    lr: float


class TrainStep:
    """Carries out training steps on wrapped modules."""

    def __init__(
        self,
        fabric: lightning_fabric.Fabric,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        ema: ModelEMA,
        recipe: Recipe,
        schedule: FlatCosine,
        seed: int,
        multiple: int = 32,
    ) -> None:
        """
        Args:
            fabric: devices and precision.
            module: a `DetectionLoss`, set up by ``fabric``.
            optimizer: set up by ``fabric``; groups carry ``initial_lr``.
            ema: average of the detector's weights.
            recipe: clipping.
            schedule: learning rate by iteration.
            seed: of denoising noise and random sizes.
            multiple: what the sides of the network's input must be multiples of [px].
        """
        self._fabric = fabric
        self._module = module
        self._optimizer = optimizer
        self._ema = ema
        self._recipe = recipe
        self._schedule = schedule
        self._seed = seed
        self._multiple = multiple
        self._generator = torch.Generator()

    def __call__(self, images: Tensor, targets: list[dict[str, Tensor]], epoch: int, iteration: int) -> StepLosses:
        """One step. What it does depends on its arguments and the weights alone.

        Args:
            images: (B, 3, H, W) float32 in 0..1, on the device.
            targets: see `DetectionLoss.forward`.
            epoch: epoch, from 0.
            iteration: iteration over all epochs, from 0.
        """
        factor = self._schedule.factor(iteration)
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        entropy = np.random.SeedSequence([self._seed, iteration, self._fabric.global_rank])
        self._generator.manual_seed(int(entropy.generate_state(1, np.uint64)[0] >> 1))
        if self._recipe.multi_scale_repeat and epoch < self._recipe.multi_scale_until:
            images = resized(images, self._recipe.multi_scale_repeat, np.random.default_rng(entropy), self._multiple)
        with torch.random.fork_rng(devices=[images.device] if images.is_cuda else []):
            # What networks draw themselves, such as dropped paths and noise on routers, depends on the step alone too.
            torch.manual_seed(self._generator.initial_seed())
            losses: Mapping[str, Tensor] = self._module(images, targets, epoch, self._generator)
        values = torch.stack(list(losses.values()))
        self._fabric.backward(values.sum())
        norm = torch.tensor(float("nan"))
        if self._recipe.clip_norm > 0:
            norm = self._fabric.clip_gradients(
                self._module, self._optimizer, max_norm=self._recipe.clip_norm, error_if_nonfinite=False
            )  # type: ignore[assignment]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._ema.update()
        reported = values.detach()
        if (
            self._fabric.world_size > 1
        ):  # each process normalises by the mean number of objects, so the mean is the loss
            reported = self._fabric.all_reduce(reported.clone(), reduce_op="mean")  # type: ignore[assignment]
        return _summary(list(losses), reported, float(norm), self._recipe.lr * factor)


def _summary(names: list[str], values: Tensor, norm: float, lr: float) -> StepLosses:
    terms: dict[str, float] = {}
    numbers = values.tolist()
    for name, value in zip(names, numbers, strict=True):
        kind = name.split("_")[1]
        terms[kind] = terms.get(kind, 0.0) + value
    return StepLosses(sum(numbers), terms, norm, lr)
