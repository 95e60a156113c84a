"""The decoder of LW-DETR: self-attention, deformable attention and feed-forward around fixed reference boxes.

Source: LW-DETR (arXiv:2406.03459), sections 3.1 and 3.2; Deformable DETR (arXiv:2010.04159), equation 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.deimv2.deformable import weighted_samples
from carpus.models.deimv2.layers import MLP, SelfAttention
from carpus.models.lw_detr.config import DecoderConfig
from carpus.models.lw_detr.vit import Record

__all__ = ["Decoder", "DeformableAttention", "reparameterised", "sine_embedding"]


def reparameterised(delta: Tensor, reference: Tensor) -> Tensor:
    """Boxes (..., 4) cxcywh from deltas relative to reference boxes: centre moves by sizes, sizes grow by exp."""
    size = reference[..., 2:]
    return torch.cat([delta[..., :2] * size + reference[..., :2], delta[..., 2:].exp() * size], -1)


def sine_embedding(boxes: Tensor, dim: int) -> Tensor:
    """Sine embedding of boxes.

    Args:
        boxes: (..., 4) cxcywh in 0..1.
        dim: numbers a coordinate; sine and cosine interleaved.

    Returns:
        (..., 4 * dim), coordinates in the order y, x, w, h.
    """
    exponent = 2 * torch.div(torch.arange(dim, device=boxes.device), 2, rounding_mode="floor") / dim
    angles = (boxes * (2.0 * math.pi))[..., None] / 10000.0**exponent
    waves = torch.stack([angles[..., 0::2].sin(), angles[..., 1::2].cos()], -1).flatten(-2)
    x, y, w, h = waves.unbind(-2)
    return torch.cat([y, x, w, h], -1)


class DeformableAttention(nn.Module):
    """Multi-scale deformable attention with value and output projections.

    Point p of a level lies at ``box centre + offset / num_points * box size * 0.5``.

    Args:
        dim: width.
        num_heads: heads.
        num_levels: maps that are sampled.
        num_points: points per map and head.
    """

    def __init__(self, dim: int, num_heads: int, num_levels: int, num_points: int) -> None:
        super().__init__()
        self.num_heads, self.num_levels, self.num_points = num_heads, num_levels, num_points
        total = num_levels * num_points
        self.sampling_offsets = nn.Linear(dim, num_heads * total * 2)
        self.attention_weights = nn.Linear(dim, num_heads * total)
        self.value_proj = nn.Linear(dim, dim)
        self.output_proj = nn.Linear(dim, dim)
        self._reset()

    def _reset(self) -> None:
        """Points start on rays, one direction a head, the farther the higher their index; weights start equal."""
        angles = torch.arange(self.num_heads) * (2.0 * math.pi / self.num_heads)
        rays = torch.stack([angles.cos(), angles.sin()], -1)
        rays = rays / rays.abs().amax(-1, keepdim=True)
        steps = torch.arange(1, self.num_points + 1).repeat(self.num_levels)
        with torch.no_grad():
            self.sampling_offsets.bias.copy_((rays[:, None] * steps[:, None]).flatten())
        for parameter in (self.sampling_offsets.weight, self.attention_weights.weight, self.attention_weights.bias):
            nn.init.zeros_(parameter)
        for projection in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        boxes: Tensor,
        memory: Tensor,
        shapes: list[tuple[int, int]],
        padding: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: (B, N, dim).
            boxes: (B, N, L, 4) reference boxes cxcywh relative to each level's whole map; L may be 1 for all levels.
            memory: (B, S, dim) positions of all levels, row-major, level after level.
            shapes: (height, width) of each level.
            padding: (B, S) True at padded positions, whose values count as zero.

        Returns:
            (B, N, dim).
        """
        heads, points, total = self.num_heads, self.num_points, self.num_levels * self.num_points
        count, dim = query.shape[1], query.shape[2]
        value = self.value_proj(memory)
        if padding is not None:
            value = value.masked_fill(padding[..., None], 0.0)
        sizes = [height * width for height, width in shapes]
        maps = [
            part.transpose(1, 2).reshape(-1, dim // heads, height, width)
            for part, (height, width) in zip(value.split(sizes, 1), shapes, strict=True)
        ]
        offsets = self.sampling_offsets(query).unflatten(-1, (heads, total, 2)).transpose(1, 2)
        weights = self.attention_weights(query).unflatten(-1, (heads, total)).softmax(-1).transpose(1, 2)
        if boxes.shape[2] > 1:
            boxes = boxes.repeat_interleave(points, 2)
        boxes = boxes[:, None]
        # grid = 2 * location - 1, so the offset's 0.5 cancels against the 2
        grid = offsets * (boxes[..., 2:] * (1.0 / points)) + (2.0 * boxes[..., :2] - 1.0)
        out = weighted_samples(
            maps, grid.reshape(-1, count, total, 2), weights.reshape(-1, 1, count, total), (points,) * self.num_levels
        )
        return self.output_proj(out.reshape(-1, dim, count).transpose(1, 2))


class DecoderLayer(nn.Module):
    """Post-norm layer: self-attention inside each group, deformable attention, feed-forward."""

    def __init__(self, config: DecoderConfig, num_levels: int) -> None:
        super().__init__()
        dim = config.hidden_dim
        self.self_attn = SelfAttention(dim, config.self_heads)
        self.norm1 = nn.LayerNorm(dim)
        self.cross_attn = DeformableAttention(dim, config.cross_heads, num_levels, config.num_points)
        self.linear1 = nn.Linear(dim, config.ffn_dim)
        self.linear2 = nn.Linear(config.ffn_dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.norm3 = nn.LayerNorm(dim)
        for linear in (self.linear1, self.linear2):
            nn.init.xavier_uniform_(linear.weight)

    def forward(
        self,
        x: Tensor,
        pos: Tensor,
        boxes: Tensor,
        memory: Tensor,
        shapes: list[tuple[int, int]],
        padding: Tensor | None,
        groups: int,
    ) -> Tensor:
        """One layer over (B, N, dim) queries; N = groups * queries a group. See `DeformableAttention.forward`."""
        if groups == 1:
            attended = self.self_attn(x, pos)
        else:
            shape = (-1, x.shape[1] // groups, x.shape[2])
            attended = self.self_attn(x.reshape(shape), pos.reshape(shape)).reshape(x.shape)
        x = self.norm1(x + attended)
        x = self.norm2(x + self.cross_attn(x + pos, boxes, memory, shapes, padding))
        return self.norm3(x + self.linear2(F.relu(self.linear1(x))))


class Decoder(nn.Module):
    """The layers, the final norm they share and the embedding of the reference boxes."""

    def __init__(self, config: DecoderConfig, num_levels: int) -> None:
        super().__init__()
        dim = config.hidden_dim
        self.dim = dim
        self.layers = nn.ModuleList(DecoderLayer(config, num_levels) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(dim)
        self.ref_point_head = MLP(2 * dim, dim, dim, activation=F.relu)

    def forward(
        self,
        content: Tensor,
        boxes: Tensor,
        memory: Tensor,
        shapes: list[tuple[int, int]],
        *,
        ratios: Tensor | None = None,
        padding: Tensor | None = None,
        groups: int = 1,
        record: Record | None = None,
    ) -> list[Tensor]:
        """Decode.

        Args:
            content: (B, N, dim) queries.
            boxes: (B, N, 4) reference boxes cxcywh relative to each image's valid part; the same for every layer.
            memory: (B, S, dim) positions of all levels.
            shapes: (height, width) of each level.
            ratios: (B, L, 2) valid part (w, h) of each level, or None when nothing is padded.
            padding: (B, S) True at padded positions, or None.
            groups: query groups that do not see each other.
            record: receives named intermediate tensors.

        Returns:
            Every layer's output after the final norm, (B, N, dim) each.
        """
        sampled = boxes[:, :, None]
        if ratios is not None:
            sampled = sampled * torch.cat([ratios, ratios], -1)[:, None]
        embedding = sine_embedding(sampled[:, :, 0], self.dim // 2)
        pos = self.ref_point_head(embedding)
        if record:
            record("decoder.query_sine_embed", embedding)
            record("decoder.query_pos", pos)
        outputs = []
        x = content
        for layer in self.layers:
            x = layer(x, pos, sampled, memory, shapes, padding, groups)
            outputs.append(self.norm(x))
        return outputs
