"""Spatial Tuning Adapter: one-scale transformer tokens and a light convolution net make maps at strides 8, 16, 32.

"Real-Time Object Detection Meets DINOv3", arXiv:2509.20787, section 3.
"""

from __future__ import annotations

from torch import Tensor, cat, nn
from torch.nn import functional as F

from carpus.models.deimv2.config import ViTConfig
from carpus.models.deimv2.layers import fused_conv
from carpus.models.deimv2.vit import VisionTransformer

__all__ = ["DetailNet", "NestedViT", "ViTBackbone"]


def _conv3x3(in_channels: int, out_channels: int) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """Halves the resolution."""
    return nn.Conv2d(in_channels, out_channels, 3, 2, 1, bias=False), nn.BatchNorm2d(out_channels)


class DetailNet(nn.Module):
    """Fine detail at strides 8, 16 and 32 from a few convolutions.

    Args:
        channels: channels of the stem; the maps have 2, 4 and 4 times as many.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_conv3x3(3, channels), nn.GELU(), nn.MaxPool2d(3, 2, 1))
        self.conv2 = nn.Sequential(*_conv3x3(channels, 2 * channels))
        self.conv3 = nn.Sequential(nn.GELU(), *_conv3x3(2 * channels, 4 * channels))
        self.conv4 = nn.Sequential(nn.GELU(), *_conv3x3(4 * channels, 4 * channels))

    def fuse(self) -> None:
        """Fold every norm into the convolution ahead of it, in place. Does nothing the second time."""
        for layers in (self.stem, self.conv2, self.conv3, self.conv4):
            for i in range(len(layers) - 1):
                conv, norm = layers[i], layers[i + 1]
                if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                    layers[i], layers[i + 1] = fused_conv(conv, norm), nn.Identity()

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) -> [(B, 2c, H/8, W/8), (B, 4c, H/16, W/16), (B, 4c, H/32, W/32)]."""
        fine = self.conv2(self.stem(images))
        middle = self.conv3(fine)
        return [fine, middle, self.conv4(middle)]


class NestedViT(nn.Module):
    """A transformer one level down; exists for the checkpoint names of the distilled backbones."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self._model = model

    def forward(self, images: Tensor) -> list[Tensor]:
        """As `VisionTransformer`."""
        return self._model(images)


class ViTBackbone(nn.Module):
    """Vision transformer with Spatial Tuning Adapter.

    Args:
        config: sizes.
        input_size: (height, width) [px] whose rotary angles are stored.
    """

    def __init__(self, config: ViTConfig, input_size: tuple[int, int]) -> None:
        super().__init__()
        vit = VisionTransformer(config, input_size)
        self.dinov3 = NestedViT(vit) if config.nested else vit
        self.sta = DetailNet(config.detail_channels)
        self.convs = nn.ModuleList(
            nn.Conv2d(config.dim + factor * config.detail_channels, config.map_channels, 1, bias=False)
            for factor in (2, 4, 4)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(config.map_channels) for _ in self.convs)

    def fuse(self) -> None:
        """Fold the output norms into their convolutions, in place. Does nothing the second time."""
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                self.convs[i], self.norms[i] = fused_conv(conv, norm), nn.Identity()

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) -> maps (B, map_channels, H/s, W/s) for s in 8, 16, 32."""
        first, second, third = self.dinov3(images)
        semantic = [
            F.interpolate(first, scale_factor=2.0, mode="bilinear", align_corners=False),
            second,
            F.interpolate(third, scale_factor=0.5, mode="bilinear", align_corners=False),
        ]
        return [
            norm(conv(cat([coarse, fine], 1)))
            for coarse, fine, conv, norm in zip(semantic, self.sta(images), self.convs, self.norms, strict=True)
        ]
