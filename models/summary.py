"""Parameters and arithmetic of every variant, counted here, beside what was published."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from carpus.models.build import FAMILIES, build_model
from carpus.models.deimv2.config import DEIMv2Config, ViTConfig
from carpus.models.deimv2.deploy import deploy
from carpus.models.deimv2.model import DEIMv2
from carpus.runtime.errors import DataError

__all__ = ["PUBLISHED", "ModelRow", "PublishedFigures", "attention_gflops", "count_gflops", "model_table"]


@dataclass(frozen=True)
class PublishedFigures:
    """What the authors state.

    Attributes:
        params_m: parameters in millions.
        gflops: 2 x multiply-accumulates in 1e9 for one image of the variant's own size.
        ap: box AP on COCO val2017 [%].
        latency_ms: latency [ms] as printed by the authors.
    """

    params_m: float
    gflops: float
    ap: float
    latency_ms: float


PUBLISHED: dict[tuple[str, str], PublishedFigures] = {
    ("deimv2", "atto"): PublishedFigures(0.5, 0.8, 23.8, 1.10),
    ("deimv2", "femto"): PublishedFigures(1.0, 1.7, 31.0, 1.45),
    ("deimv2", "pico"): PublishedFigures(1.5, 5.2, 38.5, 2.13),
    ("deimv2", "n"): PublishedFigures(3.6, 6.8, 43.0, 2.32),
    ("deimv2", "s"): PublishedFigures(9.7, 25.6, 50.9, 5.78),
    ("deimv2", "m"): PublishedFigures(18.1, 52.2, 53.0, 8.80),
    ("deimv2", "l"): PublishedFigures(32.2, 96.7, 56.0, 10.47),
    ("deimv2", "x"): PublishedFigures(50.3, 151.6, 57.8, 13.75),
}
"""Published figures by (family, variant). DEIMv2: model zoo of its repository, at commit 0fff8d4."""

COUNTED_FAMILIES = ("deimv2",)
"""Families whose parameters and arithmetic the table counts."""


@dataclass(frozen=True)
class ModelRow:
    """One variant, counted at COCO's 80 classes.

    Attributes:
        family, variant: what it is.
        input_size: (height, width) [px].
        trainable_params: parameters that training updates.
        deploy_params: parameters of the deployed form as the authors count it.
        fused_params: parameters of the form that this project exports.
        gflops: 2 x multiply-accumulates in 1e9 of convolutions and matrix products, deployed form, one image, as the
            authors count it: without ``attention_gflops``.
        attention_gflops: the same of the products between tokens in a transformer backbone. The authors' counter does
            not see them, because they happen inside one fused operation.
        published: the authors' figures, or None.
    """

    family: str
    variant: str
    input_size: tuple[int, int]
    trainable_params: int
    deploy_params: int
    fused_params: int
    gflops: float
    published: PublishedFigures | None
    attention_gflops: float = 0.0


def count_gflops(model: nn.Module, input_size: tuple[int, int]) -> float:
    """2 x multiply-accumulates in 1e9 of one image's forward pass, by torch's flop counter.

    Args:
        model: in eval mode.
        input_size: (height, width) [px].
    """
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, *input_size))
    return counter.get_total_flops() / 1e9


def attention_gflops(config: DEIMv2Config) -> float:
    """2 x multiply-accumulates in 1e9 of q k^T and softmax(.) v in all blocks of a transformer backbone, one image."""
    vit = config.backbone
    if not isinstance(vit, ViTConfig):
        return 0.0
    height, width = config.input_size
    tokens = height // vit.patch_size * (width // vit.patch_size) + 1 + vit.storage_tokens
    return 4 * tokens**2 * vit.dim * vit.depth / 1e9


def model_table(families: Iterable[str] | None = None) -> list[ModelRow]:
    """A row for every variant of the given families (all whose figures are counted when None).

    Raises:
        DataError: unknown family.
    """
    rows = []
    for family in COUNTED_FAMILIES if families is None else families:
        if family not in FAMILIES:
            raise DataError(f"unknown model family {family!r}; known families: {', '.join(FAMILIES)}")
        rows += [_row(family, variant) for variant in FAMILIES[family].variants]
    return rows


def _row(family: str, variant: str) -> ModelRow:
    model = build_model(family, variant, 80)
    if not isinstance(model, DEIMv2):
        raise DataError(f"no figures are counted for family {family!r}")
    official, fused = deploy(model, fuse="official"), deploy(model)
    size, unseen = model.config.input_size, attention_gflops(model.config)
    return ModelRow(
        family=family,
        variant=variant,
        input_size=size,
        trainable_params=sum(p.numel() for p in model.parameters() if p.requires_grad),
        deploy_params=sum(p.numel() for p in official.parameters()),
        fused_params=sum(p.numel() for p in fused.parameters()),
        gflops=count_gflops(official, size) - unseen,
        published=PUBLISHED.get((family, variant)),
        attention_gflops=unseen,
    )
