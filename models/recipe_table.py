"""Training recipes by name, family and variant: the published ones, and short ones for two processor cores.

Sources of ``official``: the published configurations of DEIMv2 (arXiv:2509.20787) and LW-DETR (arXiv:2406.03459), and
the training settings that the authors of Mamba-YOLO (arXiv:2406.05835) and YOLO-Master (arXiv:2512.23273) state.
``tabletop`` is this project's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from carpus.models.data.augment_config import AugmentConfig, get_augment_config
from carpus.models.lw_detr.config import VARIANTS as LW_DETR
from carpus.models.mamba_yolo.config import VARIANTS as MAMBA_YOLO
from carpus.models.recipe import Recipe
from carpus.models.yolo_master.config import VARIANTS as YOLO_MASTER
from carpus.runtime.names import lookup

__all__ = ["RECIPES", "get_recipe"]

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
_TABLETOP_LATE = replace(_TABLETOP, lr=4e-4, input_scales=((0, 0.8), (10, 1.0)))


def _lw_detr(variant: str) -> Recipe:
    """Fine-tuning on COCO as published, but with images of one size a batch, so without padding masks."""
    config = LW_DETR[variant]
    rates = config.optimizer
    return Recipe(
        epochs=60,
        batch_size=32 if variant in ("tiny", "small") else 16,
        lr=rates.lr,
        backbone_lr_factor=rates.lr_encoder / rates.lr,
        layer_decay=rates.layer_decay,
        component_decay=rates.component_decay,
        weight_decay=rates.weight_decay,
        clip_norm=0.1,
        warmup_iterations=0,
        flat_epochs=60,
        final_lr_factor=1.0,
        augment=AugmentConfig(
            strong_from=0,
            strong_until=60,
            mosaic_prob=0.0,
            photometric_prob=0.0,
            channel_swap_prob=0.0,
            zoom_out_prob=0.0,
            crop_prob=0.5,
        ),
        multi_scale_repeat=1,
        multi_scale_until=60,
        num_denoising=0,
        ema_decay=0.9997,
        ema_warmups=1,
    )


_LETTERBOX = AugmentConfig(keep_aspect=True, fill=114)
_YOLO_AUGMENT = replace(
    _LETTERBOX,
    strong_from=0,
    mosaic_prob=1.0,
    mosaic_rotation=0.0,
    hue=(-0.015, 0.015),
    saturation=(0.3, 1.7),
    brightness=(0.6, 1.4),
    contrast=(1.0, 1.0),
    channel_swap_prob=0.0,
    photometric_prob=1.0,
    zoom_out_prob=0.0,
    crop_prob=0.0,
    min_box_size=2.0,
)


def _yolo(epochs: int, batch_size: int, momentum: float) -> Recipe:
    """From scratch on COCO: SGD, straight rise and fall of the rate, mosaics until ten epochs before the end."""
    return Recipe(
        epochs=epochs,
        batch_size=batch_size,
        lr=0.01,
        backbone_lr_factor=1.0,
        optimizer="sgd",
        momentum=momentum,
        weight_decay=5e-4 * batch_size / 64,
        falling="linear",
        clip_norm=10.0,
        warmup_iterations=3 * 118_287 // batch_size,
        final_lr_factor=0.01,
        augment=replace(_YOLO_AUGMENT, mosaic_until=epochs - 10, strong_until=epochs),
        num_denoising=0,
        ema_decay=0.9999,
        ema_warmups=2000,
    )


_TABLETOP_LW_DETR = replace(
    _TABLETOP,
    lr=4e-4,
    matcher_change_epoch=0,
    num_denoising=0,
    query_groups=1,  # thirteen cost four times the time, and a processor has little
)
_TABLETOP_YOLO = replace(
    _TABLETOP,
    lr=2e-3,
    weight_decay=5e-4,
    clip_norm=10.0,
    augment=replace(_TABLETOP.augment, keep_aspect=True, fill=114),
    matcher_change_epoch=0,
    num_denoising=0,
    dense_supervision=False,
)

_Recipes = Mapping[str, Recipe]
RECIPES: Mapping[str, Mapping[str, _Recipes]] = MappingProxyType(
    {
        "official": {
            "deimv2": {
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
            },
            "lw_detr": {variant: _lw_detr(variant) for variant in LW_DETR},
            "mamba_yolo": dict.fromkeys(MAMBA_YOLO, _yolo(300, 512, momentum=0.937)),
            "yolo_master": dict.fromkeys(YOLO_MASTER, _yolo(600, 256, momentum=0.9)),
        },
        "tabletop": {
            "deimv2": {
                "atto": _TABLETOP,
                "femto": replace(_TABLETOP, lr=8e-4),
                # The early sizes are the smallest with as many positions as the decoder has queries.
                "pico": replace(_TABLETOP, lr=8e-4, input_scales=((0, 0.7), (8, 0.8), (10, 1.0))),
                "n": _TABLETOP_LATE,
                # The backbones are meant to start from distilled or DINOv3 weights: a tenth of the rate keeps those.
                **dict.fromkeys(("s", "m", "l", "x"), replace(_TABLETOP_LATE, backbone_lr_factor=0.1)),
            },
            "lw_detr": dict.fromkeys(LW_DETR, _TABLETOP_LW_DETR),
            "mamba_yolo": dict.fromkeys(MAMBA_YOLO, _TABLETOP_YOLO),
            "yolo_master": dict.fromkeys(YOLO_MASTER, _TABLETOP_YOLO),
        },
    }
)
"""Recipes by name, family and variant. ``official`` is for COCO on accelerators, ``tabletop`` for small data on a
processor."""


def get_recipe(name: str, family: str, variant: str) -> Recipe:
    """A recipe by name.

    Raises:
        DataError: unknown name, family or variant; the message suggests the nearest.
    """
    families = lookup("recipe", name, RECIPES)
    variants = lookup("model family", family, families)
    return lookup(f"{family} variant", variant, variants)
