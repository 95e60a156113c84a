"""The training loss of LW-DETR: grouped matching, IoU-aware classification, L1 and generalised IoU.

Sources: LW-DETR (arXiv:2406.03459), section 3.3; Group DETR (arXiv:2207.13085); IA-BCE as in Align-DETR
(arXiv:2304.07527).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.losses.config import LossWeights, MatcherConfig
from carpus.models.losses.dense import dense_losses
from carpus.models.losses.matcher import Assignment, match
from carpus.models.losses.processes import mean_over_processes
from carpus.models.losses.targets import PackedTargets, pack_targets
from carpus.models.losses.terms import box_losses, matchability_aware_loss, take_pairs, varifocal_loss
from carpus.runtime.errors import DataError

__all__ = ["LWDETRCriterion", "LWDETRCriterionConfig", "group_match", "iou_aware_loss"]

MIN_TARGET = 0.01
"""Smallest classification target of a pair."""


@dataclass(frozen=True)
class LWDETRCriterionConfig:
    """Everything that fixes the loss.

    Attributes:
        num_classes: logits a query.
        num_groups: query groups that are matched on their own in training mode; in eval mode all queries are one.
        weight_class: factor of the classification loss.
        weight_bbox: factor of the L1 loss.
        weight_giou: factor of the generalised IoU loss.
        alpha: share of the score in the classification target.
        matcher: how predictions and ground truth are paired.
        classification: "ia_bce" as published, or the matchability-aware or varifocal loss in its place.
        gamma: exponent of the matchability-aware loss, which also teaches all positions.
    """

    num_classes: int = 91
    num_groups: int = 13
    weight_class: float = 1.0
    weight_bbox: float = 5.0
    weight_giou: float = 2.0
    alpha: float = 0.25
    matcher: MatcherConfig = field(default_factory=MatcherConfig)
    classification: Literal["ia_bce", "mal", "vfl"] = "ia_bce"
    gamma: float = 1.5

    def __post_init__(self) -> None:
        if self.num_classes < 1 or self.num_groups < 1:
            raise DataError(
                f"LWDETRCriterionConfig needs num_classes and num_groups of at least 1, got {self.num_classes} and "
                f"{self.num_groups}"
            )


def group_match(
    logits: Tensor, boxes: Tensor, targets: PackedTargets, config: MatcherConfig, num_groups: int
) -> Assignment:
    """Least-cost one-to-one pairing within each query group of every set and image.

    Args:
        logits: (S, B, G * Q, C), group after group.
        boxes: (S, B, G * Q, 4) cxcywh.
        targets: ground truth; every group pairs all of it.
        config: costs.
        num_groups: G.

    Returns:
        (S, G * M) pairs; query indices count over B * G * Q.
    """
    sets, total = boxes.shape[0], boxes.shape[2]
    size = total // num_groups

    def split(values: Tensor) -> Tensor:
        return values.unflatten(2, (num_groups, size)).transpose(1, 2).flatten(0, 1)

    pairs = match(split(logits), split(boxes), targets, config)
    query = pairs.query.unflatten(0, (sets, num_groups))
    group = torch.arange(num_groups, device=query.device)[None, :, None]
    query = torch.div(query, size, rounding_mode="floor") * total + group * size + query % size
    return Assignment(query.flatten(1), pairs.target.unflatten(0, (sets, num_groups)).flatten(1))


def iou_aware_loss(logits: Tensor, query: Tensor, labels: Tensor, iou: Tensor, alpha: float) -> Tensor:
    """IoU-aware binary cross-entropy (LW-DETR, section 3.3).

    Towards t = max(p^alpha * IoU^(1 - alpha), 0.01), without gradient, at the class of a pair; towards 0 elsewhere,
    weighted p^2, the weight with gradient.

    Args:
        logits: (S, N, C).
        query: (S, M) query of each pair.
        labels: (S, M) class of each pair.
        iou: (S, M) IoU of each pair, without gradient.
        alpha: share of the score in the target.

    Returns:
        (S,) sums over queries and classes.
    """
    flat = logits.flatten(1)
    entries = query * logits.shape[2] + labels
    absent = flat.sigmoid().square() * F.softplus(flat)
    paired = flat.gather(1, entries)
    target = (paired.detach().sigmoid().pow(alpha) * iou.pow(1.0 - alpha)).clamp(min=MIN_TARGET)
    present = F.binary_cross_entropy_with_logits(paired, target, reduction="none")
    return absent.scatter(1, entries, 0.0).sum(1) + present.sum(1)


class LWDETRCriterion(nn.Module):
    """Weighted losses of a batch, one entry a term and output set; sums over pairs divided by the number of pairs."""

    def __init__(self, config: LWDETRCriterionConfig) -> None:
        super().__init__()
        self.config = config

    def forward(
        self, outputs: Mapping[str, Any], targets: Sequence[dict[str, Tensor]], epoch: int = 0
    ) -> dict[str, Tensor]:
        """Compute the losses.

        Args:
            outputs: training outputs of the model: sets "main", "aux_i" and "enc", and "dense" where the model
                supervises all of its positions.
            targets: per image {"labels": (n,) int64, "boxes": (n, 4) cxcywh in 0..1}.
            epoch: not used; other losses change with it.

        Returns:
            Weighted scalar losses "loss_class", "loss_bbox", "loss_giou" for the last layer, with "_<set>" appended
            for the other sets; "loss_mal_dense", "loss_bbox_dense", "loss_giou_dense" for the set "dense". Their plain
            sum is the loss.

        Raises:
            DataError: targets or outputs that do not fit each other.
        """
        config = self.config
        names = [name for name, values in outputs.items() if "pred_boxes" in values and "points" not in values]
        if "main" not in names:
            raise DataError(f"outputs must hold the set 'main', found {', '.join(names) or 'none'}")
        logits = torch.stack([outputs[name]["pred_logits"] for name in names]).float()
        boxes = torch.stack([outputs[name]["pred_boxes"] for name in names]).float()
        if len(targets) != boxes.shape[1]:
            raise DataError(f"got {len(targets)} targets for a batch of {boxes.shape[1]} images")
        groups = config.num_groups if self.training else 1
        if boxes.shape[2] % groups:
            raise DataError(f"{boxes.shape[2]} queries cannot be {groups} groups; give the model the same num_groups")
        packed = pack_targets(targets, config.num_classes, boxes.device)
        pairs = group_match(logits.detach(), boxes.detach(), packed, config.matcher, groups)
        objects = torch.tensor(float(packed.total * groups), device=boxes.device)
        norm = float(mean_over_processes(objects).clamp(min=1.0))

        labels, target_boxes = packed.labels[pairs.target], packed.boxes[pairs.target]
        l1, giou, iou = box_losses(take_pairs(boxes.flatten(1, 2), pairs.query), target_boxes)
        classes = self._classification(logits.flatten(1, 2), pairs.query, labels, iou)
        terms = {
            "class": classes * (config.weight_class / norm),
            "bbox": l1 * (config.weight_bbox / norm),
            "giou": giou * (config.weight_giou / norm),
        }
        losses = {
            f"loss_{term}" + ("" if name == "main" else f"_{name}"): values[i]
            for i, name in enumerate(names)
            for term, values in terms.items()
        }
        if (dense := outputs.get("dense")) is not None:
            weights = LossWeights(mal=config.weight_class, bbox=config.weight_bbox, giou=config.weight_giou)
            values = dense["pred_logits"].float(), dense["pred_boxes"].float(), dense["points"]
            losses.update(dense_losses(*values, packed, weights, config.gamma))
        return losses

    def _classification(self, logits: Tensor, query: Tensor, labels: Tensor, iou: Tensor) -> Tensor:
        config = self.config
        if config.classification == "mal":
            return matchability_aware_loss(logits, query, labels, iou, config.gamma)
        if config.classification == "vfl":
            return varifocal_loss(logits, query, labels, iou)
        return iou_aware_loss(logits, query, labels, iou, config.alpha)
