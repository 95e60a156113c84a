"""Loss settings of the DEIMv2 variants, as data.

Figures follow "Real-Time Object Detection Meets DINOv3" (DEIMv2, arXiv:2509.20787) and its published configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from carpus.runtime.errors import DataError

__all__ = ["CRITERIA", "LOSS_KINDS", "CriterionConfig", "LossWeights", "MatcherConfig", "get_criterion_config"]

LOSS_KINDS = ("mal", "vfl", "boxes", "local")
"""Kinds of loss: classification, matchability-aware or varifocal; L1 and generalised IoU; fine-grained localisation and
its self-distillation."""


@dataclass(frozen=True)
class MatcherConfig:
    """How predictions and ground truth are paired.

    Attributes:
        cost_class: weight of the focal classification cost.
        cost_bbox: weight of the L1 distance of cxcywh boxes.
        cost_giou: weight of the negative generalised IoU.
        alpha: balance of the focal cost.
        gamma: exponent of the focal cost.
        change_epoch: first epoch that pairs by p * IoU^iou_order instead; None never changes.
        iou_order: exponent of the IoU in the later cost.
    """

    cost_class: float = 2.0
    cost_bbox: float = 5.0
    cost_giou: float = 2.0
    alpha: float = 0.25
    gamma: float = 2.0
    change_epoch: int | None = None
    iou_order: float = 4.0

    def changed(self, epoch: int) -> bool:
        """Whether the later cost holds in this epoch (counted from 0)."""
        return self.change_epoch is not None and epoch >= self.change_epoch


@dataclass(frozen=True)
class LossWeights:
    """Factor of each term in the total."""

    mal: float = 1.0
    vfl: float = 1.0
    bbox: float = 5.0
    giou: float = 2.0
    fgl: float = 0.15
    ddf: float = 1.5


@dataclass(frozen=True)
class CriterionConfig:
    """Everything that fixes the training loss of a DEIM detector.

    Attributes:
        losses: which of `LOSS_KINDS` are computed.
        weights: their factors.
        matcher: how predictions and ground truth are paired.
        use_union_set: box and local losses use the union of the matchings of all decoder outputs.
        gamma: exponent of the matchability-aware loss.
        num_classes: object classes.
        reg_max: bins of an edge's distribution minus one.
        reg_scale: scale of the distribution's table.
        reg_up: bound of the distribution's table, relative to `reg_scale`.
        temperature: temperature of the self-distillation.
    """

    losses: tuple[str, ...] = ("mal", "boxes")
    weights: LossWeights = field(default_factory=LossWeights)
    matcher: MatcherConfig = field(default_factory=MatcherConfig)
    use_union_set: bool = False
    gamma: float = 1.5
    num_classes: int = 80
    reg_max: int = 32
    reg_scale: float = 4.0
    reg_up: float = 0.5
    temperature: float = 5.0

    def __post_init__(self) -> None:
        unknown = [name for name in self.losses if name not in LOSS_KINDS]
        if unknown or not self.losses:
            raise DataError(
                f"CriterionConfig.losses must be one or more of {', '.join(LOSS_KINDS)}, got {self.losses!r}"
            )
        if self.num_classes < 1:
            raise DataError(f"CriterionConfig.num_classes must be at least 1, got {self.num_classes}")
        if self.reg_max < 4 or self.reg_max % 2:
            raise DataError(f"CriterionConfig.reg_max must be even and at least 4, got {self.reg_max}")

    def with_num_classes(self, num_classes: int) -> CriterionConfig:
        """The same loss for another number of classes."""
        return replace(self, num_classes=num_classes)

    def with_classification(self, kind: str) -> CriterionConfig:
        """The same loss with another classification term, "mal" or "vfl"."""
        others = tuple(name for name in self.losses if name not in ("mal", "vfl"))
        return replace(self, losses=(kind, *others))

    def with_change_epoch(self, epoch: int | None) -> CriterionConfig:
        """The same loss with the matcher changing at another epoch (schedules of another length)."""
        return replace(self, matcher=replace(self.matcher, change_epoch=epoch))


_LITE = CriterionConfig(matcher=MatcherConfig(change_epoch=450))
_FULL = CriterionConfig(losses=("mal", "boxes", "local"), use_union_set=True)

CRITERIA: Mapping[str, CriterionConfig] = MappingProxyType(
    {
        "atto": _LITE,
        "femto": _LITE,
        "pico": _LITE,
        "n": _FULL.with_change_epoch(136),
        "s": _FULL.with_change_epoch(100),
        "m": _FULL.with_change_epoch(80),
        "l": _FULL.with_change_epoch(50),
        "x": _FULL.with_change_epoch(45),
    }
)
"""Loss settings by DEIMv2 variant; epochs refer to the published schedule lengths."""


def get_criterion_config(variant: str, num_classes: int | None = None) -> CriterionConfig:
    """Loss settings of a variant by name.

    Raises:
        DataError: unknown variant; the message lists the known ones.
    """
    if variant not in CRITERIA:
        raise DataError(f"no loss settings for DEIMv2 variant {variant!r}; known variants: {', '.join(CRITERIA)}")
    config = CRITERIA[variant]
    return config if num_classes is None else config.with_num_classes(num_classes)
