"""Decoupled detection head with box distributions, and its decoding to pixels.

Box distributions after "Generalized Focal Loss", arXiv:2006.04388, section 3: each side of a box is a softmax over bins
0..reg_max-1 in units of the level's stride, and its distance from the anchor point is the expectation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from carpus.models.yolo.blocks import Conv
from carpus.runtime.errors import DataError

__all__ = ["STRIDES", "Detect", "DistributionExpectation", "anchor_points", "flatten_levels"]

_WIDEST_CLASS_BRANCH = 100  # channels, in published configurations
STRIDES = (8, 16, 32)
"""Strides [px] of the head's levels, fine to coarse."""


def anchor_points(maps: Sequence[Tensor], strides: Sequence[int] = STRIDES) -> tuple[Tensor, Tensor]:
    """Cell centres of all levels, row by row, levels one after the other.

    Args:
        maps: one (B, C, H_l, W_l) map a level.
        strides: stride [px] of each level.

    Returns:
        (A, 2) x, y in cells of the own level, and (A, 1) stride [px], both of the maps' dtype; A = sum of H_l * W_l.
    """
    points, sizes = [], []
    for level, stride in zip(maps, strides, strict=True):
        height, width = level.shape[-2:]
        x = torch.arange(width, dtype=level.dtype, device=level.device) + 0.5
        y = torch.arange(height, dtype=level.dtype, device=level.device) + 0.5
        grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
        centres = torch.stack([grid_x, grid_y], -1).reshape(-1, 2)
        points.append(centres)
        sizes.append(torch.full_like(centres[:, :1], float(stride)))
    return torch.cat(points), torch.cat(sizes)


def flatten_levels(raw: Sequence[Tensor], num_box_channels: int) -> tuple[Tensor, Tensor]:
    """Raw level maps as one list of positions.

    Args:
        raw: (B, num_box_channels + C, H_l, W_l) a level.
        num_box_channels: channels that belong to the box, 4 * reg_max.

    Returns:
        (B, num_box_channels, A) box logits and (B, C, A) class logits.
    """
    flat = torch.cat([level.flatten(2) for level in raw], 2)
    return flat[:, :num_box_channels], flat[:, num_box_channels:]


class DistributionExpectation(nn.Module):
    """Expected distance of each box side, in cells: a fixed 1x1 convolution with weights 0..reg_max-1.

    Args:
        reg_max: bins a side.
    """

    def __init__(self, reg_max: int) -> None:
        super().__init__()
        self.reg_max = reg_max
        self.conv = nn.Conv2d(reg_max, 1, 1, bias=False)
        self.conv.weight.requires_grad_(False)
        with torch.no_grad():
            self.conv.weight.copy_(torch.arange(reg_max, dtype=torch.float32).reshape(1, -1, 1, 1))

    def forward(self, logits: Tensor) -> Tensor:
        """(B, 4 * reg_max, A) side-major logits -> (B, 4, A) left, top, right, bottom [cells]."""
        bins = logits.unflatten(1, (4, self.reg_max)).transpose(1, 2)
        return self.conv(bins.softmax(1)).squeeze(1)


class Detect(nn.Module):
    """Box and class branches of every level.

    Args:
        in_channels: channels of the levels, fine to coarse.
        num_classes: object classes C.
        depthwise_class_branch: class branch of depthwise 3x3 + 1x1 pairs instead of 3x3 convolutions.
        reg_max: bins a box side; 1 predicts the distances directly, without a distribution.
        strides: stride [px] of each level.
    """

    def __init__(
        self,
        in_channels: Sequence[int],
        num_classes: int,
        *,
        depthwise_class_branch: bool,
        reg_max: int = 16,
        strides: Sequence[int] = STRIDES,
    ) -> None:
        super().__init__()
        if num_classes < 1:
            raise DataError(f"num_classes of a detection head must be at least 1, got {num_classes}")
        if len(in_channels) != len(strides):
            raise DataError(f"a detection head needs one width per stride, got {len(in_channels)} for {len(strides)}")
        self.num_classes = num_classes
        self.reg_max = reg_max
        self.strides = tuple(strides)
        self.in_channels = tuple(in_channels)
        self.depthwise_class_branch = depthwise_class_branch
        box_width = max(16, in_channels[0] // 4, 4 * reg_max)
        self.cv2 = nn.ModuleList(_branch(c, box_width, 4 * reg_max) for c in in_channels)
        self.cv3 = self._class_branches(max(in_channels[0], min(num_classes, _WIDEST_CLASS_BRANCH)))
        if reg_max > 1:
            self.dfl = DistributionExpectation(reg_max)
        self.reset_biases()

    def reset_biases(self) -> None:
        """Box logits start at 1; class probabilities start as if 5 objects lay in a 640 px image."""
        for box in self.cv2:
            nn.init.constant_(box[-1].bias, 1.0)  # type: ignore[index]
        self._reset_class_biases()

    def _reset_class_biases(self) -> None:
        for classes, stride in zip(self.cv3, self.strides, strict=True):
            prior = math.log(5 / self.num_classes / (640 / stride) ** 2)
            nn.init.constant_(classes[-1].bias, prior)  # type: ignore[index]

    @property
    def class_width(self) -> int:
        """Inner channels of the class branches."""
        return int(self.cv3[0][-1].in_channels)  # type: ignore[index]

    def set_class_width(self, width: int) -> None:
        """Make the class branches anew with another width, as a head for another number of classes has it.

        Their width follows from the number of classes, at most from 100 of them, and from the finest level. A head
        that goes on from weights for more or fewer classes has to keep the width of those.

        Raises:
            DataError: a width that no number of classes gives.
        """
        least = self.in_channels[0]
        if width != least and not least < width <= _WIDEST_CLASS_BRANCH:
            raise DataError(f"the class branch has {least} to {_WIDEST_CLASS_BRANCH} channels here, got {width}")
        self.cv3 = self._class_branches(width).to(self.cv3[0][-1].weight.device)  # type: ignore[index]
        self._reset_class_biases()

    def _class_branches(self, width: int) -> nn.ModuleList:
        branch = _depthwise_branch if self.depthwise_class_branch else _branch
        return nn.ModuleList(branch(c, width, self.num_classes) for c in self.in_channels)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Raw level maps.

        Args:
            maps: (B, C_l, H_l, W_l) a level.

        Returns:
            (B, 4 * reg_max + C, H_l, W_l) a level: box logits (side-major: channel = side * reg_max + bin; sides left,
            top, right, bottom), then class logits.
        """
        return [
            torch.cat([box(level), classes(level)], 1)
            for level, box, classes in zip(maps, self.cv2, self.cv3, strict=True)
        ]

    def distances(self, box_logits: Tensor) -> Tensor:
        """(B, 4 * reg_max, A) logits -> (B, 4, A) left, top, right, bottom [cells]."""
        return self.dfl(box_logits) if self.reg_max > 1 else box_logits

    def decode(self, raw: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Boxes and class logits of all positions.

        Args:
            raw: the level maps that ``forward`` returned.

        Returns:
            (B, A, 4) xyxy [px of the network input] and (B, A, C) class logits; A positions, fine level first. There
            is no objectness: scores are the sigmoid of the logits.
        """
        box_logits, class_logits = flatten_levels(raw, 4 * self.reg_max)
        points, stride = anchor_points(raw, self.strides)
        near, far = self.distances(box_logits).transpose(1, 2).chunk(2, -1)
        boxes = torch.cat([points - near, points + far], -1) * stride
        return boxes, class_logits.transpose(1, 2)


def _branch(in_channels: int, width: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(Conv(in_channels, width, 3), Conv(width, width, 3), nn.Conv2d(width, out_channels, 1))


def _depthwise_branch(in_channels: int, width: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(Conv(in_channels, in_channels, 3, groups=in_channels), Conv(in_channels, width)),
        nn.Sequential(Conv(width, width, 3, groups=width), Conv(width, width)),
        nn.Conv2d(width, out_channels, 1),
    )
