"""Training loss of DEIM detectors: pairing, then all terms for all output sets together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from carpus.models.deimv2.denoising import Denoising
from carpus.models.deimv2.distribution import distribution_table
from carpus.models.losses.boxes import paired_iou
from carpus.models.losses.config import CriterionConfig
from carpus.models.losses.dense import dense_losses
from carpus.models.losses.matcher import Assignment, denoising_assignment, match, union_assignment
from carpus.models.losses.processes import mean_over_processes
from carpus.models.losses.targets import PackedTargets, pack_targets
from carpus.models.losses.terms import (
    box_losses,
    distillation_loss,
    distribution_loss,
    distribution_targets,
    matchability_aware_loss,
    take_pairs,
    varifocal_loss,
)
from carpus.runtime.errors import DataError

__all__ = ["DEIMCriterion", "OutputSets", "split_outputs"]


@dataclass(frozen=True)
class OutputSets:
    """S output sets of equal shape, those with corner distributions first and the last decoder layer at `teacher`.

    Attributes:
        names: name of each set.
        logits: `(S, B, Q, C)` float32.
        boxes: `(S, B, Q, 4)` float32 cxcywh.
        corners: `(K, B, Q, 4 * (reg_max + 1))` float32 of the first K sets, or None.
        reference: `(B, Q, 4)` boxes the distributions refine, or None.
        teacher: index of the last decoder layer among the K.
    """

    names: tuple[str, ...]
    logits: Tensor
    boxes: Tensor
    corners: Tensor | None
    reference: Tensor | None
    teacher: int

    @property
    def num_queries(self) -> int:
        """Queries of an image."""
        return int(self.boxes.shape[2])


def _layer_number(name: str) -> int:
    return int(name.rsplit("_", 1)[1])


def _stack(
    outputs: Mapping[str, Any], layers: Sequence[str], rest: Sequence[str], reference: str, corners: bool
) -> OutputSets:
    names = (*layers, *rest)
    with_corners = corners and all("pred_corners" in outputs[name] for name in layers)
    return OutputSets(
        names=names,
        logits=torch.stack([outputs[name]["pred_logits"].float() for name in names]),
        boxes=torch.stack([outputs[name]["pred_boxes"].float() for name in names]),
        corners=torch.stack([outputs[name]["pred_corners"].float() for name in layers]) if with_corners else None,
        reference=outputs.get(reference),
        teacher=0 if layers[0] == "main" else len(layers) - 1,
    )


def split_outputs(outputs: Mapping[str, Any], *, corners: bool = True) -> tuple[OutputSets, OutputSets | None]:
    """Group a model's training outputs into the sets to be matched and the denoising sets.

    Args:
        outputs: output sets by name: "main" (last layer), "aux_i" (earlier layers), "pre" (first box head), "enc_i"
            (selected encoder positions), "dn_i" and "dn_pre" (denoising queries), each with "pred_logits" and
            "pred_boxes", layers also with "pred_corners"; beside them "ref_points" and "dn_ref_points".
        corners: take the corner distributions along (they are large).

    Raises:
        DataError: there is no set "main".
    """
    if "main" not in outputs:
        raise DataError(
            f"outputs have no set 'main', got {sorted(outputs)}; the criterion needs the outputs of training mode"
        )
    aux = sorted((name for name in outputs if name.startswith("aux_")), key=_layer_number)
    encoder = sorted((name for name in outputs if name.startswith("enc_")), key=_layer_number)
    pre = ["pre"] if "pre" in outputs else []
    matched = _stack(outputs, ["main", *aux], [*pre, *encoder], "ref_points", corners)
    layers = sorted((n for n in outputs if n.startswith("dn_") and n[3:].isdigit()), key=_layer_number)
    if not layers:
        return matched, None
    return matched, _stack(outputs, layers, ["dn_pre"] if "dn_pre" in outputs else [], "dn_ref_points", corners)


class DEIMCriterion(nn.Module):
    """Weighted losses of a batch, one entry a term and output set.

    Pairing is one Hungarian assignment per image and set. Classification always uses the set's own pairs; with
    `use_union_set` the box terms use the union of all sets' pairs. Sums are normalised by the number of objects (or
    pairs of the union), averaged over all processes of `torch.distributed` where it runs.
    """

    table: Tensor

    def __init__(self, config: CriterionConfig) -> None:
        super().__init__()
        self.config = config
        table = distribution_table(config.reg_max, config.reg_scale, config.reg_up)
        self.register_buffer("table", table, persistent=False)

    def forward(
        self, outputs: Mapping[str, Any], targets: Sequence[dict[str, Tensor]], epoch: int = 0
    ) -> dict[str, Tensor]:
        """Compute the losses.

        Args:
            outputs: training outputs of the model (see `split_outputs`), with the `Denoising` they were made from
                under "dn_meta" when there are denoising sets.
            targets: for each image `{"labels": (n,) int64, "boxes": (n, 4) cxcywh in 0..1}`.
            epoch: epoch, from 0; decides which cost the matcher uses.

        Returns:
            Weighted scalar losses: "loss_mal" (or "loss_vfl"), "loss_bbox", "loss_giou", "loss_fgl", "loss_ddf" for the
            last layer (without the last), with "_<set>" appended for other sets ("_dense" for the encoder's positions
            where the model supervises all of them). Their plain sum is the loss.

        Raises:
            DataError: targets or outputs that do not fit each other.
        """
        config = self.config
        matched, denoising = split_outputs(outputs, corners="local" in config.losses)
        batch = matched.boxes.shape[1]
        if len(targets) != batch:
            raise DataError(f"got {len(targets)} targets for a batch of {batch} images")
        packed = pack_targets(targets, config.num_classes, matched.boxes.device)
        own = match(
            matched.logits.detach(),
            matched.boxes.detach(),
            packed,
            config.matcher,
            changed=config.matcher.changed(epoch),
        )
        union = union_assignment(own) if config.use_union_set else None
        num_boxes, num_pairs = self._normalizers(packed.total, own.num_pairs if union is None else union.num_pairs)
        if union is None:
            num_pairs = num_boxes

        for_boxes = own if union is None else union
        # Weights of paired and other queries in the self-distillation; denoising layers share them.
        edges, paired_edges = batch * matched.num_queries * 4, for_boxes.num_pairs * 4
        balance = ((paired_edges * 8 / batch) ** 0.5, ((edges - paired_edges) * 8 / batch) ** 0.5)

        losses = self._losses(matched, packed, own, union, num_boxes, num_pairs, balance)
        if denoising is not None:
            meta = outputs.get("dn_meta")
            if not isinstance(meta, Denoising):
                raise DataError("outputs have denoising sets but no Denoising under 'dn_meta'; pass on what made them")
            pairs = denoising_assignment(meta.positive_idx, meta.num_groups, denoising.num_queries, packed)
            norm = num_boxes * meta.num_groups
            losses.update(self._losses(denoising, packed, pairs, None, norm, norm, balance))
        if (dense := outputs.get("dense")) is not None:
            logits, boxes = dense["pred_logits"].float(), dense["pred_boxes"].float()
            losses.update(dense_losses(logits, boxes, dense["points"], packed, config.weights, config.gamma))
        return losses

    def _normalizers(self, num_boxes: int, num_pairs: int) -> tuple[float, float]:
        """Mean over processes, at least 1."""
        counts = torch.tensor([num_boxes, num_pairs], dtype=torch.float32, device=self.table.device)
        boxes, pairs = mean_over_processes(counts).clamp(min=1.0).tolist()
        return boxes, pairs

    def _losses(
        self,
        sets: OutputSets,
        targets: PackedTargets,
        own: Assignment,
        union: Assignment | None,
        num_boxes: float,
        num_pairs: float,
        balance: tuple[float, float],
    ) -> dict[str, Tensor]:
        config, weights = self.config, self.config.weights
        num_sets, batch, num_queries, _ = sets.boxes.shape
        boxes = sets.boxes.reshape(num_sets, batch * num_queries, 4)
        pairs = own if union is None else union
        query = pairs.query.expand(num_sets, -1)
        target_boxes = targets.boxes[pairs.target]
        l1, giou, iou = box_losses(take_pairs(boxes, query), target_boxes)

        terms: dict[str, Tensor] = {}
        if "mal" in config.losses or "vfl" in config.losses:
            own_query, own_iou = own.query.expand(num_sets, -1), iou
            if union is not None:
                own_iou = paired_iou(take_pairs(boxes.detach(), own_query), targets.boxes[own.target])
            labels = targets.labels[own.target].expand(num_sets, -1)
            logits = sets.logits.flatten(1, 2)
            if "mal" in config.losses:
                mal = matchability_aware_loss(logits, own_query, labels, own_iou, config.gamma)
                terms["mal"] = mal * (weights.mal / num_boxes)
            if "vfl" in config.losses:
                terms["vfl"] = varifocal_loss(logits, own_query, labels, own_iou) * (weights.vfl / num_boxes)
        if "boxes" in config.losses:
            terms["bbox"] = l1 * (weights.bbox / num_pairs)
            terms["giou"] = giou * (weights.giou / num_pairs)
        if "local" in config.losses and sets.corners is not None and sets.reference is not None:
            terms.update(self._local_losses(sets, pairs, target_boxes, iou, num_pairs, balance))

        losses = {}
        values = {name: term.unbind() for name, term in terms.items()}
        students = [i for i in range(num_sets) if i != sets.teacher]
        for i, name in enumerate(sets.names):
            suffix = "" if name == "main" else f"_{name}"
            for term, value in values.items():
                if term == "ddf":
                    if i in students and students.index(i) < len(value):
                        losses[f"loss_ddf{suffix}"] = value[students.index(i)]
                elif i < len(value):
                    losses[f"loss_{term}{suffix}"] = value[i]
        return losses

    def _local_losses(
        self,
        sets: OutputSets,
        pairs: Assignment,
        target_boxes: Tensor,
        iou: Tensor,
        num_pairs: float,
        balance: tuple[float, float],
    ) -> dict[str, Tensor]:
        config, weights = self.config, self.config.weights
        if sets.corners is None or sets.reference is None:
            return {}
        layers = sets.corners.shape[0]
        corners = sets.corners.reshape(layers, -1, 4, config.reg_max + 1)
        query = pairs.query.expand(layers, -1) if pairs.query.shape[0] == 1 else pairs.query[:layers]
        iou, target_boxes = iou[:layers], target_boxes[:layers]
        # With one assignment for all layers there is one set of targets, else one a layer.
        reference = sets.reference.detach().float().reshape(-1, 4)[query[: target_boxes.shape[0]]]
        left, weight_right = distribution_targets(reference, target_boxes, self.table, config.reg_scale)
        left, weight_right = (value.expand(layers, -1, -1) for value in (left, weight_right))
        fgl = distribution_loss(take_pairs(corners, query), left, weight_right, iou)
        terms = {"fgl": fgl * (weights.fgl / num_pairs)}
        students = [i for i in range(layers) if i != sets.teacher]
        if students:
            teacher_prob = sets.logits[sets.teacher].detach().sigmoid().amax(-1).flatten()
            teacher_corners = corners[sets.teacher].detach()
            first, last = students[0], students[-1] + 1
            ddf = distillation_loss(
                corners[first:last],
                teacher_corners,
                teacher_prob,
                query[first:last],
                iou[first:last],
                config.temperature,
                balance,
            )
            terms["ddf"] = ddf * weights.ddf
        return terms
