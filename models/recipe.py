"""Training recipes as data: DEIMv2's own for every variant, and a short one for two processor cores.

Sources: the published DEIMv2 configurations (arXiv:2509.20787) for ``official``; ``tabletop`` is this project's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from carpus.models.data.augment_config import AugmentConfig, get_augment_config
from carpus.models.schedule import FlatCosine
from carpus.runtime.errors import DataError

__all__ = ["RECIPES", "Recipe", "get_recipe"]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the weights become, apart from data, model and seed.

    Epoch numbers count from 0. `scaled` moves them all to another length of training.

    Attributes:
        epochs: passes over the training set.
        batch_size: images per step, over all processes.
        lr: learning rate of encoder and decoder.
        backbone_lr_factor: the backbone's learning rate relative to ``lr``.
        weight_decay: of AdamW.
        decay_biases: also decay the biases of encoder and decoder (norms there are never decayed).
        betas: of AdamW.
        clip_norm: gradients are scaled to at most this norm; 0 leaves them.
        warmup_iterations: steps of quadratic warm-up.
        flat_epochs: epochs at full learning rate, warm-up included; beyond ``epochs``: it never falls.
        final_lr_factor: learning rate at the end relative to ``lr``.
        no_aug_epochs: closing epochs at the final rate and without strong augmentation.
        augment: augmentation of samples and batches, and in which epochs.
        input_scales: (first epoch, factor on the input size) of epochs on smaller images, ascending; () never.
        multi_scale_repeat: when above 0, every batch is resized to a size drawn from 0.75 to 1.25 of its own in steps
            of 32 px, among which its own counts this many times.
        multi_scale_until: first epoch without that.
        matcher_change_epoch: epoch from which the matcher uses IoU^4 times the score.
        num_denoising: denoising queries; 0 turns them off.
        dense_supervision: also teach every encoder position (`carpus.models.losses.dense`); for short training from
            random weights.
        ema_decay: decay of the averaged weights.
        ema_warmups: updates over which that decay rises.
        ema_restart_epoch: epoch that starts from the best weights so far (stage 2 of DEIMv2); None never does.
    """

    epochs: int
    batch_size: int
    lr: float
    backbone_lr_factor: float = 0.5
    weight_decay: float = 1e-4
    decay_biases: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    clip_norm: float = 0.1
    warmup_iterations: int = 2000
    flat_epochs: int = 0
    final_lr_factor: float = 0.5
    no_aug_epochs: int = 0
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    input_scales: tuple[tuple[int, float], ...] = ()
    multi_scale_repeat: int = 0
    multi_scale_until: int = 0
    matcher_change_epoch: int = 0
    num_denoising: int = 100
    dense_supervision: bool = False
    ema_decay: float = 0.9999
    ema_warmups: int = 1000
    ema_restart_epoch: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise DataError(f"Recipe.{name} must be at least 1, got {getattr(self, name)}.")
        for name in (
            "lr",
            "weight_decay",
            "clip_norm",
            "warmup_iterations",
            "no_aug_epochs",
            "backbone_lr_factor",
            "multi_scale_repeat",
        ):
            if not getattr(self, name) >= 0:
                raise DataError(f"Recipe.{name} must not be negative, got {getattr(self, name)}.")
        if any(not 0.1 <= factor <= 2.0 for _, factor in self.input_scales):
            raise DataError(f"Recipe.input_scales must have factors in 0.1..2, got {self.input_scales}.")
        starts = [start for start, _ in self.input_scales]
        if starts != sorted(starts):
            raise DataError(f"Recipe.input_scales must ascend by epoch, got {self.input_scales}.")
        if not 0.0 <= self.final_lr_factor <= 1.0:
            raise DataError(f"Recipe.final_lr_factor must be in 0..1, got {self.final_lr_factor}.")

    def schedule(self, batches_per_epoch: int) -> FlatCosine:
        """The learning-rate schedule in iterations."""
        return FlatCosine(
            warmup=self.warmup_iterations,
            flat=self.flat_epochs * batches_per_epoch,
            decayed=max(self.epochs - self.no_aug_epochs, 0) * batches_per_epoch,
            final=self.final_lr_factor,
        )

    def scaled(self, epochs: int, batches_per_epoch: int | None = None) -> Recipe:
        """The same recipe for another number of epochs: every epoch in it moves in proportion.

        Args:
            epochs: the new length.
            batches_per_epoch: when given, warm-up is held to a tenth of training and the averaged weights reach back
                over no more than a tenth, which matters where data is small or epochs are few.
        """
        ratio = epochs / self.epochs

        def move(epoch: int) -> int:
            return round(epoch * ratio)

        augment = replace(
            self.augment,
            strong_from=move(self.augment.strong_from),
            mosaic_until=move(self.augment.mosaic_until),
            strong_until=move(self.augment.strong_until),
            mixup_epochs=(move(self.augment.mixup_epochs[0]), move(self.augment.mixup_epochs[1])),
            copyblend_epochs=(move(self.augment.copyblend_epochs[0]), move(self.augment.copyblend_epochs[1])),
        )
        recipe = replace(
            self,
            epochs=epochs,
            flat_epochs=move(self.flat_epochs),
            no_aug_epochs=move(self.no_aug_epochs),
            augment=augment,
            # However short the training, its last epoch is at the last size.
            input_scales=tuple((min(move(epoch), epochs - 1), factor) for epoch, factor in self.input_scales),
            multi_scale_until=move(self.multi_scale_until),
            matcher_change_epoch=move(self.matcher_change_epoch),
            ema_restart_epoch=None if self.ema_restart_epoch is None else move(self.ema_restart_epoch),
        )
        return recipe if batches_per_epoch is None else recipe.fitted(epochs * batches_per_epoch)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as checkpoints hold them."""
        values = {name: _plain(value) for name, value in asdict(self).items() if name != "augment"}
        return {**values, "augment": {name: _plain(value) for name, value in asdict(self.augment).items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe that `as_dict` wrote."""
        augment = AugmentConfig(**{name: _frozen(value) for name, value in values["augment"].items()})
        return cls(**{name: _frozen(value) for name, value in values.items() if name != "augment"}, augment=augment)

    def fitted(self, iterations: int) -> Recipe:
        """Warm-up and averaging shortened where training is too short for them."""
        reach = min(1.0 / (1.0 - self.ema_decay), max(iterations / 10, 10.0))
        return replace(
            self,
            warmup_iterations=min(self.warmup_iterations, max(iterations // 10, 1)),
            ema_decay=1.0 - 1.0 / reach,
            ema_warmups=max(min(self.ema_warmups, round(reach / 10)), 1),
        )


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


_LITE = Recipe(
    epochs=500,
    batch_size=128,
    lr=1.6e-3,
    warmup_iterations=4000,
    flat_epochs=250,
    final_lr_factor=0.5,
    no_aug_epochs=32,
    augment=get_augment_config("femto"),
    matcher_change_epoch=450,
    ema_restart_epoch=468,
)


def _vit(variant: str, backbone_lr_factor: float, weight_decay: float, change: int, repeat: int) -> Recipe:
    """S to X: the augmentation's epochs give the length of training."""
    augment = get_augment_config(variant)
    no_aug = 12 if variant in ("s", "m") else 8
    return Recipe(
        epochs=augment.strong_until + no_aug,
        batch_size=32,
        lr=5e-4,
        backbone_lr_factor=backbone_lr_factor,
        weight_decay=weight_decay,
        flat_epochs=augment.mosaic_until,
        no_aug_epochs=no_aug,
        augment=augment,
        multi_scale_repeat=repeat,
        multi_scale_until=augment.strong_until,
        matcher_change_epoch=change,
        ema_restart_epoch=augment.strong_until,
    )


_TABLETOP = Recipe(
    epochs=13,
    batch_size=8,
    lr=1e-3,
    backbone_lr_factor=1.0,
    clip_norm=0.1,
    warmup_iterations=300,
    flat_epochs=9,
    final_lr_factor=0.02,
    no_aug_epochs=1,
    augment=AugmentConfig(
        strong_from=1,
        mosaic_until=6,
        strong_until=11,
        mosaic_prob=0.15,
        zoom_out_prob=0.1,
        zoom_out_sides=(1.0, 1.8),
        crop_prob=0.3,
        min_box_size=4.0,
    ),
    # An epoch at 0.6 of the input size costs less than half of a full one, and the early ones need no more.
    input_scales=((0, 0.6), (8, 0.8), (10, 1.0)),
    matcher_change_epoch=12,
    num_denoising=30,
    dense_supervision=True,
    ema_decay=0.998,
    ema_warmups=200,
)

RECIPES: Mapping[str, Mapping[str, Recipe]] = MappingProxyType(
    {
        "official": MappingProxyType(
            {
                "atto": replace(_LITE, lr=2e-3, decay_biases=True, augment=get_augment_config("atto")),
                "femto": _LITE,
                "pico": replace(_LITE, augment=get_augment_config("pico")),
                "n": Recipe(
                    epochs=160,
                    batch_size=32,
                    lr=8e-4,
                    warmup_iterations=2000,
                    flat_epochs=7800,
                    final_lr_factor=1.0,
                    no_aug_epochs=12,
                    augment=get_augment_config("n"),
                    matcher_change_epoch=136,
                    ema_restart_epoch=148,
                ),
                "s": _vit("s", 0.05, 1e-4, change=100, repeat=20),
                "m": _vit("m", 0.05, 1e-4, change=80, repeat=6),
                "l": _vit("l", 0.025, 1.25e-4, change=50, repeat=3),
                "x": _vit("x", 0.02, 1.25e-4, change=45, repeat=3),
            }
        ),
        "tabletop": MappingProxyType(
            {
                "atto": _TABLETOP,
                "femto": replace(_TABLETOP, lr=8e-4),
                "pico": replace(_TABLETOP, lr=8e-4),
                "n": replace(_TABLETOP, lr=4e-4),
                # The backbones are meant to start from distilled or DINOv3 weights: a tenth of the rate keeps those.
                **{name: replace(_TABLETOP, lr=4e-4, backbone_lr_factor=0.1) for name in ("s", "m", "l", "x")},
            }
        ),
    }
)
"""Recipes by name and variant. ``official`` is for COCO on accelerators, ``tabletop`` for small data on a processor."""


def get_recipe(name: str, variant: str) -> Recipe:
    """A recipe by name.

    Raises:
        DataError: unknown name or variant; the message lists the known ones.
    """
    if name not in RECIPES:
        raise DataError(f"Unknown recipe {name!r}; known recipes: {', '.join(RECIPES)}.")
    if variant not in RECIPES[name]:
        raise DataError(f"Recipe {name!r} has no variant {variant!r}; it has: {', '.join(RECIPES[name])}.")
    return RECIPES[name][variant]
