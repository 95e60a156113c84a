"""Networks and losses by family and variant: a table that later families join."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from torch import nn

from carpus.models.deimv2 import checkpoint as deimv2_checkpoint
from carpus.models.deimv2.config import VARIANTS, get_config
from carpus.models.deimv2.model import DEIMv2
from carpus.models.losses.config import get_criterion_config
from carpus.models.losses.criterion import DEIMCriterion
from carpus.models.lw_detr import checkpoint as lw_detr_checkpoint
from carpus.models.lw_detr import config as lw_detr_config
from carpus.models.lw_detr.criterion import LWDETRCriterion, LWDETRCriterionConfig
from carpus.models.lw_detr.model import LWDETR
from carpus.models.mamba_yolo import checkpoint as mamba_yolo_checkpoint
from carpus.models.mamba_yolo import config as mamba_yolo_config
from carpus.models.mamba_yolo.model import MambaYOLO
from carpus.models.published.rules import Rules
from carpus.models.published.start import start_from
from carpus.models.yolo.loss import YOLOCriterion
from carpus.models.yolo_master import checkpoint as yolo_master_checkpoint
from carpus.models.yolo_master import config as yolo_master_config
from carpus.models.yolo_master.model import YOLOMaster
from carpus.runtime.errors import DataError
from carpus.runtime.names import lookup, unknown

__all__ = ["FAMILIES", "Family", "build_criterion", "build_model", "find_family"]


@dataclass(frozen=True)
class Family:
    """How a model family is built.

    Attributes:
        variants: names of its sizes.
        model: (variant, num_classes, input size or None) -> network.
        criterion: (variant, num_classes) -> training loss.
        published: what stands in its published files.
        start_from: (network, published file) -> fills it, whatever its classes, and says in a line what was taken.
    """

    variants: tuple[str, ...]
    model: Callable[[str, int, tuple[int, int] | None], nn.Module]
    criterion: Callable[[str, int], nn.Module]
    published: Rules
    start_from: Callable[[nn.Module, Path], str]


def _deimv2(variant: str, num_classes: int, input_size: tuple[int, int] | None) -> DEIMv2:
    config = get_config(variant, num_classes)
    return DEIMv2(config if input_size is None else config.with_input_size(*input_size))


def _deimv2_criterion(variant: str, num_classes: int) -> DEIMCriterion:
    return DEIMCriterion(get_criterion_config(variant, num_classes))


def _yolo_master(variant: str, num_classes: int, input_size: tuple[int, int] | None) -> YOLOMaster:
    config = yolo_master_config.get_config(variant, num_classes)
    return YOLOMaster(config if input_size is None else config.with_input_size(*input_size))


def _yolo_master_criterion(variant: str, num_classes: int) -> YOLOCriterion:
    return YOLOCriterion(yolo_master_config.get_loss_config(variant, num_classes))


def _mamba_yolo(variant: str, num_classes: int, input_size: tuple[int, int] | None) -> MambaYOLO:
    config = mamba_yolo_config.get_config(variant, num_classes)
    return MambaYOLO(config if input_size is None else config.with_input_size(*input_size))


def _mamba_yolo_criterion(variant: str, num_classes: int) -> YOLOCriterion:
    return YOLOCriterion(mamba_yolo_config.get_loss_config(variant, num_classes))


def _lw_detr(variant: str, num_classes: int, input_size: tuple[int, int] | None) -> LWDETR:
    config = lw_detr_config.get_config(variant, num_classes)
    return LWDETR(config if input_size is None else config.with_input_size(*input_size))


def _lw_detr_criterion(variant: str, num_classes: int) -> LWDETRCriterion:
    groups = lw_detr_config.get_config(variant).decoder.num_groups
    return LWDETRCriterion(LWDETRCriterionConfig(num_classes, groups))


def _start(rules: Rules) -> Callable[[nn.Module, Path], str]:
    return partial(start_from, rules=rules)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "deimv2": Family(
            tuple(VARIANTS), _deimv2, _deimv2_criterion, deimv2_checkpoint.RULES, deimv2_checkpoint.load_into
        ),
        "lw_detr": Family(
            tuple(lw_detr_config.VARIANTS),
            _lw_detr,
            _lw_detr_criterion,
            lw_detr_checkpoint.RULES,
            lw_detr_checkpoint.load_into,
        ),
        "yolo_master": Family(
            tuple(yolo_master_config.VARIANTS),
            _yolo_master,
            _yolo_master_criterion,
            yolo_master_checkpoint.RULES,
            _start(yolo_master_checkpoint.RULES),
        ),
        "mamba_yolo": Family(
            tuple(mamba_yolo_config.VARIANTS),
            _mamba_yolo,
            _mamba_yolo_criterion,
            mamba_yolo_checkpoint.RULES,
            _start(mamba_yolo_checkpoint.RULES),
        ),
    }
)
"""Model families by name."""


def find_family(family: str, variant: str) -> Family:
    """A family that has a variant of that name.

    Raises:
        DataError: unknown family or variant; all that there are are listed.
    """
    entry = lookup("model family", family, FAMILIES)
    if variant not in entry.variants:
        raise DataError(unknown(f"{family} variant", variant, entry.variants))
    return entry


def build_model(family: str, variant: str, num_classes: int, input_size: tuple[int, int] | None = None) -> nn.Module:
    """A freshly initialised network; seed ``torch`` first for repeatable weights.

    Args:
        family: name in ``FAMILIES``.
        variant: one of the family's variants.
        num_classes: object classes.
        input_size: (height, width) [px] other than the variant's own.

    Raises:
        DataError: unknown family or variant, or sizes that cannot be.
    """
    return find_family(family, variant).model(variant, num_classes, input_size)


def build_criterion(family: str, variant: str, num_classes: int) -> nn.Module:
    """The training loss of a variant with its published settings.

    Raises:
        DataError: unknown family or variant.
    """
    return find_family(family, variant).criterion(variant, num_classes)
