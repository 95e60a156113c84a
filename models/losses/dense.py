"""Auxiliary supervision of every encoder position, which shortens training from random weights.

A DETR trained from scratch learns slowly at first, because each object teaches one query of a hundred. Here each object
also teaches the few positions that predict it best, through the heads that select the queries, so no parameter is
added and nothing changes at inference. Assignment after "TOOD: Task-aligned One-stage Object Detection" (Feng et al.,
2021, section 3.2); dense supervision of a DETR after RT-DETRv3 (Wang et al., 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from carpus.models.losses.boxes import box_cxcywh_to_xyxy, iou_and_giou
from carpus.models.losses.config import LossWeights
from carpus.models.losses.processes import mean_over_processes
from carpus.models.losses.targets import PackedTargets
from carpus.models.losses.terms import box_losses, matchability_aware_loss

__all__ = ["dense_losses", "task_aligned_assignment"]


@torch.no_grad()
def task_aligned_assignment(
    logits: Tensor,
    boxes: Tensor,
    points: Tensor,
    targets: PackedTargets,
    *,
    positions: int = 8,
    score_power: float = 0.5,
    iou_power: float = 4.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give each object the positions inside it that predict it best, and each position at most one object.

    Args:
        logits: `(B, L, C)`.
        boxes: `(B, L, 4)` cxcywh in 0..1.
        points: `(L, 2)` centre of each position, in 0..1.
        targets: ground truth.
        positions: most positions an object takes.
        score_power: exponent of the class probability in the alignment.
        iou_power: exponent of the IoU in the alignment.

    Returns:
        `(M,)` flat positions b * L + l, `(M,)` object of each among the T of the batch, and `(M,)` quality in 0..1: the
        alignment, scaled so that the best position of an object has the object's highest IoU.
    """
    length = logits.shape[1]
    largest = targets.padded_labels.shape[1]
    device = logits.device
    if largest == 0:
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        return empty, empty, torch.zeros(0, device=device)
    truth = box_cxcywh_to_xyxy(targets.padded_boxes)
    iou, _ = iou_and_giou(box_cxcywh_to_xyxy(boxes)[:, None], truth[:, :, None])
    labels = targets.padded_labels[:, None, :].expand(-1, length, -1)
    prob = logits.sigmoid().gather(2, labels).transpose(1, 2)
    low, high = truth[:, :, None, :2], truth[:, :, None, 2:]
    inside = ((points > low) & (points < high)).all(-1)
    # An object smaller than the grid's step holds no centre: it takes the nearest one.
    distance = (points - targets.padded_boxes[:, :, None, :2]).square().sum(-1)
    inside |= distance <= distance.amin(-1, keepdim=True)
    counts = torch.tensor(targets.counts, device=device)
    real = torch.arange(largest, device=device) < counts[:, None]
    allowed = inside & real[..., None]

    alignment = prob.pow(score_power) * iou.clamp(min=1e-4).pow(iou_power) * allowed
    best, index = alignment.topk(min(positions, length), dim=2)
    chosen = torch.zeros_like(allowed).scatter_(2, index, best > 0)
    # A position that several objects chose goes to the one it overlaps most.
    owner = torch.where(chosen, iou, -1.0).argmax(1)
    chosen &= torch.arange(largest, device=device)[:, None] == owner[:, None]
    peak = alignment.mul_(chosen).amax(2, keepdim=True).clamp(min=1e-9)
    quality = alignment / peak * (iou * chosen).amax(2, keepdim=True)
    image, number, position = chosen.nonzero(as_tuple=True)
    offsets = torch.tensor(targets.offsets, device=device)
    return image * length + position, offsets[image] + number, quality[image, number, position]


def dense_losses(
    logits: Tensor, boxes: Tensor, points: Tensor, targets: PackedTargets, weights: LossWeights, gamma: float
) -> dict[str, Tensor]:
    """Weighted losses of all encoder positions: classification normalised by the sum of the qualities, boxes by their
    number, both averaged over all processes of `torch.distributed` where it runs.

    Args:
        logits: `(B, L, C)` float32.
        boxes: `(B, L, 4)` float32 cxcywh in 0..1.
        points: `(L, 2)` centre of each position.
        targets: ground truth.
        weights: factor of each term.
        gamma: exponent of the matchability-aware loss.

    Returns:
        "loss_mal_dense", "loss_bbox_dense" and "loss_giou_dense", scalars.
    """
    query, number, quality = task_aligned_assignment(logits, boxes, points, targets)
    total = quality.sum()
    norm, count = mean_over_processes(torch.stack([total, total.new_tensor(query.shape[0])])).clamp(min=1.0)
    labels = targets.labels[number]
    # Quality already plays the part of IoU^gamma.
    target = quality.pow(1.0 / gamma)
    flat = logits.flatten(0, 1)[None]
    mal = matchability_aware_loss(flat, query[None], labels[None], target[None], gamma)
    l1, giou, _ = box_losses(boxes.flatten(0, 1)[query][None], targets.boxes[number][None])
    return {
        "loss_mal_dense": mal[0] * (weights.mal / norm),
        "loss_bbox_dense": l1[0] * (weights.bbox / count),
        "loss_giou_dense": giou[0] * (weights.giou / count),
    }
