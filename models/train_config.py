"""Configuration of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from carpus.models.recipe import Recipe
from carpus.runtime.errors import DataError

__all__ = ["TrainConfig"]

_POSITIVE = ("devices", "num_nodes", "eval_every", "threads")
_NOT_NEGATIVE = ("workers", "eval_images", "cache_gb", "checkpoint_minutes", "picture_every", "seed")


@dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, how and where to.

    Attributes:
        data: training split (folder with annotations.json and images/), a root with ``train/``, or a COCO JSON file.
        out: folder for checkpoints, history and pictures.
        recipe: what decides the weights.
        val: validation split; None takes ``heldout`` or ``val`` below the root of ``data``, or goes without.
        images, val_images: image folders, when they are not ``images/`` beside the annotations.
        family, variant: the architecture.
        init: checkpoint to start from (this project's or an official one); None starts from random weights.
        seed: decides weights, order and augmentation.
        max_minutes: fit the number of epochs into this time; it is fixed before the first step and logged.
        bad_boxes: what to do with unusable boxes.
        freeze_norm: keep batch normalisation at its running statistics, for fine-tuning with very small batches.
        input_size: (height, width) [px]; None takes the variant's own.
        eval_every: epochs between evaluations; the last epoch is always evaluated.
        eval_images: evaluate on this many validation images, spread over the split, until the last epoch, which takes
            all; 0 always takes all.
        workers: processes that augment. The result does not depend on it.
        threads: threads of torch; None leaves torch's own number.
        accelerator: where to train.
        devices: processes on this machine.
        num_nodes: machines, each started with the same command by torchrun.
        precision: arithmetic, as Lightning Fabric names it; None takes mixed 16-bit on a GPU and float32 elsewhere.
        channels_last: memory format of activations and convolution weights.
        compile: compile the model with torch.compile.
        cache_gb: memory for decoded training images [GB].
        cache_scale: training images are kept with a shorter side of at most this times the input size; 0 keeps all.
        checkpoint_minutes: time between checkpoints inside an epoch; every epoch ends with one.
        picture_every: epochs between sample pictures; 0 makes none.
        tensorboard: write TensorBoard event files.
    """

    data: Path
    out: Path
    recipe: Recipe
    val: Path | None = None
    images: Path | None = None
    val_images: Path | None = None
    family: str = "deimv2"
    variant: str = "atto"
    init: Path | None = None
    seed: int = 0
    max_minutes: float | None = None
    bad_boxes: Literal["drop", "refuse"] = "drop"
    freeze_norm: bool = False
    input_size: tuple[int, int] | None = None
    eval_every: int = 5
    eval_images: int = 0
    workers: int = 1
    threads: int | None = None
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int = 1
    num_nodes: int = 1
    precision: str | None = None
    channels_last: bool = True
    compile: bool = False
    cache_gb: float = 6.0
    cache_scale: float = 1.5
    checkpoint_minutes: float = 5.0
    picture_every: int = 10
    tensorboard: bool = True

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"TrainConfig.{name} must be at least 1, got {value}.")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise DataError(f"TrainConfig.{name} must not be negative, got {getattr(self, name)}.")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise DataError(f"TrainConfig.max_minutes must be positive, got {self.max_minutes}.")
        world = self.devices * self.num_nodes
        if self.recipe.batch_size % world:
            raise DataError(
                f"The batch of {self.recipe.batch_size} images does not divide over {world} processes; choose a batch "
                f"size that is a multiple of {world}."
            )

    def identity(self) -> dict[str, Any]:
        """The settings that decide the weights, as plain values; runs that differ in one must not share a folder."""
        recipe = self.recipe.as_dict()
        augment = recipe.pop("augment")
        return {
            "family": self.family,
            "variant": self.variant,
            "init": None if self.init is None else str(self.init),
            "seed": self.seed,
            "max_minutes": self.max_minutes,
            "bad_boxes": self.bad_boxes,
            "freeze_norm": self.freeze_norm,
            "input_size": None if self.input_size is None else list(self.input_size),
            "cache_scale": self.cache_scale,
            **{f"recipe.{name}": value for name, value in recipe.items()},
            **{f"recipe.augment.{name}": value for name, value in augment.items()},
        }
