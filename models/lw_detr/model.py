"""LW-DETR: encoder, projector, two-stage query selection, decoder and heads.

Source: LW-DETR (arXiv:2406.03459). Module names are those of the published checkpoints.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.deimv2.layers import MLP
from carpus.models.lw_detr.config import LWDETRConfig, ViTConfig
from carpus.models.lw_detr.decoder import Decoder, reparameterised
from carpus.models.lw_detr.projector import Projector
from carpus.models.lw_detr.resnet import ResNet
from carpus.models.lw_detr.vit import Record, ViT
from carpus.runtime.errors import DataError

__all__ = ["LWDETR", "Padding"]

PRIOR = 0.01
"""Probability every class starts with."""
EDGE = 0.01
"""Proposals with a coordinate nearer to 0 or 1 than this are not selected on their merits."""
BASE_SIZE = 0.05
"""Side of the proposals of the first level, relative to the image; each further level doubles it."""


class Backbone(nn.Module):
    """Encoder and projector."""

    def __init__(self, config: LWDETRConfig) -> None:
        super().__init__()
        encoder = config.encoder
        self.encoder = ViT(encoder) if isinstance(encoder, ViTConfig) else ResNet(encoder)
        self.projector = Projector(self.encoder.out_channels, config.levels, config.decoder.hidden_dim)

    def forward(self, images: Tensor, record: Record | None = None) -> list[Tensor]:
        """(B, 3, H, W) -> the decoder's levels, (B, hidden_dim, H_l, W_l) each."""
        maps = self.encoder(images, record)
        if record:
            for i, level in enumerate(maps):
                record(f"backbone.out.{i}", level)
        return self.projector(maps, record)


class Padding:
    """Where the positions of the levels lie outside the images of a padded batch.

    Args:
        mask: (B, H, W) bool, True on padding, which lies at the right and the bottom.
        shapes: (height, width) of each level.

    Attributes:
        positions: (B, S) bool over the positions of all levels.
        sizes: (B, L, 2) valid width and height of each level in positions.
        ratios: (B, L, 2) the same relative to the level.
    """

    def __init__(self, mask: Tensor, shapes: list[tuple[int, int]]) -> None:
        positions, sizes, ratios = [], [], []
        for height, width in shapes:
            level = F.interpolate(mask[:, None].float(), (height, width), mode="nearest")[:, 0] > 0.5
            positions.append(level.flatten(1))
            valid = torch.stack([(~level[:, 0]).sum(1), (~level[:, :, 0]).sum(1)], -1).float()
            sizes.append(valid)
            ratios.append(valid / valid.new_tensor([width, height]))
        self.positions = torch.cat(positions, 1)
        self.sizes = torch.stack(sizes, 1)
        self.ratios = torch.stack(ratios, 1)


class Transformer(nn.Module):
    """First stage (a head over all positions per query group) and the decoder."""

    def __init__(self, config: LWDETRConfig) -> None:
        super().__init__()
        dim, groups = config.decoder.hidden_dim, config.decoder.num_groups
        self.num_queries = config.decoder.num_queries
        self.decoder = Decoder(config.decoder, len(config.levels))
        self.enc_output = nn.ModuleList(nn.Linear(dim, dim) for _ in range(groups))
        self.enc_output_norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(groups))
        self.enc_out_bbox_embed = nn.ModuleList(
            MLP(dim, dim, dim, 4, zero_last=True, activation=F.relu) for _ in range(groups)
        )
        self.enc_out_class_embed = nn.ModuleList(_class_head(dim, config.num_classes) for _ in range(groups))

    def proposals(self, shapes: list[tuple[int, int]], like: Tensor, padding: Padding | None) -> tuple[Tensor, Tensor]:
        """A box for every position, centred on it.

        Args:
            shapes: (height, width) of each level.
            like: gives type and device.
            padding: padded positions; coordinates are relative to the valid part.

        Returns:
            (1 or B, S, 4) cxcywh, zeros where invalid, and (1 or B, S, 1) whether a box is valid.
        """
        boxes = []
        for level, (height, width) in enumerate(shapes):
            x = torch.arange(width, device=like.device, dtype=like.dtype) + 0.5
            y = torch.arange(height, device=like.device, dtype=like.dtype) + 0.5
            centre = torch.stack([x.expand(height, width), y[:, None].expand(height, width)], -1).reshape(1, -1, 2)
            size = like.new_tensor([[[width, height]]]) if padding is None else padding.sizes[:, level, None]
            centre = centre / size
            boxes.append(torch.cat([centre, torch.full_like(centre, BASE_SIZE * 2.0**level)], -1))
        proposals = torch.cat(boxes, 1)
        valid = ((proposals > EDGE) & (proposals < 1.0 - EDGE)).all(-1, keepdim=True)
        if padding is not None:
            valid = valid & ~padding.positions[..., None]
        return torch.where(valid, proposals, 0.0), valid

    def select(
        self, memory: Tensor, proposals: Tensor, group: int, record: Record | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best positions by one group's head.

        Args:
            memory: (B, S, dim), zeros at invalid positions.
            proposals: (1 or B, S, 4).
            group: query group.
            record: receives named intermediate tensors.

        Returns:
            Boxes (B, Q, 4) cxcywh and logits (B, Q, C) of the selected positions by rank, and their indices (B, Q).
        """
        normed = self.enc_output_norm[group](self.enc_output[group](memory))
        logits = self.enc_out_class_embed[group](normed)
        scores = logits.amax(-1)
        best, index = scores.topk(self.num_queries, 1)
        rows = index[..., None]
        taken = normed.gather(1, rows.expand(-1, -1, normed.shape[2]))
        # An expanded batch would put its size into the exported graph
        base = proposals[0][index] if proposals.shape[0] == 1 else proposals.gather(1, rows.expand(-1, -1, 4))
        boxes = reparameterised(self.enc_out_bbox_embed[group](taken), base)
        if record:
            record("enc.masked_memory", memory)
            record("enc.output_memory", normed)
            record("enc.logits_all", logits)
            record("enc.scores_all", scores)
            record("enc.topk_score", best)
            record("enc.bbox_delta_all", self.enc_out_bbox_embed[group](normed))
        return boxes, logits.gather(1, rows.expand(-1, -1, logits.shape[2])), index

    def everywhere(self, memory: Tensor, proposals: Tensor) -> dict[str, Tensor]:
        """What the first group's head says of all S positions.

        Args:
            memory: (B, S, dim), zeros at invalid positions.
            proposals: (1, S, 4).

        Returns:
            {"pred_logits": (B, S, C), "pred_boxes": (B, S, 4) cxcywh, "points": (S, 2) centres in 0..1}.
        """
        normed = self.enc_output_norm[0](self.enc_output[0](memory))
        boxes = reparameterised(self.enc_out_bbox_embed[0](normed), proposals)
        return {"pred_logits": self.enc_out_class_embed[0](normed), "pred_boxes": boxes, "points": proposals[0, :, :2]}


class LWDETR(nn.Module):
    """LW-DETR detector.

    Args:
        config: sizes; see ``carpus.models.lw_detr.config.VARIANTS``.

    Attributes:
        active_groups: query groups that take part in training, all of them unless set to fewer.
        dense_supervision: also give the predictions of all positions in training (`carpus.models.losses.dense`).
    """

    def __init__(self, config: LWDETRConfig) -> None:
        super().__init__()
        self.config = config
        self.active_groups = config.decoder.num_groups
        self.dense_supervision = False
        decoder = config.decoder
        dim, rows = decoder.hidden_dim, decoder.num_queries * decoder.num_groups
        self.transformer = Transformer(config)
        self.class_embed = _class_head(dim, config.num_classes)
        self.bbox_embed = MLP(dim, dim, dim, 4, zero_last=True, activation=F.relu)
        self.refpoint_embed = nn.Embedding(rows, 4)
        self.query_feat = nn.Embedding(rows, dim)
        self.backbone = nn.ModuleList([Backbone(config)])
        nn.init.zeros_(self.refpoint_embed.weight)

    def forward(
        self, images: Tensor, targets: object = None, mask: Tensor | None = None, *, record: Record | None = None
    ) -> dict:
        """Detect.

        Args:
            images: (B, 3, H, W) float, normalised by ImageNet's mean and deviation; H and W multiples of 64 px.
            targets: not used; detectors that denoise take them.
            mask: (B, H, W) bool, True where an image is padded at its right and bottom; None for no padding.
            record: receives named intermediate tensors (reference-data checks).

        Returns:
            In eval mode {"pred_logits": (B, Q, C), "pred_boxes": (B, Q, 4) cxcywh relative to the valid part of each
            image}. In training mode one such dict per output set: "main", "aux_i" (earlier layers) and "enc" (first
            stage), each of groups * Q queries, group after group; with ``dense_supervision`` also "dense": the
            predictions of all S positions by the first group's head, and their centres "points" (S, 2).

        Raises:
            DataError: an input of the wrong rank or size, or a mask that does not fit it.
        """
        self._check(images, mask)
        levels = self.backbone[0](images, record)
        shapes = [(level.shape[2], level.shape[3]) for level in levels]
        memory = torch.cat([level.flatten(2).transpose(1, 2) for level in levels], 1)
        queries, groups = self.config.decoder.num_queries, self.active_groups if self.training else 1
        if memory.shape[1] < queries:
            raise DataError(
                f"LW-DETR {self.config.variant} selects {queries} queries, an input of {images.shape[2]} x "
                f"{images.shape[3]} px has only {memory.shape[1]} positions; give larger images or fewer queries"
            )
        padding = None if mask is None else Padding(mask, shapes)
        proposals, valid = self.transformer.proposals(shapes, memory, padding)
        usable = torch.where(valid, memory, 0.0)
        selected = [self.transformer.select(usable, proposals, g, record) for g in range(groups)]
        enc_boxes = torch.cat([boxes for boxes, _, _ in selected], 1)
        enc_logits = torch.cat([logits for _, logits, _ in selected], 1)

        rows = groups * queries
        content = self.query_feat.weight[None, :rows]  # one row for all images, until positions are added
        if self.training:
            content = content.expand(images.shape[0], -1, -1)
        reference = reparameterised(self.refpoint_embed.weight[:rows], enc_boxes.detach())
        if record:
            record("enc.topk_index", torch.stack([index for _, _, index in selected]))
            record("enc.pred_boxes", enc_boxes)
            record("enc.pred_logits", enc_logits)
            record("decoder.init_refpoints", reference)
            record("decoder.tgt", content)
            if padding is not None:
                record("valid_ratios", padding.ratios)
        hidden = self.transformer.decoder(
            content,
            reference,
            memory,
            shapes,
            ratios=None if padding is None else padding.ratios,
            padding=None if padding is None else padding.positions,
            groups=groups,
            record=record,
        )
        if not self.training and record is None:
            return self._predict(hidden[-1], reference)
        layers = [self._predict(h, reference) for h in hidden]
        if not self.training:
            if record:
                for i, layer in enumerate(layers[:-1]):
                    record(f"aux.{i}.pred_logits", layer["pred_logits"])
                    record(f"aux.{i}.pred_boxes", layer["pred_boxes"])
            return layers[-1]
        sets = {f"aux_{i}": layer for i, layer in enumerate(layers[:-1])}
        sets["enc"] = {"pred_logits": enc_logits, "pred_boxes": enc_boxes}
        if self.dense_supervision and padding is None:
            sets["dense"] = self.transformer.everywhere(usable, proposals)
        return {"main": layers[-1], **sets}

    def _predict(self, hidden: Tensor, reference: Tensor) -> dict[str, Tensor]:
        boxes = reparameterised(self.bbox_embed(hidden), reference)
        return {"pred_logits": self.class_embed(hidden), "pred_boxes": boxes}

    def _check(self, images: Tensor, mask: Tensor | None) -> None:
        stride = self.config.encoder.stride
        if images.dim() != 4 or images.shape[1] != 3 or images.shape[2] % stride or images.shape[3] % stride:
            raise DataError(
                f"LW-DETR input must be (B, 3, H, W) with H and W multiples of {stride} px, got {tuple(images.shape)}"
            )
        if mask is not None and (mask.dtype != torch.bool or mask.shape != images[:, 0].shape):
            raise DataError(
                f"LW-DETR mask must be bool {tuple(images[:, 0].shape)}, got {mask.dtype} {tuple(mask.shape)}"
            )


def _class_head(dim: int, num_classes: int) -> nn.Linear:
    """Linear class head whose classes all start with probability ``PRIOR``."""
    head = nn.Linear(dim, num_classes)
    nn.init.constant_(head.bias, -math.log((1.0 - PRIOR) / PRIOR))
    return head
