"""What training needs to know about each model family: a table that later families join."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from carpus.models.deimv2 import optimizer as deimv2_optimizer
from carpus.models.deimv2.denoising import make_denoising
from carpus.models.deimv2.model import DEIMv2
from carpus.models.engine_optimizer import ParameterGroup
from carpus.models.engine_step import Extras
from carpus.models.losses.criterion import DEIMCriterion
from carpus.models.lw_detr import optimizer as lw_detr_optimizer
from carpus.models.lw_detr.config import STRIDES, OptimizerConfig
from carpus.models.lw_detr.criterion import LWDETRCriterion
from carpus.models.lw_detr.model import LWDETR
from carpus.models.lw_detr.preprocess import lw_detr_preprocess
from carpus.models.predict import deimv2_preprocess
from carpus.models.recipe import Recipe
from carpus.models.yolo import optimizer as yolo_optimizer
from carpus.models.yolo.letterbox import yolo_postprocess, yolo_preprocess
from carpus.runtime.errors import DataError
from carpus.runtime.spec import Postprocess, Preprocess

__all__ = ["TRAIN_FAMILIES", "TrainFamily"]


@dataclass(frozen=True)
class TrainFamily:
    """How a family is trained and judged.

    Attributes:
        preprocess: network -> how images enter it.
        postprocess: how average precision reads its outputs.
        parameter_groups: (network, recipe) -> rates and decays.
        apply: (network, criterion, recipe) -> sets what the recipe asks of both. Called again with the recipe that is
            carried out.
        classifications: classification losses it can be trained with; the first is its own.
        switches: names of recipe entries that only some families know and this one does.
        extras: (network, recipe) -> what the network takes in training beside the images, or None.
        positions: (network, (height, width)) -> places that queries are chosen from; None where all are outputs.
        multiple: network -> what the sides of its input must be multiples of [px].
        least_side: shortest side of an input it can be trained on [px].
    """

    preprocess: Callable[[Any], Preprocess]
    postprocess: Postprocess
    parameter_groups: Callable[[Any, Recipe], tuple[ParameterGroup, ...]]
    apply: Callable[[Any, Any, Recipe], None]
    classifications: tuple[str, ...] = ()
    switches: frozenset[str] = frozenset()
    extras: Callable[[Any, Recipe], Extras | None] = lambda model, recipe: None
    positions: Callable[[Any, tuple[int, int]], int] | None = None
    multiple: Callable[[Any], int] = lambda model: 32
    least_side: int = 32

    def check(self, family: str, recipe: Recipe) -> None:
        """Refuses a recipe that asks for what the family does not have.

        Raises:
            DataError: names the entry and what to take instead.
        """
        asked = {
            "num_denoising": recipe.num_denoising > 0,
            "dense_supervision": recipe.dense_supervision,
            "query_groups": recipe.query_groups is not None,
            "matcher_change_epoch": recipe.matcher_change_epoch > 0,
        }
        for name, wanted in asked.items():
            if wanted and name not in self.switches:
                raise DataError(
                    f"Recipe.{name} is {getattr(recipe, name)!r}, but {family} has no such thing; leave it out."
                )
        if recipe.classification is not None and recipe.classification not in self.classifications:
            known = f"take one of {', '.join(self.classifications)}" if self.classifications else "leave it out"
            raise DataError(f"Recipe.classification {recipe.classification!r} is not available for {family}; {known}.")

    def check_sizes(self, model: nn.Module, sizes: Mapping[float, tuple[int, int]]) -> None:
        """Refuses inputs that are too small, or have fewer positions than queries.

        Args:
            model: the network.
            sizes: (height, width) [px] that are trained on, by the factor of ``input_scales`` they come from.

        Raises:
            DataError: names the size and what to do.
        """
        for height, width in sizes.values():
            if min(height, width) < self.least_side:
                raise DataError(
                    f"Input of {height} x {width} px is too small to train {cast(Any, model.config).variant}: sides "
                    f"must be at least {self.least_side} px, also by input_scales and random sizes; take a larger one."
                )
        if self.positions is None:
            return
        config = cast(Any, model.config)
        for factor, (height, width) in sizes.items():
            positions = self.positions(model, (height, width))
            if positions < config.decoder.num_queries:
                of = "" if factor == 1.0 else f" (the factor {factor:g} of input_scales or of a random size)"
                raise DataError(
                    f"Input of {height} x {width} px{of} has {positions} positions for {config.decoder.num_queries} "
                    f"queries of {config.variant}; take a larger input size"
                    f"{' or `--input-scales 0 1.0 --multi-scale-repeat 0`' if of else ''}."
                )


def _deimv2_extras(model: DEIMv2, recipe: Recipe) -> Extras:
    config = model.config

    def extras(targets: Any, generator: torch.Generator) -> dict[str, Any]:
        denoising = make_denoising(
            targets,
            num_classes=config.num_classes,
            num_queries=config.decoder.num_queries,
            num_denoising=recipe.num_denoising,
            generator=generator,
        )
        return {"denoising": denoising}

    return extras


def _apply_deimv2(model: DEIMv2, criterion: DEIMCriterion, recipe: Recipe) -> None:
    model.decoder.dense_supervision = recipe.dense_supervision
    config = criterion.config.with_change_epoch(recipe.matcher_change_epoch)
    criterion.config = config.with_classification(recipe.classification or "mal")


def _deimv2_positions(model: DEIMv2, size: tuple[int, int]) -> int:
    return sum((size[0] // stride) * (size[1] // stride) for stride in model.config.feature_strides)


def _lw_detr_groups(model: LWDETR, recipe: Recipe) -> tuple[ParameterGroup, ...]:
    encoder = model.config.encoder
    rates = OptimizerConfig(
        lr=recipe.lr,
        lr_encoder=recipe.lr * recipe.backbone_lr_factor,
        weight_decay=recipe.weight_decay,
        layer_decay=recipe.layer_decay,
        component_decay=recipe.component_decay,
    )
    return lw_detr_optimizer.parameter_groups(model, encoder.depth, rates)


def _apply_lw_detr(model: LWDETR, criterion: LWDETRCriterion, recipe: Recipe) -> None:
    most = model.config.decoder.num_groups
    groups = most if recipe.query_groups is None else recipe.query_groups
    if groups > most:
        raise DataError(f"Recipe.query_groups is {groups}, but the network has {most} groups of queries; take fewer.")
    model.active_groups, model.dense_supervision = groups, recipe.dense_supervision
    criterion.config = replace(criterion.config, num_groups=groups, classification=recipe.classification or "ia_bce")


def _lw_detr_positions(model: LWDETR, size: tuple[int, int]) -> int:
    return sum((size[0] // STRIDES[level]) * (size[1] // STRIDES[level]) for level in model.config.levels)


def _lw_detr_multiple(model: LWDETR) -> int:
    return model.config.input_stride


def _as_built(model: nn.Module, criterion: nn.Module, recipe: Recipe) -> None:
    """Nothing in network and criterion depends on the recipe."""


_YOLO = TrainFamily(
    preprocess=lambda model: yolo_preprocess(model.config.input_size),
    postprocess=yolo_postprocess(evaluation=True),
    parameter_groups=yolo_optimizer.parameter_groups,
    apply=_as_built,
)

TRAIN_FAMILIES: Mapping[str, TrainFamily] = MappingProxyType(
    {
        "deimv2": TrainFamily(
            preprocess=lambda m: deimv2_preprocess(m.config.input_size, normalise=m.config.imagenet_normalisation),
            postprocess=Postprocess(score_threshold=0.0),
            parameter_groups=deimv2_optimizer.parameter_groups,
            apply=_apply_deimv2,
            classifications=("mal", "vfl"),
            switches=frozenset({"num_denoising", "dense_supervision", "matcher_change_epoch"}),
            extras=_deimv2_extras,
            positions=_deimv2_positions,
        ),
        "lw_detr": TrainFamily(
            preprocess=lambda model: lw_detr_preprocess(model.config.input_size),
            postprocess=Postprocess(score_threshold=0.0),
            parameter_groups=_lw_detr_groups,
            apply=_apply_lw_detr,
            classifications=("ia_bce", "mal", "vfl"),
            switches=frozenset({"query_groups", "dense_supervision"}),
            positions=_lw_detr_positions,
            multiple=_lw_detr_multiple,
        ),
        "mamba_yolo": _YOLO,
        # An image that alone chooses an expert must have more than one position for the expert's norms.
        "yolo_master": replace(_YOLO, least_side=64),
    }
)
"""Families by name."""
