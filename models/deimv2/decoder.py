"""DEIMv2 decoder layers: self-attention, deformable attention, SwiGLU, refined edge distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from carpus.models.deimv2.config import DecoderConfig
from carpus.models.deimv2.deformable import DeformableAttention
from carpus.models.deimv2.distribution import decode_edges, distribution_table
from carpus.models.deimv2.layers import MLP, QueryGroups, RMSNorm, SelfAttention, SwiGLU

__all__ = ["DecoderHeads", "DecoderLayer", "DecoderOutputs", "Record", "TransformerDecoder"]

Record = Callable[[str, Tensor], None]
"""Receives named intermediate tensors; None in normal use."""

# sigmoid followed by an inverse sigmoid with eps 1e-5 is a clamp to this, without the rounding
MAX_LOGIT = 11.512915


class Gateway(nn.Module):
    """RMSNorm of two streams, each weighted by its own sigmoid gate computed from both."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * dim, 2 * dim)
        self.norm = RMSNorm(dim)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """(B, N, dim) twice -> (B, N, dim)."""
        gate_a, gate_b = torch.sigmoid(self.gate(torch.cat([a, b], -1))).chunk(2, -1)
        return self.norm(gate_a * a + gate_b * b)


class DecoderLayer(nn.Module):
    """Self-attention among queries, deformable attention to the maps, feed-forward."""

    def __init__(self, dim: int, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = SelfAttention(dim, config.num_heads)
        self.norm1 = RMSNorm(dim)
        self.cross_attn = DeformableAttention(dim, config.num_heads, config.num_points)
        if config.gateway:
            self.gateway = Gateway(dim)
        else:
            self.norm2 = RMSNorm(dim)
        self.has_gateway = config.gateway
        self.swish_ffn = SwiGLU(dim, config.ffn_dim)
        self.norm3 = RMSNorm(dim)

    def forward(self, x: Tensor, pos: Tensor, boxes: Tensor, maps: list[Tensor], groups: QueryGroups | None) -> Tensor:
        """One refinement.

        Args:
            x: (B, N, dim) queries.
            pos: (B, N, dim) their position embedding.
            boxes: (B, N, 4) reference boxes cxcywh in 0..1.
            maps: encoder maps (B, dim, H_l, W_l).
            groups: grouping of the denoising queries, which come first, or None.

        Returns:
            (B, N, dim).
        """
        x = self.norm1(x + self.self_attn(x, pos, groups))
        attended = self.cross_attn(x + pos, boxes, maps)
        x = self.gateway(x, attended) if self.has_gateway else self.norm2(x + attended)
        return self.norm3((x + self.swish_ffn(x)).clamp(-65504.0, 65504.0))


class LocationQuality(nn.Module):
    """Correction of the class logits from how peaked the edge distributions are."""

    top = 4

    def __init__(self) -> None:
        super().__init__()
        self.reg_conf = MLP(4 * (self.top + 1), 64, 1, zero_last=True)

    def forward(self, probabilities: Tensor) -> Tensor:
        """(B, N, 4, bins) edge probabilities -> (B, N, 1) added to every class logit."""
        best = probabilities.topk(self.top, -1).values
        return self.reg_conf(torch.cat([best, best.mean(-1, keepdim=True)], -1).flatten(2))


@dataclass(frozen=True)
class DecoderHeads:
    """The heads the layers share with the model, which owns them (and gives them their checkpoint names)."""

    query_pos: nn.Module
    pre_bbox: nn.Module
    scores: nn.ModuleList
    boxes: nn.ModuleList


@dataclass
class DecoderOutputs:
    """What the layers predicted; lists have an entry per layer that was asked for, the last layer last.

    Attributes:
        logits: (B, N, C) each.
        boxes: (B, N, 4) cxcywh each.
        corners: (B, N, 4 * bins) edge logits each.
        pre_boxes: (B, N, 4) base boxes r0, before the first refinement.
        pre_logits: (B, N, C) scores of the first layer without location quality; only with all layers.
    """

    logits: list[Tensor] = field(default_factory=list)
    boxes: list[Tensor] = field(default_factory=list)
    corners: list[Tensor] = field(default_factory=list)
    pre_boxes: Tensor | None = None
    pre_logits: Tensor | None = None


class TransformerDecoder(nn.Module):
    """The decoder layers with their location-quality heads."""

    def __init__(self, dim: int, config: DecoderConfig, up: nn.Parameter, reg_scale: nn.Parameter) -> None:
        super().__init__()
        self.up = up
        self.reg_scale = reg_scale
        self.scale = float(config.reg_scale)
        self.layers = nn.ModuleList(DecoderLayer(dim, config) for _ in range(config.num_layers))
        self.lqe_layers = nn.ModuleList(LocationQuality() for _ in range(config.num_layers))
        self.table: Tensor
        table = distribution_table(config.reg_max, config.reg_scale, config.reg_up)
        self.register_buffer("table", table, persistent=False)

    def forward(
        self,
        content: Tensor,
        init_ref_unact: Tensor,
        maps: list[Tensor],
        heads: DecoderHeads,
        *,
        groups: QueryGroups | None = None,
        all_layers: bool = False,
        record: Record | None = None,
    ) -> DecoderOutputs:
        """Refine the queries.

        Args:
            content: (B, N, dim) initial queries, detached.
            init_ref_unact: (B, N, 4) initial boxes before the sigmoid, detached.
            maps: encoder maps (B, dim, H_l, W_l), fine to coarse.
            heads: the model's heads.
            groups: grouping of the denoising queries, which come first, or None.
            all_layers: predict scores for every layer (training), not only the last.
            record: receives intermediate tensors.

        Returns:
            Predictions of all layers, or of the last one only.
        """
        outputs = DecoderOutputs()
        boxes = torch.sigmoid(init_ref_unact)
        pos = heads.query_pos(boxes).clamp(-10.0, 10.0)
        if record:
            record("decoder.query_pos_embed", pos)
        x, last = content, len(self.layers) - 1
        base = boxes
        corners: Tensor | None = None
        previous: Tensor | None = None
        for i, layer in enumerate(self.layers):
            x = layer(x, pos, boxes, maps, groups)
            if i == 0:
                unact = init_ref_unact.clamp(-MAX_LOGIT, MAX_LOGIT)
                outputs.pre_boxes = torch.sigmoid(heads.pre_bbox(x) + unact)
                base = outputs.pre_boxes.detach()
                if all_layers:
                    outputs.pre_logits = heads.scores[0](x)
            change = heads.boxes[i](x if previous is None else x + previous)
            corners = change if corners is None else change + corners
            probabilities = corners.unflatten(-1, (4, -1)).softmax(-1)
            refined = decode_edges(base, probabilities @ self.table, self.scale)
            if all_layers or i == last:
                scores = outputs.pre_logits if i == 0 and outputs.pre_logits is not None else heads.scores[i](x)
                outputs.logits.append(scores + self.lqe_layers[i](probabilities))
                outputs.boxes.append(refined)
                outputs.corners.append(corners)
            previous, boxes = x.detach(), refined.detach()
        return outputs
