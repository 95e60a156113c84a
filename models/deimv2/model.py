"""The DEIMv2 detector: backbone, encoder, query selection, decoder.

"Real-Time Object Detection Meets DINOv3", arXiv:2509.20787; distribution refinement after D-FINE, arXiv:2410.13842.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from carpus.models.deimv2.config import DEIMv2Config, ViTConfig
from carpus.models.deimv2.decoder import DecoderHeads, DecoderOutputs, Record, TransformerDecoder
from carpus.models.deimv2.encoder import build_encoder
from carpus.models.deimv2.hgnetv2 import HGNetv2
from carpus.models.deimv2.layers import MLP, QueryGroups
from carpus.models.deimv2.sta import ViTBackbone
from carpus.runtime.errors import DataError

if TYPE_CHECKING:
    from carpus.models.deimv2.denoising import Denoising

__all__ = ["DEIMTransformer", "DEIMv2", "make_anchors"]


def make_anchors(sizes: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """One anchor box a cell: its centre, with side 0.05 * 2^level.

    Args:
        sizes: (height, width) of the levels, fine to coarse.
        dtype: floating type of the anchors.

    Returns:
        (1, L, 4) inverse-sigmoid cxcywh, +inf where invalid, and (1, L, 1) bool, True where all four lie in
        (0.01, 0.99).
    """
    boxes = []
    for level, (height, width) in enumerate(sizes):
        y, x = torch.meshgrid(torch.arange(height, dtype=dtype), torch.arange(width, dtype=dtype), indexing="ij")
        side = torch.full_like(x, 0.05 * 2.0**level)
        boxes.append(torch.stack([(x + 0.5) / width, (y + 0.5) / height, side, side], -1).reshape(-1, 4))
    anchors = torch.cat(boxes)[None]
    valid = ((anchors > 0.01) & (anchors < 0.99)).all(-1, keepdim=True)
    # The logarithm goes through float64 so that every processor rounds it the same way.
    unact = torch.log((anchors / (1.0 - anchors)).double()).to(dtype)
    return unact.masked_fill(~valid, math.inf), valid


class DEIMTransformer(nn.Module):
    """Query selection, decoder layers and heads.

    Args:
        config: sizes of the whole detector.
    """

    def __init__(self, config: DEIMv2Config) -> None:
        super().__init__()
        dim, decoder, classes = config.hidden_dim, config.decoder, config.num_classes
        self.num_queries = decoder.num_queries
        self.dense_supervision = False
        self.num_classes = classes
        self.level_sizes = [(config.input_size[0] // s, config.input_size[1] // s) for s in config.feature_strides]
        self.up = nn.Parameter(torch.tensor([decoder.reg_up]), requires_grad=False)
        self.reg_scale = nn.Parameter(torch.tensor([decoder.reg_scale]), requires_grad=False)
        anchors, valid = make_anchors(self.level_sizes)
        self.anchors: Tensor
        self.valid_mask: Tensor
        self.register_buffer("anchors", anchors)
        self.register_buffer("valid_mask", valid)
        # On the meta device, where a network has shapes and no numbers, there is nothing to ask.
        self.all_valid = not valid.is_meta and bool(valid.all())
        self.decoder = TransformerDecoder(dim, decoder, self.up, self.reg_scale)
        self.denoising_class_embed = nn.Embedding(classes + 1, dim, padding_idx=classes)
        self.enc_score_head = nn.Linear(dim, classes)
        self.enc_bbox_head = MLP(dim, dim, dim, 4, zero_last=True)
        self.query_pos_head = MLP(4, dim, dim, dim)
        self.pre_bbox_head = MLP(dim, dim, dim, 4, zero_last=True)
        self.dec_score_head = nn.ModuleList(nn.Linear(dim, classes) for _ in range(decoder.num_layers))

        def box_head() -> MLP:
            return MLP(dim, dim, dim, 4 * (decoder.reg_max + 1), zero_last=True)

        shared = box_head() if decoder.share_bbox_head else None
        self.dec_bbox_head = nn.ModuleList(shared or box_head() for _ in range(decoder.num_layers))
        for layer in self.query_pos_head.layers:
            nn.init.xavier_uniform_(layer.weight)  # type: ignore[arg-type]
        for head in (self.enc_score_head, *self.dec_score_head):
            reset_score_head(head)

    def _anchors_for(self, maps: list[Tensor]) -> tuple[Tensor, Tensor, bool]:
        """Anchors, validity and whether all are valid: stored for the configured size, made for any other."""
        sizes = [(level.shape[2], level.shape[3]) for level in maps]
        if sizes == self.level_sizes:
            return self.anchors, self.valid_mask, self.all_valid
        anchors, valid = make_anchors(sizes)
        return anchors.to(maps[0]), valid.to(maps[0].device), bool(valid.all())

    def _select(
        self, maps: list[Tensor], record: Record | None
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor] | None]:
        """The best positions as queries.

        Returns:
            (B, Q, dim) content, (B, Q, 4) boxes before the sigmoid, both with gradients, and in training the class
            logits (B, Q, C) of the selection; with dense supervision also the predictions of all positions.
        """
        anchors, valid, all_valid = self._anchors_for(maps)
        if anchors.shape[1] < self.num_queries:
            raise DataError(
                f"this input gives {anchors.shape[1]} positions, fewer than the {self.num_queries} queries chosen "
                "from them; use a larger input or fewer queries"
            )
        memory = torch.cat([level.flatten(2) for level in maps], 2).transpose(1, 2)
        if not all_valid:
            memory = memory * valid
        dense: dict[str, Tensor] | None = None
        if self.training and self.dense_supervision:
            logits = self.enc_score_head(memory)
            best = logits.detach().amax(-1)
            dense = {
                "pred_logits": logits,
                "pred_boxes": torch.sigmoid(self.enc_bbox_head(memory) + anchors),
                "points": torch.sigmoid(anchors[0, :, :2]),
            }
        elif self.training:
            # The ranking needs no gradient: the selected rows are scored again below.
            with torch.no_grad():
                best = self.enc_score_head(memory).amax(-1)
        else:
            best = self.enc_score_head(memory).amax(-1)
        score, index = best.topk(self.num_queries, 1)
        content = memory.gather(1, index.unsqueeze(-1).expand(-1, -1, memory.shape[-1]))
        delta = self.enc_bbox_head(content)
        unact = delta + anchors[0][index]
        if record:
            record("decoder.enc_scores_all", best)
            record("decoder.topk_index", index)
            record("decoder.topk_score", score)
            record("decoder.memory_masked", memory)
            record("decoder.enc_bbox_delta", delta)
            record("decoder.query_content", content)
            record("decoder.init_ref_unact", unact)
        return content, unact, self.enc_score_head(content) if self.training else None, dense

    def forward(
        self, maps: list[Tensor], denoising: Denoising | None = None, record: Record | None = None
    ) -> tuple[DecoderOutputs, Tensor, Tensor | None, dict[str, Tensor] | None]:
        """Decode the encoder's maps.

        Returns:
            The decoder's outputs (denoising queries first), the encoder's boxes (B, Q, 4) cxcywh, in training its
            logits (B, Q, C), and with dense supervision the output set of all its positions.
        """
        content, unact, enc_logits, dense = self._select(maps, record)
        queries, reference = content.detach(), unact.detach()
        groups = None
        if denoising is not None:
            queries = torch.cat([self.denoising_class_embed(denoising.class_ids), queries], 1)
            reference = torch.cat([denoising.bbox_unact.to(reference), reference], 1)
            groups = QueryGroups(int(denoising.split[0]), denoising.num_groups)
        heads = DecoderHeads(self.query_pos_head, self.pre_bbox_head, self.dec_score_head, self.dec_bbox_head)
        outputs = self.decoder(
            queries,
            reference,
            maps,
            heads,
            groups=groups,
            all_layers=self.training or record is not None,
            record=record,
        )
        return outputs, torch.sigmoid(unact), enc_logits, dense


def reset_score_head(head: nn.Module, prior: float = 0.01) -> None:
    """Start a linear class head so that every class has probability ``prior`` on average (focal-loss start)."""
    if not isinstance(head, nn.Linear):
        raise TypeError(f"a score head must be nn.Linear, got {type(head).__name__}")
    nn.init.constant_(head.bias, -math.log((1.0 - prior) / prior))


def _build_backbone(config: DEIMv2Config) -> HGNetv2 | ViTBackbone:
    if isinstance(config.backbone, ViTConfig):
        return ViTBackbone(config.backbone, config.input_size)
    return HGNetv2(config.backbone)


class DEIMv2(nn.Module):
    """DEIMv2 detector.

    Args:
        config: sizes; see ``carpus.models.deimv2.config.VARIANTS``.
    """

    def __init__(self, config: DEIMv2Config) -> None:
        super().__init__()
        self.config = config
        self.backbone = _build_backbone(config)
        self.decoder = DEIMTransformer(config)
        self.encoder = build_encoder(config)

    def forward(
        self,
        images: Tensor,
        targets: list[dict[str, Tensor]] | None = None,
        denoising: Denoising | None = None,
        *,
        record: Record | None = None,
    ) -> dict:
        """Detect.

        Args:
            images: (B, 3, H, W) float, H and W multiples of 32; in 0..1, or normalised where
                ``config.imagenet_normalisation``.
            targets: in training, per image {"labels": (n,) int64, "boxes": (n, 4) cxcywh in 0..1}; denoising queries
                are made from them when ``denoising`` is not given.
            denoising: prepared denoising queries.
            record: receives named intermediate tensors (reference-data checks).

        Returns:
            In eval mode {"pred_logits": (B, Q, C), "pred_boxes": (B, Q, 4) cxcywh in 0..1}. In training mode one such
            dict per output set: "main", "aux_i" (earlier layers), "pre", "enc_0", "dn_i", "dn_pre"; main, aux_i and
            dn_i also hold "pred_corners" (B, Q, 4 * 33). Besides them "ref_points" and "dn_ref_points" (B, N, 4), the
            detached base boxes of the refinement, and "dn_meta", the ``Denoising`` used. With
            ``decoder.dense_supervision`` set there is also "dense": predictions of all L encoder positions, and their
            "points" (L, 2).

        Raises:
            DataError: an input of the wrong rank, or sides that are not multiples of 32 px.
        """
        if images.dim() != 4 or images.shape[1] != 3 or images.shape[2] % 32 or images.shape[3] % 32:
            raise DataError(
                f"DEIMv2 input must be (B, 3, H, W) with H and W multiples of 32 px, got {tuple(images.shape)}"
            )
        if self.training and denoising is None and targets is not None and self.config.decoder.num_denoising > 0:
            from carpus.models.deimv2.denoising import make_denoising

            denoising = make_denoising(
                targets,
                num_classes=self.config.num_classes,
                num_queries=self.config.decoder.num_queries,
                num_denoising=self.config.decoder.num_denoising,
            )
        maps = self.encoder(self.backbone(images))
        outputs, enc_boxes, enc_logits, dense = self.decoder(maps, denoising if self.training else None, record)
        if not self.training:
            if record:
                _record_layers(outputs, record)
            return {"pred_logits": outputs.logits[-1], "pred_boxes": outputs.boxes[-1]}
        sets = _output_sets(outputs, 0 if denoising is None else int(denoising.split[0]))
        sets["enc_0"] = {"pred_logits": enc_logits, "pred_boxes": enc_boxes}
        if dense is not None:
            sets["dense"] = dense
        if denoising is not None:
            sets["dn_meta"] = denoising
        return sets


def _record_layers(outputs: DecoderOutputs, record: Record) -> None:
    """Hand every layer's predictions to ``record``."""
    if outputs.pre_boxes is not None and outputs.pre_logits is not None:
        record("decoder.pre_bboxes", outputs.pre_boxes)
        record("decoder.pre_logits", outputs.pre_logits)
    for i, (logits, boxes, corners) in enumerate(zip(outputs.logits, outputs.boxes, outputs.corners, strict=True)):
        record(f"decoder.layers.{i}.pred_corners", corners)
        record(f"decoder.layers.{i}.boxes", boxes)
        record(f"decoder.layers.{i}.logits", logits)


def _output_sets(outputs: DecoderOutputs, num_dn: int) -> dict:
    """Split the decoder's outputs into named sets; the first ``num_dn`` queries are denoising ones."""
    if outputs.pre_boxes is None or outputs.pre_logits is None:
        raise RuntimeError("the decoder was run without all_layers in training mode")
    last = len(outputs.logits) - 1
    sets: dict = {}
    for i, layer in enumerate(zip(outputs.logits, outputs.boxes, outputs.corners, strict=True)):
        names = ("pred_logits", "pred_boxes", "pred_corners")
        sets["main" if i == last else f"aux_{i}"] = {k: v[:, num_dn:] for k, v in zip(names, layer, strict=True)}
        if num_dn:
            sets[f"dn_{i}"] = {k: v[:, :num_dn] for k, v in zip(names, layer, strict=True)}
    pre = {"pred_logits": outputs.pre_logits, "pred_boxes": outputs.pre_boxes}
    sets["pre"] = {k: v[:, num_dn:] for k, v in pre.items()}
    reference = outputs.pre_boxes.detach()
    sets["ref_points"] = reference[:, num_dn:]
    if num_dn:
        sets["dn_pre"] = {k: v[:, :num_dn] for k, v in pre.items()}
        sets["dn_ref_points"] = reference[:, :num_dn]
    return sets
