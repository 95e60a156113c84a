"""Detection loss of the YOLO families: class BCE, complete IoU, box distributions, and auxiliary losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.losses.boxes import box_cxcywh_to_xyxy
from carpus.models.losses.processes import mean_over_processes, num_processes
from carpus.models.yolo.assigner import assign, complete_iou
from carpus.models.yolo.head import STRIDES, anchor_points, flatten_levels
from carpus.runtime.errors import DataError

__all__ = ["LossConfig", "YOLOCriterion", "decode_distances", "distribution_focal_loss", "pad_targets"]


@dataclass(frozen=True)
class LossConfig:
    """Settings of the loss.

    Attributes:
        num_classes: object classes.
        reg_max: bins of a box side; 1 leaves the distribution term out.
        box: gain of the IoU term.
        cls: gain of the class term.
        dfl: gain of the distribution term.
        moe: gain of the model's auxiliary loss.
        top_k: points an object may take in the assignment.
        alpha: exponent of the score in the assignment.
        beta: exponent of the overlap in the assignment.
        strides: strides [px] of the levels.
    """

    num_classes: int = 80
    reg_max: int = 16
    box: float = 7.5
    cls: float = 0.5
    dfl: float = 1.5
    moe: float = 0.15
    top_k: int = 10
    alpha: float = 0.5
    beta: float = 6.0
    strides: tuple[int, ...] = STRIDES


def distribution_focal_loss(logits: Tensor, distances: Tensor) -> Tensor:
    """Cross entropy on the two bins around a distance ("Generalized Focal Loss", arXiv:2006.04388, equation 6).

    Args:
        logits: (n, 4, bins).
        distances: (n, 4) left, top, right, bottom [cells]; clamped to [0, bins - 1.01].

    Returns:
        (n,) mean over the four sides.
    """
    bins = logits.shape[-1]
    target = distances.clamp(0, bins - 1 - 0.01)
    low = target.long()
    high_weight = target - low
    log_probability = logits.log_softmax(-1)
    low_term = log_probability.gather(-1, low[..., None])[..., 0] * (1 - high_weight)
    high_term = log_probability.gather(-1, low[..., None] + 1)[..., 0] * high_weight
    return -(low_term + high_term).mean(-1)


def decode_distances(box_logits: Tensor, points: Tensor) -> Tensor:
    """Boxes of distributions (or, with one bin, of plain distances).

    Args:
        box_logits: (B, A, 4, bins).
        points: (A, 2) anchor points [cells].

    Returns:
        (B, A, 4) xyxy [cells].
    """
    bins = box_logits.shape[-1]
    if bins > 1:
        values = torch.arange(bins, dtype=box_logits.dtype, device=box_logits.device)
        distances = box_logits.softmax(-1) @ values
    else:
        distances = box_logits.squeeze(-1)
    near, far = distances.chunk(2, -1)
    return torch.cat([points - near, points + far], -1)


def pad_targets(
    targets: Sequence[Mapping[str, Tensor]], size: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Objects of a batch as padded tensors.

    Args:
        targets: per image ``labels`` (n,) int64 and ``boxes`` (n, 4) cxcywh in 0..1.
        size: (height, width) of the network input [px].
        device: where the result lies.

    Returns:
        (B, N) int64 labels, (B, N, 4) xyxy [px], (B, N) bool, True for an object.
    """
    most = max((len(t["labels"]) for t in targets), default=0)
    labels = torch.zeros(len(targets), most, dtype=torch.int64)
    boxes = torch.zeros(len(targets), most, 4)
    mask = torch.zeros(len(targets), most, dtype=torch.bool)
    scale = torch.tensor([size[1], size[0], size[1], size[0]], dtype=torch.float32)
    for row, target in enumerate(targets):
        count = len(target["labels"])
        if count:
            labels[row, :count] = target["labels"].cpu()
            boxes[row, :count] = box_cxcywh_to_xyxy(target["boxes"].float().cpu() * scale)
            mask[row, :count] = True
    return labels.to(device), boxes.to(device), mask.to(device)


class YOLOCriterion(nn.Module):
    """The loss of a batch.

    Args:
        config: gains and assignment.
    """

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        self.config = config

    def forward(
        self, outputs: Mapping[str, Any], targets: Sequence[Mapping[str, Tensor]], epoch: int = 0
    ) -> dict[str, Tensor]:
        """Weighted losses; their sum is the loss, which is proportional to the batch size as published.

        The batch is that of all processes of ``torch.distributed``, whose gradients are averaged.

        Args:
            outputs: {"raw": level maps of the head in training mode, optionally "aux_loss": scalar}.
            targets: per image ``labels`` (n,) int64 and ``boxes`` (n, 4) cxcywh in 0..1.
            epoch: not used; criteria of other families take it.

        Returns:
            "loss_box", "loss_cls", with distributions "loss_dfl", and with auxiliary losses "loss_moe".

        Raises:
            DataError: as many targets as images are needed, with classes below the configured number.
        """
        config = self.config
        raw: Sequence[Tensor] = [level.float() for level in outputs["raw"]]
        batch = raw[0].shape[0]
        _check_targets(targets, batch, config.num_classes)
        box_logits, class_logits = flatten_levels(raw, 4 * config.reg_max)
        box_logits = box_logits.transpose(1, 2).unflatten(-1, (4, config.reg_max))
        class_logits = class_logits.transpose(1, 2)
        points, stride = anchor_points(raw, config.strides)
        boxes = decode_distances(box_logits, points)
        size = (raw[0].shape[2] * config.strides[0], raw[0].shape[3] * config.strides[0])
        labels, object_boxes, mask = pad_targets(targets, size, class_logits.device)
        assignment = assign(
            class_logits.detach().sigmoid(),
            boxes.detach() * stride,
            points * stride,
            labels,
            object_boxes,
            mask,
            top_k=config.top_k,
            alpha=config.alpha,
            beta=config.beta,
        )
        processes = num_processes()
        normaliser = mean_over_processes(assignment.scores.sum()).clamp(min=1 / processes)
        bce = F.binary_cross_entropy_with_logits(class_logits, assignment.scores, reduction="sum")
        terms = {"cls": bce / normaliser}
        hit = assignment.foreground
        weight = assignment.scores.sum(-1)[hit]
        goal = (assignment.boxes / stride)[hit]
        terms["box"] = ((1 - complete_iou(boxes[hit], goal)) * weight).sum() / normaliser
        if config.reg_max > 1:
            centre = points.expand(batch, -1, -1)[hit]
            distances = torch.cat([centre - goal[:, :2], goal[:, 2:] - centre], -1)
            terms["dfl"] = (distribution_focal_loss(box_logits[hit], distances) * weight).sum() / normaliser
        images = batch * processes
        losses = {f"loss_{name}": value * getattr(config, name) * images for name, value in terms.items()}
        if "aux_loss" in outputs:
            losses["loss_moe"] = outputs["aux_loss"] * config.moe * images
        return losses


def _check_targets(targets: Sequence[Mapping[str, Tensor]], batch: int, num_classes: int) -> None:
    if len(targets) != batch:
        raise DataError(f"expected one target per image, got {len(targets)} targets for {batch} images")
    for index, target in enumerate(targets):
        labels = target["labels"]
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise DataError(
                f"targets[{index}] has classes {int(labels.min())}..{int(labels.max())}, expected 0..{num_classes - 1}"
            )
