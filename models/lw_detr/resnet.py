"""ResNet encoders for LW-DETR, with the parameter names of torchvision's, so that its ImageNet weights load.

Sources: "Deep Residual Learning for Image Recognition" (arXiv:1512.03385), with the stride in the 3x3 convolution of a
bottleneck as torchvision has it ("v1.5"); the maps of strides 8, 16 and 32 are brought to stride 16, the stride of the
transformers' maps, as LW-DETR's published code does. That code has the "vd" form of ResNet (three convolutions in the
stem, pooling in the shortcuts), for which other weights exist.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.deimv2.layers import fused_conv
from carpus.models.lw_detr.config import ResNetConfig
from carpus.models.lw_detr.vit import Record
from carpus.models.published.fit import Fit, compare, listing
from carpus.models.published.rules import COUNTERS, Known, Rules
from carpus.runtime.errors import DataError

__all__ = ["RULES", "ResNet", "is_resnet_only", "load_resnet"]

WIDTHS = (64, 128, 256, 512)
"""Inner channels of the four stages."""

RULES = Rules(
    title="the ResNet of LW-DETR",
    known=(COUNTERS, Known(r"fc\.(weight|bias)", "unused", "classifies ImageNet; a detector has heads of its own")),
    class_head=r"(?!)",
    class_rows=r"(?!)",
)


class FrozenNorm(nn.BatchNorm2d):
    """BatchNorm that neither learns nor counts: it scales by its running statistics in training too."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> FrozenNorm:
        """Stays in eval mode."""
        return super().train(False)


class _Fusing(nn.Module):
    """Convolutions ``conv1``, ``conv2``, ... with their norms ``bn1``, ``bn2``, ... and perhaps those of a shortcut."""

    downsample: nn.Sequential | None

    def fuse(self) -> None:
        """Fold norms into their convolutions, in place. Does nothing the second time."""
        for name, conv in list(self.named_children()):
            norm = getattr(self, name.replace("conv", "bn"))
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(self, name, fused_conv(conv, norm))
                setattr(self, name.replace("conv", "bn"), nn.Identity())
        shortcut = getattr(self, "downsample", None)
        if isinstance(shortcut, nn.Sequential) and isinstance(shortcut[1], nn.BatchNorm2d):
            conv, norm = shortcut
            self.downsample = nn.Sequential(fused_conv(conv, norm), nn.Identity())  # type: ignore[arg-type]


class BasicBlock(_Fusing):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, norm: type[nn.BatchNorm2d]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = norm(width)
        self.downsample = _shortcut(in_channels, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, width, H/stride, W/stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(shortcut + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Bottleneck(_Fusing):
    """1x1, 3x3 and 1x1 convolution and a shortcut; four times as many channels leave as are inside."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, norm: type[nn.BatchNorm2d]) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = norm(out_channels)
        self.downsample = _shortcut(in_channels, out_channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, 4 * width, H/stride, W/stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(shortcut + self.bn3(self.conv3(x)))


def _shortcut(in_channels: int, out_channels: int, stride: int, norm: type[nn.BatchNorm2d]) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), norm(out_channels))


class ResNet(_Fusing):
    """Stem of stride 4 and four stages; the last three give maps.

    Args:
        config: sizes.
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        norm: type[nn.BatchNorm2d] = FrozenNorm if config.frozen_norms else nn.BatchNorm2d
        block = Bottleneck if config.bottleneck else BasicBlock
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 7, 2, 3, bias=False)
        self.bn1 = norm(WIDTHS[0])
        channels = WIDTHS[0]
        for stage, (width, repeats) in enumerate(zip(WIDTHS, config.repeats, strict=True)):
            blocks = []
            for i in range(repeats):
                blocks.append(block(channels, width, 2 if i == 0 and stage > 0 else 1, norm))
                channels = width * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.out_channels = tuple(width * block.expansion for width in WIDTHS[1:])
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if config.frozen_stem:
            self.conv1.requires_grad_(False)
            self.bn1.requires_grad_(False)

    def forward(self, images: Tensor, record: Record | None = None) -> list[Tensor]:
        """(B, 3, H, W), H and W multiples of 32 -> three maps, each (B, C_j, H/16, W/16)."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, 2, 1)
        maps = []
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
            if record:
                record(f"resnet.layer{stage}", x)
            maps.append(x)
        _, fine, middle, coarse = maps
        return [F.max_pool2d(fine, 3, 2, 1), middle, F.interpolate(coarse, scale_factor=2.0, mode="nearest")]


def is_resnet_only(state: Mapping[str, Tensor]) -> bool:
    """Whether a state holds a ResNet with torchvision's names and no detector."""
    return "conv1.weight" in state and "layer1.0.conv1.weight" in state


def load_resnet(encoder: nn.Module, state: Mapping[str, Tensor], source: str) -> Fit:
    """Fill a ResNet encoder from ImageNet weights with torchvision's names.

    Args:
        encoder: the encoder to fill; untouched when an error is raised.
        state: weights by name; those of the classifier are not used.
        source: named in errors.

    Raises:
        DataError: an encoder that is no ResNet, or entries missing, unknown, of another shape or not finite.
    """
    if not isinstance(encoder, ResNet):
        raise DataError(f"{source} holds a ResNet, and this LW-DETR has none; choose resnet18 or resnet50")
    own = encoder.state_dict(keep_vars=True)
    fit = compare(own, state, RULES)
    problems = fit.problems()
    if problems:
        raise DataError(
            f"{source} does not fit {RULES.title}: {listing(problems)}. Variant resnet18 takes torchvision's resnet18, "
            "resnet50 its resnet50."
        )
    with torch.no_grad():
        for name in fit.copied:
            own[name].copy_(state[name])
    return fit
