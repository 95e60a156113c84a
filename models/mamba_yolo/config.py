"""Sizes of the Mamba-YOLO variants, as data ("Mamba YOLO: SSMs-Based YOLO for Object Detection", arXiv:2406.05835).

``T``, ``B`` and ``L`` are the shipped sizes; ``paper-*`` have the backbone repeats of the paper, [3, 6, 6, 3] before
scaling where the shipped ones are [3, 3, 9, 3].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, get_args

from carpus.models.detector_config import DetectorConfig, find_config
from carpus.models.yolo.loss import LossConfig
from carpus.runtime.errors import DataError
from carpus.runtime.names import unknown

__all__ = ["VARIANTS", "Activation", "MambaYOLOConfig", "ScanConfig", "get_config", "get_loss_config"]

Activation = Literal["gelu", "silu"]
STAGE_CHANNELS = (128, 256, 512, 1024)
"""Channels of the four stages before scaling."""
SHIPPED_REPEATS = (3, 3, 9, 3)
PAPER_REPEATS = (3, 6, 6, 3)
NECK_REPEATS = 3


@dataclass(frozen=True)
class ScanConfig:
    """The state-space operator along the four directions of a map.

    Attributes:
        kind: "s6" is the selective scan of the published weights; "mamba3" the recurrence of Mamba-3.
        d_state: state size N.
        expand: inner width relative to the block's.
        headdim: "mamba3" only: channels of a head, reduced to a common divisor with the inner width.
        rope_fraction: "mamba3" only: part of the state that rotates.
        chunk_size: "mamba3" only: steps in a chunk.
    """

    kind: Literal["s6", "mamba3"] = "s6"
    d_state: int = 16
    expand: int = 2
    headdim: int = 32
    rope_fraction: float = 0.5
    chunk_size: int = 16

    def __post_init__(self) -> None:
        if self.kind not in ("s6", "mamba3"):
            raise DataError(unknown("scan", self.kind, ("s6", "mamba3")))
        for name in ("d_state", "expand", "headdim", "chunk_size"):
            if getattr(self, name) < 1:
                raise DataError(f"ScanConfig.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class MambaYOLOConfig(DetectorConfig):
    """Everything that fixes a Mamba-YOLO network.

    Attributes:
        variant: name in ``VARIANTS``.
        depth: factor on the repeats.
        width: factor on the channels.
        max_channels: channels are limited to this before the factor.
        backbone_repeats: blocks of the four stages before scaling.
        scan: state-space operator.
        gate_activation: activation of the gated MLPs (RGBlock); smooth ones are interchangeable.
        reg_max: bins of a box side.
        num_classes: object classes.
        input_size: (height, width) [px] the variant is published at; any multiples of 32 work.
    """

    variant: str
    depth: float
    width: float
    max_channels: int
    backbone_repeats: tuple[int, int, int, int] = SHIPPED_REPEATS
    scan: ScanConfig = field(default_factory=ScanConfig)
    gate_activation: Activation = "gelu"
    reg_max: int = 16
    num_classes: int = 80
    input_size: tuple[int, int] = (640, 640)

    def __post_init__(self) -> None:
        self.check_sizes()
        if self.gate_activation not in get_args(Activation):
            raise DataError(unknown("gate activation", self.gate_activation, get_args(Activation)))
        if len(self.backbone_repeats) != len(STAGE_CHANNELS):
            raise DataError(f"backbone_repeats needs one number for each of 4 stages, got {self.backbone_repeats}")

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of the four stages, multiples of 8."""
        return tuple(math.ceil(min(c, self.max_channels) * self.width / 8) * 8 for c in STAGE_CHANNELS)

    @property
    def repeats(self) -> tuple[int, ...]:
        """Blocks of the four stages."""
        return tuple(self._scaled(n) for n in self.backbone_repeats)

    @property
    def neck_repeats(self) -> int:
        """State-space modules chained inside a block of the neck."""
        return self._scaled(NECK_REPEATS)

    def _scaled(self, nominal: int) -> int:
        return max(round(nominal * self.depth), 1) if nominal > 1 else nominal


_SIZES = {"T": (0.33, 0.25, 1024), "B": (0.33, 0.50, 1024), "L": (0.67, 0.75, 768)}


def _variants() -> dict[str, MambaYOLOConfig]:
    shipped = {name: MambaYOLOConfig(name, *size) for name, size in _SIZES.items()}
    table = dict(shipped)
    for name, config in shipped.items():
        table[f"paper-{name}"] = replace(config, variant=f"paper-{name}", backbone_repeats=PAPER_REPEATS)
    for name, config in shipped.items():
        table[f"mamba3-{name}"] = replace(config, variant=f"mamba3-{name}", scan=ScanConfig(kind="mamba3"))
    return table


VARIANTS: Mapping[str, MambaYOLOConfig] = MappingProxyType(_variants())
"""Configurations by name; ``mamba3-*`` scan with Mamba-3 and have no published weights."""


def get_config(variant: str, num_classes: int | None = None) -> MambaYOLOConfig:
    """Configuration of a variant by name; the number of classes is that of the published weights unless given.

    Raises:
        DataError: unknown variant; the message suggests the nearest.
    """
    return find_config("Mamba-YOLO", VARIANTS, variant, num_classes)


def get_loss_config(variant: str, num_classes: int | None = None) -> LossConfig:
    """Settings of a variant's training loss.

    Raises:
        DataError: unknown variant.
    """
    config = get_config(variant, num_classes)
    return LossConfig(num_classes=config.num_classes, reg_max=config.reg_max)
