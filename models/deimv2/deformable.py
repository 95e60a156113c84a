"""Multi-scale deformable attention without value or output projection (DEIMv2's cross-attention)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["DeformableAttention", "weighted_samples"]


def weighted_samples(maps: list[Tensor], grid: Tensor, weights: Tensor, num_points: tuple[int, ...]) -> Tensor:
    """Bilinear samples of several maps, weighted and summed.

    Args:
        maps: per level (G, C, H_l, W_l), G = batch times heads.
        grid: (G, N, P, 2) sampling points in -1..1 (x, y), points of all levels one after the other; zero outside.
        weights: (G, 1, N, P).
        num_points: points per level; their sum is P.

    Returns:
        (G, C, N).
    """
    samples = [
        F.grid_sample(level, points, mode="bilinear", padding_mode="zeros", align_corners=False)
        for level, points in zip(maps, grid.split(num_points, 2), strict=True)
    ]
    return (torch.cat(samples, -1) * weights).sum(-1)


class DeformableAttention(nn.Module):
    """Each query samples a few points around its box on every level.

    The point p of level l lies at ``box centre + offset_p / n_l * box size * 0.5``; values are the encoder's maps
    themselves, split over the heads.

    Args:
        dim: width; heads get dim / num_heads channels each.
        num_heads: attention heads.
        num_points: points per level, fine to coarse.
    """

    offset_scale = 0.5

    def __init__(self, dim: int, num_heads: int, num_points: tuple[int, ...]) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_points = num_points
        total = sum(num_points)
        self.num_points_scale: Tensor
        self.register_buffer("num_points_scale", torch.tensor([1.0 / n for n in num_points for _ in range(n)]))
        self.sampling_offsets = nn.Linear(dim, num_heads * total * 2)
        self.attention_weights = nn.Linear(dim, num_heads * total)
        self.points_folded = False
        self._reset()

    def fuse(self) -> None:
        """Fold the per-level scale of the offsets into their projection, in place. Does nothing the second time."""
        if not self.points_folded:
            scale = self.num_points_scale.repeat(self.num_heads).repeat_interleave(2) * (2.0 * self.offset_scale)
            with torch.no_grad():
                self.sampling_offsets.weight.mul_(scale[:, None])
                self.sampling_offsets.bias.mul_(scale)
            self.points_folded = True

    def _reset(self) -> None:
        """Points start on rays, one direction a head, the farther the higher their index; weights start equal."""
        angles = torch.arange(self.num_heads) * (2.0 * math.pi / self.num_heads)
        rays = torch.stack([angles.cos(), angles.sin()], -1)
        rays = rays / rays.abs().amax(-1, keepdim=True)
        steps = torch.cat([torch.arange(1, n + 1) for n in self.num_points])
        with torch.no_grad():
            self.sampling_offsets.bias.copy_((rays[:, None] * steps[:, None]).flatten())
        for parameter in (self.sampling_offsets.weight, self.attention_weights.weight, self.attention_weights.bias):
            nn.init.zeros_(parameter)

    def forward(self, query: Tensor, boxes: Tensor, maps: list[Tensor]) -> Tensor:
        """Attend.

        Args:
            query: (B, N, dim).
            boxes: (B, N, 4) reference boxes cxcywh in 0..1.
            maps: per level (B, dim, H_l, W_l), contiguous.

        Returns:
            (B, N, dim).
        """
        heads, total = self.num_heads, sum(self.num_points)
        count, dim = query.shape[1], query.shape[2]
        offsets = self.sampling_offsets(query).unflatten(-1, (heads, total, 2)).transpose(1, 2)
        weights = self.attention_weights(query).unflatten(-1, (heads, total)).softmax(-1).transpose(1, 2)
        # grid = 2 * location - 1, so the offset's 0.5 cancels against the 2
        reach = boxes[:, None, :, None, 2:]
        if not self.points_folded:
            reach = reach * (self.num_points_scale[:, None] * (2.0 * self.offset_scale))
        grid = offsets * reach + (2.0 * boxes[:, None, :, None, :2] - 1.0)
        split = [level.reshape(-1, dim // heads, level.shape[2], level.shape[3]) for level in maps]
        out = weighted_samples(
            split, grid.reshape(-1, count, total, 2), weights.reshape(-1, 1, count, total), self.num_points
        )
        return out.reshape(-1, dim, count).transpose(1, 2)
