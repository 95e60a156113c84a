"""Settings of the Dense O2O augmentation, as data.

Sources: "DEIM: DETR with Improved Matching for Fast Convergence" (arXiv:2412.04234) for Dense one-to-one matching,
"Real-Time Object Detection Meets DINOv3" (DEIMv2, arXiv:2509.20787) and its published configurations for the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from carpus.runtime.errors import DataError

__all__ = ["AUGMENTS", "AugmentConfig", "get_augment_config"]


@dataclass(frozen=True)
class AugmentConfig:
    """How training samples and batches are varied. Epochs count from 0; ranges of epochs leave their end out.

    Attributes:
        strong_from: first epoch with mosaic, photometric distortion, zoom-out and crop.
        mosaic_until: first epoch without mosaic.
        strong_until: first epoch without any of the four.
        mosaic_prob: probability that a sample becomes a mosaic; the others get zoom-out and crop.
        mosaic_rotation: a mosaic turns by up to this angle either way [degrees].
        mosaic_translation: and moves by up to this share of its width and of its height.
        mosaic_scale: range of the factor it is scaled by.
        photometric_prob: probability of each of brightness, contrast, saturation and hue.
        brightness: range of the factor on brightness.
        contrast: range of the factor on the distance from the mean grey.
        saturation: range of the factor on the distance from the pixel's own grey.
        hue: range of the turn of hue [full circles].
        channel_swap_prob: probability that the colour channels change places.
        zoom_out_prob: probability of placing the image in a larger black one.
        zoom_out_sides: range of that canvas' side relative to the image's.
        crop_prob: probability of a crop that keeps a required overlap with the objects.
        flip_prob: probability of mirroring left and right (in every epoch).
        keep_aspect: the image is not stretched to the training size but framed, as letterbox preprocessing does.
        fill: grey level 0..255 around images.
        min_box_size: boxes with a side shorter than this, before or after resizing, are no targets [px].
        mixup_prob: probability that the images of a batch are blended in pairs.
        mixup_epochs: range of epochs with that.
        copyblend_prob: probability that objects are blended into the images of a batch, if it was not mixed up.
        copyblend_epochs: range of epochs with that.
        copyblend_objects: most objects pasted into an image.
        copyblend_min_area: smallest object that is pasted [px^2].
        copyblend_context: range of how far a patch reaches beyond its object, a side, in sizes of the object.
        blend: range of the share of the first image (mixup) or of the patch (copy-blend).
    """

    strong_from: int = 4
    mosaic_until: int = 0
    strong_until: int = 0
    mosaic_prob: float = 0.5
    mosaic_rotation: float = 10.0
    mosaic_translation: tuple[float, float] = (0.1, 0.1)
    mosaic_scale: tuple[float, float] = (0.5, 1.5)
    photometric_prob: float = 0.5
    brightness: tuple[float, float] = (0.875, 1.125)
    contrast: tuple[float, float] = (0.5, 1.5)
    saturation: tuple[float, float] = (0.5, 1.5)
    hue: tuple[float, float] = (-0.05, 0.05)
    channel_swap_prob: float = 0.5
    zoom_out_prob: float = 0.5
    zoom_out_sides: tuple[float, float] = (1.0, 4.0)
    crop_prob: float = 0.8
    flip_prob: float = 0.5
    keep_aspect: bool = False
    fill: int = 0
    min_box_size: float = 1.0
    mixup_prob: float = 0.0
    mixup_epochs: tuple[int, int] = (0, 0)
    copyblend_prob: float = 0.0
    copyblend_epochs: tuple[int, int] = (0, 0)
    copyblend_objects: int = 3
    copyblend_min_area: float = 100.0
    copyblend_context: tuple[float, float] = (0.1, 0.25)
    blend: tuple[float, float] = (0.45, 0.55)

    def __post_init__(self) -> None:
        for name in (f for f in self.__dataclass_fields__ if f.endswith("_prob")):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise DataError(f"AugmentConfig.{name} must be in 0..1, got {getattr(self, name)}")
        for name in ("mosaic_scale", "brightness", "contrast", "saturation", "hue", "zoom_out_sides", "blend"):
            low, high = getattr(self, name)
            if not low <= high:
                raise DataError(f"AugmentConfig.{name} must be (low, high) with low <= high, got {(low, high)}")
        if self.mosaic_scale[0] <= 0:
            raise DataError(f"AugmentConfig.mosaic_scale must be above 0, got {self.mosaic_scale}")
        if self.zoom_out_sides[0] < 1:
            raise DataError(f"AugmentConfig.zoom_out_sides must be at least 1, got {self.zoom_out_sides}")
        if not 0 <= self.fill <= 255:
            raise DataError(f"AugmentConfig.fill must be in 0..255, got {self.fill}")
        if self.copyblend_objects < 1:
            raise DataError(f"AugmentConfig.copyblend_objects must be at least 1, got {self.copyblend_objects}")

    def strong(self, epoch: int) -> bool:
        """Whether photometric distortion, zoom-out and crop happen in this epoch."""
        return self.strong_from <= epoch < self.strong_until

    def mosaic(self, epoch: int) -> bool:
        """Whether mosaics happen in this epoch."""
        return self.strong(epoch) and epoch < self.mosaic_until


def _vit(mosaic_until: int, strong_until: int) -> AugmentConfig:
    """S to X differ in their epochs only."""
    return AugmentConfig(
        mosaic_until=mosaic_until,
        strong_until=strong_until,
        mixup_prob=0.5,
        mixup_epochs=(4, mosaic_until),
        copyblend_prob=0.5,
        copyblend_epochs=(4, strong_until),
    )


_LITE = AugmentConfig(mosaic_until=250, strong_until=400, min_box_size=10.0)

AUGMENTS: Mapping[str, AugmentConfig] = MappingProxyType(
    {
        "atto": AugmentConfig(mosaic_until=250, strong_until=400, mosaic_prob=0.3, min_box_size=12.0),
        "femto": _LITE,
        "pico": AugmentConfig(mosaic_until=250, strong_until=400, min_box_size=8.0),
        "n": AugmentConfig(
            mosaic_until=78,
            strong_until=148,
            mixup_prob=0.5,
            mixup_epochs=(4, 78),
            copyblend_prob=0.4,
            copyblend_epochs=(4, 78),
        ),
        "s": _vit(64, 120),
        "m": _vit(49, 90),
        "l": _vit(34, 60),
        "x": _vit(29, 50),
    }
)
"""Published settings by DEIMv2 variant; epochs refer to the published schedule lengths."""


def get_augment_config(variant: str) -> AugmentConfig:
    """Published settings of a variant by name.

    Raises:
        DataError: unknown variant; the message lists the known ones.
    """
    if variant not in AUGMENTS:
        raise DataError(f"no augmentation for DEIMv2 variant {variant!r}; known variants: {', '.join(AUGMENTS)}")
    return AUGMENTS[variant]
