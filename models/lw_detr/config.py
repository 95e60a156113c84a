"""Sizes of the LW-DETR variants, as data.

A variant is an entry of ``VARIANTS``, not a subclass. Figures follow "LW-DETR: A Transformer Replacement to YOLO for
Real-Time Detection" (arXiv:2406.03459) and its published configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from carpus.models.detector_config import DetectorConfig, find_config
from carpus.runtime.errors import DataError

__all__ = [
    "STRIDES",
    "VARIANTS",
    "DecoderConfig",
    "LWDETRConfig",
    "OptimizerConfig",
    "ResNetConfig",
    "ViTConfig",
    "get_config",
]

Level = Literal["P3", "P4", "P5"]
STRIDES: Mapping[Level, int] = MappingProxyType({"P3": 8, "P4": 16, "P5": 32})
"""Side of a level's cell [px]."""


@dataclass(frozen=True)
class ViTConfig:
    """Plain vision transformer with window-major tokens.

    Attributes:
        dim: width.
        depth: blocks.
        windowed: indices of the blocks that attend inside windows; the others attend to all tokens.
        taken: indices of the blocks whose outputs are aggregated.
        num_heads: attention heads.
        mlp_ratio: inner width of the feed-forward relative to ``dim``.
        patch_size: side of a patch [px].
        window_grid: windows along each side, whatever the input size.
        pretrained_grid: side of the grid of the position embedding.
        drop_path: stochastic depth of the last block in training; rises linearly from 0.
    """

    dim: int
    depth: int
    windowed: tuple[int, ...]
    taken: tuple[int, ...]
    num_heads: int = 12
    mlp_ratio: int = 4
    patch_size: int = 16
    window_grid: int = 4
    pretrained_grid: int = 14
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise DataError(f"ViTConfig.dim must be a multiple of num_heads {self.num_heads}, got {self.dim}")
        wrong = [i for i in (*self.windowed, *self.taken) if not 0 <= i < self.depth]
        if wrong or not self.taken:
            raise DataError(f"ViTConfig.windowed and taken must name blocks in 0..{self.depth - 1}, got {wrong}")
        if not 0.0 <= self.drop_path < 1.0:
            raise DataError(f"ViTConfig.drop_path must be in 0..1, got {self.drop_path}")

    @property
    def stride(self) -> int:
        """What the sides of the input must be multiples of [px]."""
        return self.patch_size * self.window_grid


@dataclass(frozen=True)
class ResNetConfig:
    """Residual network whose last three stages are aggregated at stride 16.

    Attributes:
        repeats: blocks of the four stages.
        bottleneck: blocks of 1x1, 3x3 and 1x1 convolutions instead of two 3x3.
        frozen_norms: norms keep the statistics and factors they start from.
        frozen_stem: the first convolution and its norm are not trained.
    """

    repeats: tuple[int, int, int, int]
    bottleneck: bool
    frozen_norms: bool = False
    frozen_stem: bool = False

    def __post_init__(self) -> None:
        if len(self.repeats) != 4 or min(self.repeats) < 1:
            raise DataError(f"ResNetConfig.repeats must be four numbers of at least 1, got {self.repeats}")

    @property
    def depth(self) -> int:
        """Blocks of all stages."""
        return sum(self.repeats)

    @property
    def stride(self) -> int:
        """What the sides of the input must be multiples of [px]."""
        return 32


@dataclass(frozen=True)
class DecoderConfig:
    """Deformable decoder with fixed reference boxes.

    Attributes:
        hidden_dim: width.
        self_heads: heads of the self-attention.
        cross_heads: heads of the deformable attention.
        num_points: sampling points per level and head.
        num_queries: object queries of a group.
        num_groups: query groups in training (Group DETR); inference uses the first.
        num_layers: layers.
        ffn_dim: inner width of the feed-forward.
    """

    hidden_dim: int
    self_heads: int
    cross_heads: int
    num_points: int
    num_queries: int
    num_groups: int = 13
    num_layers: int = 3
    ffn_dim: int = 2048

    def __post_init__(self) -> None:
        for name in ("self_heads", "cross_heads", "num_points", "num_queries", "num_groups", "num_layers"):
            if getattr(self, name) < 1:
                raise DataError(f"DecoderConfig.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class OptimizerConfig:
    """Published learning rates of fine-tuning on COCO.

    Attributes:
        lr: rate of projector, heads and queries.
        lr_encoder: rate of the encoder before its decays.
        weight_decay: of AdamW.
        layer_decay: factor per encoder block, from the last to the first.
        component_decay: factor of the decoder; the encoder takes it twice.
    """

    lr: float = 1e-4
    lr_encoder: float = 1.5e-4
    weight_decay: float = 1e-4
    layer_decay: float = 0.8
    component_decay: float = 0.7


@dataclass(frozen=True)
class LWDETRConfig(DetectorConfig):
    """Everything that fixes an LW-DETR network.

    Attributes:
        variant: name in ``VARIANTS``.
        encoder: the vision transformer, or a residual network in its place.
        levels: maps the projector makes of the aggregated features.
        decoder: decoder sizes.
        optimizer: published learning rates.
        num_classes: logits a query; the published weights use COCO's category ids 0..90 as classes.
        input_size: (height, width) [px]; multiples of 64, with a residual network of 32.
    """

    variant: str
    encoder: ViTConfig | ResNetConfig
    levels: tuple[Level, ...]
    decoder: DecoderConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    num_classes: int = 91
    input_size: tuple[int, int] = (640, 640)

    def __post_init__(self) -> None:
        self.check_sizes()
        unknown = [level for level in self.levels if level not in ("P3", "P4", "P5")]
        if unknown or not self.levels:
            raise DataError(f"LWDETRConfig.levels must be of P3, P4, P5, got {self.levels}")

    @property
    def input_stride(self) -> int:
        """What the sides of the input must be multiples of [px]."""
        return self.encoder.stride

    def with_num_groups(self, num_groups: int) -> LWDETRConfig:
        """The same network with another number of query groups in training; 1 turns Group DETR off."""
        return replace(self, decoder=replace(self.decoder, num_groups=num_groups))


_DEEP = {"depth": 10, "windowed": (0, 1, 3, 6, 7, 9), "taken": (2, 4, 5, 9)}
_NARROW = DecoderConfig(256, self_heads=8, cross_heads=16, num_points=2, num_queries=300)
_WIDE = DecoderConfig(384, self_heads=12, cross_heads=24, num_points=4, num_queries=300)
_CONVOLUTIONAL = OptimizerConfig(lr_encoder=1e-5, layer_decay=1.0, component_decay=1.0)

VARIANTS: Mapping[str, LWDETRConfig] = MappingProxyType(
    {
        "tiny": LWDETRConfig(
            variant="tiny",
            encoder=ViTConfig(192, 6, windowed=(0, 2, 4), taken=(1, 3, 5)),
            levels=("P4",),
            decoder=replace(_NARROW, num_queries=100),
        ),
        "small": LWDETRConfig("small", ViTConfig(192, **_DEEP), ("P4",), _NARROW),  # type: ignore[arg-type]
        "medium": LWDETRConfig(
            variant="medium",
            encoder=ViTConfig(384, **_DEEP),  # type: ignore[arg-type]
            levels=("P4",),
            decoder=_NARROW,
            optimizer=OptimizerConfig(layer_decay=0.7),
        ),
        "large": LWDETRConfig(
            variant="large",
            encoder=ViTConfig(384, **_DEEP, drop_path=0.1),  # type: ignore[arg-type]
            levels=("P3", "P5"),
            decoder=_WIDE,
            optimizer=OptimizerConfig(layer_decay=0.7, component_decay=0.5),
        ),
        "xlarge": LWDETRConfig(
            variant="xlarge",
            encoder=ViTConfig(768, **_DEEP, drop_path=0.1),  # type: ignore[arg-type]
            levels=("P3", "P5"),
            decoder=_WIDE,
            optimizer=OptimizerConfig(weight_decay=1e-3, layer_decay=0.75, component_decay=0.5),
        ),
        # No weights are published for these; projector and decoder are those of small and medium.
        "resnet18": LWDETRConfig(
            variant="resnet18",
            encoder=ResNetConfig((2, 2, 2, 2), bottleneck=False),
            levels=("P4",),
            decoder=_NARROW,
            optimizer=_CONVOLUTIONAL,
        ),
        "resnet50": LWDETRConfig(
            variant="resnet50",
            encoder=ResNetConfig((3, 4, 6, 3), bottleneck=True, frozen_norms=True, frozen_stem=True),
            levels=("P4",),
            decoder=_NARROW,
            optimizer=_CONVOLUTIONAL,
        ),
    }
)
"""The variants by name, each for 640 x 640 px."""


def get_config(variant: str, num_classes: int | None = None) -> LWDETRConfig:
    """Configuration of a variant by name; the number of classes is that of the published weights unless given.

    Raises:
        DataError: unknown variant; the message suggests the nearest.
    """
    return find_config("LW-DETR", VARIANTS, variant, num_classes)
