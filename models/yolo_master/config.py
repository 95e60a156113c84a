"""Sizes of the YOLO-Master variants, as data.

"YOLO-Master: MOE-Accelerated with Specialized Transformers", arXiv:2512.23273. ``esmoe-*`` and ``v0_1-*`` are the two
released families, with the released settings; ``paper-*`` is the network as the paper describes it: four experts of
which two are chosen, a loss for the experts' diversity, and no box distributions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from carpus.models.detector_config import DetectorConfig, find_config
from carpus.models.yolo.loss import LossConfig
from carpus.runtime.errors import DataError

__all__ = ["VARIANTS", "LayerSpec", "MoEConfig", "Scale", "YOLOMasterConfig", "get_config", "get_loss_config"]


@dataclass(frozen=True)
class Scale:
    """What distinguishes the sizes n, s, m, l and x.

    Attributes:
        depth: factor on the number of inner blocks.
        width: factor on the channels.
        max_channels: channels are limited to this before the factor.
        nested: every C3k2 holds C3k blocks, not only those of the neck.
        residual: attention blocks have a scaled residual path, and a narrower MLP (ratio 1.2 instead of 2).
    """

    depth: float
    width: float
    max_channels: int
    nested: bool = False
    residual: bool = False

    def channels(self, nominal: int) -> int:
        """Channels of a layer, a multiple of 8."""
        return math.ceil(min(nominal, self.max_channels) * self.width / 8) * 8

    def repeats(self, nominal: int) -> int:
        """Inner blocks of a layer."""
        return max(round(nominal * self.depth), 1) if nominal > 1 else nominal


@dataclass(frozen=True)
class LayerSpec:
    """One row of a layout.

    Attributes:
        kind: type of the layer.
        channels: nominal output channels, before scaling.
        sources: layers it reads; negative counts back from the layer itself, as -1 for the one before.
        stride: of a "conv" layer, whose kernel is 3x3.
        repeats: nominal inner blocks.
        expansion: inner width of a "c3k2" layer relative to its output.
        nested: a "c3k2" layer holds C3k blocks in every size.
        area: strips that attend separately in an "a2c2f" layer.
    """

    kind: Literal["conv", "c3k2", "a2c2f", "moe", "upsample", "concat"]
    channels: int = 0
    sources: tuple[int, ...] = (-1,)
    stride: int = 1
    repeats: int = 1
    expansion: float = 0.5
    nested: bool = False
    area: int = 1


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts layers.

    Attributes:
        kind: "es_moe" has depthwise experts with different kernels, "modular" 1x1 experts beside a shared one.
        num_experts: experts of each such layer, in order.
        top_k: experts chosen for an image; None mixes all of them.
        threshold: in inference every chosen expert but the first is left out when its weight is below this, without
            renormalising ("es_moe" only).
        noise_std: noise on the router's logits in training ("modular" only).
        balance_weight: weight of the load-balance loss in a layer's auxiliary loss.
        z_weight: weight of the squared log-partition of the router ("modular" only).
        diversity_weight: weight of the experts' mutual similarity ("es_moe" only).
    """

    kind: Literal["es_moe", "modular"]
    num_experts: tuple[int, ...]
    top_k: int | None
    threshold: float = 0.0
    noise_std: float = 0.0
    balance_weight: float = 1.0
    z_weight: float = 0.0
    diversity_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "modular" and self.top_k is None:
            raise DataError("MoEConfig.top_k of a modular mixture must choose experts, got None; give a number")
        if self.top_k is not None and not 1 <= self.top_k <= min(self.num_experts):
            raise DataError(
                f"MoEConfig.top_k must be between 1 and the experts of the smallest layer ({min(self.num_experts)}), "
                f"got {self.top_k}"
            )


@dataclass(frozen=True)
class YOLOMasterConfig(DetectorConfig):
    """Everything that fixes a YOLO-Master network.

    Attributes:
        variant: name in ``VARIANTS``.
        layers: layout of backbone and neck.
        outputs: layers whose maps enter the head, at strides 8, 16 and 32.
        scale: size.
        moe: mixture-of-experts layers.
        reg_max: bins of a box side; 1 for no distributions.
        loss: gains of the training loss.
        num_classes: object classes.
        input_size: (height, width) [px] the variant is published at; any multiples of 32 work.
    """

    variant: str
    layers: tuple[LayerSpec, ...]
    outputs: tuple[int, ...]
    scale: Scale
    moe: MoEConfig
    reg_max: int = 16
    loss: LossConfig = field(default_factory=LossConfig)
    num_classes: int = 80
    input_size: tuple[int, int] = (640, 640)

    def __post_init__(self) -> None:
        self.check_sizes()
        layers = sum(layer.kind == "moe" for layer in self.layers)
        if layers != len(self.moe.num_experts):
            raise DataError(
                f"YOLOMasterConfig.moe.num_experts names {len(self.moe.num_experts)} layers, the layout has {layers}"
            )


def _down(channels: int) -> LayerSpec:
    return LayerSpec("conv", channels, stride=2)


def _stage(channels: int) -> LayerSpec:
    return LayerSpec("c3k2", channels, repeats=2, expansion=0.25)


def _attention(channels: int, area: int) -> LayerSpec:
    return LayerSpec("a2c2f", channels, repeats=4, area=area)


def _neck(p3: int, p4: int, p5: int) -> tuple[LayerSpec, ...]:
    """Top-down, then bottom-up, on the backbone layers at strides 8, 16 and 32; the last of these is layer p5."""

    def fuse(channels: int) -> LayerSpec:
        return LayerSpec("c3k2", channels, repeats=2, nested=True)

    def join(other: int) -> LayerSpec:
        return LayerSpec("concat", sources=(-1, other))

    up = LayerSpec("upsample")
    top_down = (up, join(p4), fuse(512), up, join(p3), fuse(256))
    bottom_up = (_down(256), join(p5 + 3), fuse(512), _down(512), join(p5), fuse(512))
    return top_down + bottom_up


_MOE = LayerSpec("moe")
_STEM = (_down(64), _down(128), _stage(256))
_ESMOE = (
    *_STEM,
    _MOE,
    _down(256),
    _stage(512),
    _MOE,
    _down(512),
    _attention(512, 4),
    _MOE,
    _down(1024),
    _attention(1024, 1),
    _MOE,
    *_neck(6, 9, 12),
)
_V0_1 = (
    *_STEM,
    _down(256),
    _stage(512),
    _MOE,
    _down(512),
    _attention(512, 4),
    _MOE,
    _down(1024),
    _attention(1024, 1),
    _MOE,
    *_neck(5, 8, 11),
)

SCALES: Mapping[str, Scale] = MappingProxyType(
    {
        "n": Scale(0.5, 0.25, 1024),
        "s": Scale(0.5, 0.5, 1024),
        "m": Scale(0.5, 1.0, 512, nested=True),
        "l": Scale(1.0, 1.0, 512, nested=True, residual=True),
        "x": Scale(1.0, 1.5, 512, nested=True, residual=True),
    }
)
"""Sizes by name."""

_ESMOE_RELEASED = MoEConfig("es_moe", (3, 3, 3, 3), top_k=None, threshold=0.4)
_V0_1_RELEASED = MoEConfig("modular", (4, 8, 16), top_k=2, noise_std=1.0, balance_weight=0.01, z_weight=0.001)
# The paper gives the terms, not their weights: these two are this project's choice.
_PAPER = MoEConfig("es_moe", (4, 4, 4, 4), top_k=2, diversity_weight=0.1)
_PAPER_LOSS = LossConfig(dfl=0.0, moe=1.0)


def _variants() -> dict[str, YOLOMasterConfig]:
    variants = {}
    for size, scale in SCALES.items():
        variants[f"esmoe-{size}"] = YOLOMasterConfig(f"esmoe-{size}", _ESMOE, (18, 21, 24), scale, _ESMOE_RELEASED)
        variants[f"v0_1-{size}"] = YOLOMasterConfig(f"v0_1-{size}", _V0_1, (17, 20, 23), scale, _V0_1_RELEASED)
        variants[f"paper-{size}"] = YOLOMasterConfig(
            f"paper-{size}", _ESMOE, (18, 21, 24), scale, _PAPER, reg_max=1, loss=_PAPER_LOSS
        )
    return {name: variants[name] for name in sorted(variants, key=lambda n: (n.split("-")[0], "nsmlx".index(n[-1])))}


VARIANTS: Mapping[str, YOLOMasterConfig] = MappingProxyType(_variants())
"""The variants by name, for 80 classes and 640 x 640 px."""


def get_config(variant: str, num_classes: int | None = None) -> YOLOMasterConfig:
    """Configuration of a variant by name; the number of classes is that of the published weights unless given.

    Raises:
        DataError: unknown variant; the message suggests the nearest.
    """
    return find_config("YOLO-Master", VARIANTS, variant, num_classes)


def get_loss_config(variant: str, num_classes: int | None = None) -> LossConfig:
    """Settings of a variant's training loss.

    Raises:
        DataError: unknown variant.
    """
    config = get_config(variant, num_classes)
    return replace(config.loss, num_classes=config.num_classes, reg_max=config.reg_max)
