"""Sizes of the DEIMv2 variants, as data.

A variant is an entry of ``VARIANTS``, not a subclass. Figures follow "Real-Time Object Detection Meets DINOv3"
(DEIMv2, arXiv:2509.20787) and its published configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from carpus.models.deimv2.vit_config import VIT_SMALL, VIT_SMALL_PLUS, VIT_TINY, VIT_TINY_PLUS, ViTConfig
from carpus.models.detector_config import DetectorConfig, find_config
from carpus.runtime.errors import DataError

__all__ = [
    "VARIANTS",
    "BackboneConfig",
    "DEIMv2Config",
    "DecoderConfig",
    "EncoderConfig",
    "StageConfig",
    "ViTConfig",
    "get_config",
]


@dataclass(frozen=True)
class StageConfig:
    """One HGNetv2 stage.

    Attributes:
        in_channels: channels that enter the stage.
        mid_channels: channels of each inner layer.
        out_channels: channels that leave every block.
        num_blocks: HG blocks in the stage; all but the first carry an identity path.
        downsample: halve the resolution first with a depthwise 3x3 convolution.
        light: inner layers are 1x1 + depthwise kxk instead of one kxk convolution.
        kernel_size: k of the inner layers.
        num_layers: inner layers per block.
    """

    in_channels: int
    mid_channels: int
    out_channels: int
    num_blocks: int
    downsample: bool
    light: bool
    kernel_size: int
    num_layers: int = 3


@dataclass(frozen=True)
class BackboneConfig:
    """HGNetv2: stem (stride 4), then stages at strides 4, 8, 16, 32.

    Attributes:
        name: published name of the size.
        stem_channels: (input, middle, output) channels of the stem.
        stages: the stages in order.
        return_stages: indices of the stages whose maps are returned, fine to coarse.
    """

    name: str
    stages: tuple[StageConfig, ...]
    return_stages: tuple[int, ...]
    stem_channels: tuple[int, int, int] = (3, 16, 16)

    @property
    def out_channels(self) -> tuple[int, ...]:
        """Channels of the returned maps."""
        return tuple(self.stages[i].out_channels for i in self.return_stages)


@dataclass(frozen=True)
class EncoderConfig:
    """Feature pyramid between backbone and decoder.

    Attributes:
        kind: "lite" makes two levels of one map; "hybrid" fuses as many levels as it gets, with one transformer
            layer on the coarsest.
        expansion: width of the fuse blocks relative to half the hidden width.
        num_bottlenecks: re-parameterisable 3x3 blocks in each of a fuse block's two branches.
        feedforward_dim: inner width of the transformer layer (hybrid only).
        num_heads: attention heads of the transformer layer (hybrid only).
        branch_convs: each branch of a fuse block ends in a 3x3 convolution.
    """

    kind: Literal["lite", "hybrid"]
    expansion: float = 0.34
    num_bottlenecks: int = 2
    feedforward_dim: int = 0
    num_heads: int = 8
    branch_convs: bool = True


@dataclass(frozen=True)
class DecoderConfig:
    """Transformer decoder with distribution refinement.

    Attributes:
        num_queries: object queries taken from the encoder's best positions.
        num_points: sampling points per level, fine to coarse.
        ffn_dim: hidden width of the SwiGLU feed-forward.
        gateway: gated fusion of self- and cross-attention instead of a plain residual.
        share_bbox_head: one box head for all layers.
        num_layers: decoder layers.
        num_heads: attention heads.
        reg_max: bins of an edge's distribution minus one.
        reg_scale: scale of the distribution's table.
        reg_up: bound of the distribution's table, relative to ``reg_scale``.
        num_denoising: denoising queries in training (positives and negatives of all groups: about twice that).
    """

    num_queries: int
    num_points: tuple[int, ...]
    ffn_dim: int
    gateway: bool
    share_bbox_head: bool
    num_layers: int = 3
    num_heads: int = 8
    reg_max: int = 32
    reg_scale: int = 4
    reg_up: float = 0.5
    num_denoising: int = 100


@dataclass(frozen=True)
class DEIMv2Config(DetectorConfig):
    """Everything that fixes a DEIMv2 network.

    Attributes:
        variant: name in ``VARIANTS``.
        input_size: (height, width) [px] of the input; multiples of 32.
        hidden_dim: width of encoder and decoder.
        backbone: backbone sizes.
        encoder: encoder sizes.
        decoder: decoder sizes.
        num_classes: object classes.
    """

    variant: str
    input_size: tuple[int, int]
    hidden_dim: int
    backbone: BackboneConfig | ViTConfig
    encoder: EncoderConfig
    decoder: DecoderConfig
    num_classes: int = 80

    def __post_init__(self) -> None:
        self.check_sizes()

    @property
    def feature_strides(self) -> tuple[int, ...]:
        """Strides [px] of the decoder's levels, fine to coarse."""
        levels = len(self.decoder.num_points)
        return tuple(32 >> (levels - 1 - i) for i in range(levels))

    @property
    def imagenet_normalisation(self) -> bool:
        """Whether images enter with ImageNet's mean and deviation removed; otherwise in 0..1."""
        return isinstance(self.backbone, ViTConfig)

    def with_take_blocks(self, take_blocks: tuple[int, int, int]) -> DEIMv2Config:
        """The same network, with the tokens of other transformer blocks.

        Raises:
            DataError: a backbone that is no transformer, or indices that cannot be.
        """
        if not isinstance(self.backbone, ViTConfig):
            raise DataError(f"DEIMv2 {self.variant} has no transformer backbone whose blocks could be chosen")
        return replace(self, backbone=replace(self.backbone, take_blocks=take_blocks))


_STAGE1 = StageConfig(16, 16, 64, 1, False, False, 3)
_STAGE2 = StageConfig(64, 32, 256, 1, True, False, 3)


def _backbone(name: str, *stages: StageConfig) -> BackboneConfig:
    """Stages 1 and 2 are the same in every size; stride 16 and coarser are returned."""
    return BackboneConfig(name, (_STAGE1, _STAGE2, *stages), tuple(range(2, 2 + len(stages))))


def _vit_variant(
    variant: str, backbone: ViTConfig, encoder: tuple[float, int, int], ffn_dim: int, num_layers: int = 4
) -> DEIMv2Config:
    """What S to X have in common; ``encoder`` is (expansion, bottlenecks, feed-forward width)."""
    return DEIMv2Config(
        variant=variant,
        input_size=(640, 640),
        hidden_dim=backbone.map_channels,
        backbone=backbone,
        encoder=EncoderConfig("hybrid", encoder[0], encoder[1], encoder[2], branch_convs=False),
        decoder=DecoderConfig(
            300, (3, 6, 3), ffn_dim=ffn_dim, gateway=True, share_bbox_head=False, num_layers=num_layers
        ),
    )


VARIANTS: Mapping[str, DEIMv2Config] = MappingProxyType(
    {
        "atto": DEIMv2Config(
            variant="atto",
            input_size=(320, 320),
            hidden_dim=64,
            backbone=_backbone("Atto", StageConfig(256, 64, 256, 1, True, True, 3)),
            encoder=EncoderConfig("lite"),
            decoder=DecoderConfig(100, (4, 2), ffn_dim=80, gateway=False, share_bbox_head=True),
        ),
        "femto": DEIMv2Config(
            variant="femto",
            input_size=(416, 416),
            hidden_dim=96,
            backbone=_backbone("Femto", StageConfig(256, 64, 512, 1, True, True, 5)),
            encoder=EncoderConfig("lite"),
            decoder=DecoderConfig(150, (4, 2), ffn_dim=128, gateway=False, share_bbox_head=True),
        ),
        "pico": DEIMv2Config(
            variant="pico",
            input_size=(640, 640),
            hidden_dim=112,
            backbone=_backbone("Pico", StageConfig(256, 64, 512, 2, True, True, 5)),
            encoder=EncoderConfig("lite"),
            decoder=DecoderConfig(200, (4, 2), ffn_dim=160, gateway=False, share_bbox_head=True),
        ),
        "n": DEIMv2Config(
            variant="n",
            input_size=(640, 640),
            hidden_dim=128,
            backbone=_backbone(
                "B0", StageConfig(256, 64, 512, 2, True, True, 5), StageConfig(512, 128, 1024, 1, True, True, 5)
            ),
            encoder=EncoderConfig("hybrid", feedforward_dim=512),
            decoder=DecoderConfig(300, (6, 6), ffn_dim=256, gateway=True, share_bbox_head=False),
        ),
        "s": _vit_variant("s", VIT_TINY, (0.34, 2, 512), ffn_dim=256),
        "m": _vit_variant(
            "m",
            VIT_TINY_PLUS,
            (0.67, 3, 512),
            ffn_dim=256,
        ),
        "l": _vit_variant("l", VIT_SMALL, (1.0, 3, 896), ffn_dim=896),
        "x": _vit_variant(
            "x",
            VIT_SMALL_PLUS,
            (1.25, 4, 1024),
            ffn_dim=1024,
            num_layers=6,
        ),
    }
)
"""The variants by name: HGNetv2 backbones (atto to n), transformers (s to x). ``input_size`` is the published one."""


def get_config(variant: str, num_classes: int | None = None) -> DEIMv2Config:
    """Configuration of a variant by name; the number of classes is that of the published weights unless given.

    Raises:
        DataError: unknown variant; the message suggests the nearest.
    """
    return find_config("DEIMv2", VARIANTS, variant, num_classes)
