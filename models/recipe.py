"""What a training recipe holds; the recipes themselves stand in `carpus.models.recipe_table`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from carpus.models.data.augment_config import AugmentConfig
from carpus.models.schedule import FlatCosine
from carpus.runtime.errors import DataError

__all__ = ["Classification", "Recipe"]

Classification = Literal["mal", "vfl", "ia_bce"]
"""Classification losses of DETR families: matchability-aware (DEIM), varifocal, IoU-aware (LW-DETR)."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the weights become, apart from data, model and seed.

    Epoch numbers count from 0. `scaled` moves them all to another length of training.

    Attributes:
        epochs: passes over the training set.
        batch_size: images per step, over all processes.
        lr: learning rate of encoder and decoder.
        backbone_lr_factor: the backbone's learning rate relative to ``lr``.
        layer_decay: factor on the rate per layer of the backbone, from its last to its first; 1 leaves them alike.
        component_decay: factor on the rate per component, from the heads towards the image; 1 leaves them alike. Which
            components there are says the ``parameter_groups`` of each family.
        optimizer: AdamW, or SGD with Nesterov's momentum.
        momentum: of SGD.
        weight_decay: decay of the weights.
        decay_biases: also decay the biases of encoder and decoder (norms there are never decayed).
        betas: of AdamW.
        falling: how the rate rises and falls: quadratic and as a cosine, or in straight lines.
        clip_norm: gradients are scaled to at most this norm; 0 leaves them.
        warmup_iterations: steps of warm-up.
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
        classification: classification loss of a DETR family; None takes the family's own.
        query_groups: groups of queries in training (Group DETR, arXiv:2207.13085), up to as many as the network has; 1
            turns it off, None takes all. Inference uses the first group, whatever it is.
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
    layer_decay: float = 1.0
    component_decay: float = 1.0
    optimizer: Literal["adamw", "sgd"] = "adamw"
    momentum: float = 0.937
    weight_decay: float = 1e-4
    decay_biases: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    falling: Literal["cosine", "linear"] = "cosine"
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
    classification: Classification | None = None
    query_groups: int | None = None
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
        for name in ("layer_decay", "component_decay"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise DataError(f"Recipe.{name} must be above 0 and at most 1, got {getattr(self, name)}.")
        if not 0.0 < self.momentum < 1.0:
            raise DataError(f"Recipe.momentum must be between 0 and 1, got {self.momentum}.")
        if self.query_groups is not None and self.query_groups < 1:
            raise DataError(f"Recipe.query_groups must be at least 1, got {self.query_groups}.")
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
            linear=self.falling == "linear",
        )

    def without_dense_o2o(self) -> Recipe:
        """The same recipe without mosaic, mixup and copy-blend, which DEIM calls dense one-to-one matching."""
        augment = replace(self.augment, mosaic_prob=0.0, mixup_prob=0.0, copyblend_prob=0.0)
        return replace(self, augment=augment)

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
