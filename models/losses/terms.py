"""The loss terms of DEIM detectors as pure functions over S output sets at once.

Predictions of a set are flattened to N = B * Q queries; pairs come as an `Assignment` with M pairs a set. Every
function returns `(S,)` sums that are not yet normalised (except the self-distillation, which is a mean).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carpus.models.losses.boxes import box_cxcywh_to_xyxy, iou_and_giou

__all__ = [
    "box_losses",
    "distillation_loss",
    "distribution_loss",
    "distribution_targets",
    "matchability_aware_loss",
    "take_pairs",
    "varifocal_loss",
]


def take_pairs(values: Tensor, query: Tensor) -> Tensor:
    """Rows of `values` `(S, N, ...)` at the query indices `(S, M)` -> `(S, M, ...)`."""
    sets = torch.arange(values.shape[0], device=values.device)[:, None]
    return values[sets, query]


class _MatchabilityAware(torch.autograd.Function):
    """Value and gradient in one pass over the logits: the loss is linear in what the gradient needs anyway."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, entries: Tensor, quality: Tensor, gamma: float) -> Tensor:
        """Sums `(S,)` for logits `(S, N * C)`; `entries` `(S, M)` index the logits of the pairs."""
        prob = logits.sigmoid()
        weight = prob.sqrt().mul_(prob) if gamma == 1.5 else prob.pow(gamma)
        weight.scatter_(1, entries, 0.0)
        present = F.binary_cross_entropy_with_logits(logits.gather(1, entries), quality, reduction="none").sum(1)
        loss = torch.linalg.vecdot(weight, F.softplus(logits)) + present
        gradient = weight.mul_(prob).scatter_(1, entries, prob.gather(1, entries) - quality)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        """Chain rule; there is no second derivative."""
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0][:, None], None, None, None


def matchability_aware_loss(logits: Tensor, query: Tensor, labels: Tensor, iou: Tensor, gamma: float) -> Tensor:
    """Matchability-aware loss (DEIM, Huang et al., 2024, equation 2), without the balance factor.

    Binary cross-entropy towards IoU^gamma at the class of a pair, weighted 1; towards 0 elsewhere, weighted p^gamma,
    the weight without gradient.

    Args:
        logits: `(S, N, C)`.
        query: `(S, M)` query of each pair.
        labels: `(S, M)` class of each pair.
        iou: `(S, M)` IoU of each pair, without gradient.
        gamma: exponent.

    Returns:
        `(S,)` sum over queries and classes; differentiable once.
    """
    entries = query * logits.shape[2] + labels
    loss: Tensor = _MatchabilityAware.apply(logits.flatten(1), entries, iou.pow(gamma), gamma)
    return loss


def varifocal_loss(
    logits: Tensor, query: Tensor, labels: Tensor, iou: Tensor, *, alpha: float = 0.75, gamma: float = 2.0
) -> Tensor:
    """Varifocal loss (Zhang et al., 2021, arXiv:2008.13367, equation 2), as RT-DETR and D-FINE use it.

    Binary cross-entropy towards the IoU at the class of a pair, weighted by the IoU; towards 0 elsewhere, weighted
    alpha * p^gamma, the weight without gradient.

    Args:
        logits: `(S, N, C)`.
        query: `(S, M)` query of each pair.
        labels: `(S, M)` class of each pair.
        iou: `(S, M)` IoU of each pair, without gradient.
        alpha: weight of what is absent.
        gamma: exponent of the score there.

    Returns:
        `(S,)` sum over queries and classes.
    """
    flat = logits.flatten(1)
    entries = query * logits.shape[2] + labels
    weight = alpha * flat.detach().sigmoid().pow(gamma)
    absent = (weight * F.softplus(flat)).scatter(1, entries, 0.0)
    present = F.binary_cross_entropy_with_logits(flat.gather(1, entries), iou, reduction="none") * iou
    return absent.sum(1) + present.sum(1)


def box_losses(boxes: Tensor, target_boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L1 and generalised IoU losses of paired cxcywh boxes, both `(S, M, 4)`.

    Returns:
        L1 sums `(S,)`, sums of 1 - GIoU `(S,)`, and the IoU of each pair `(S, M)` without gradient.
    """
    l1 = (boxes - target_boxes).abs().sum((1, 2))
    iou, giou = iou_and_giou(box_cxcywh_to_xyxy(boxes), box_cxcywh_to_xyxy(target_boxes))
    return l1, (1 - giou).sum(1), iou.detach()


@torch.no_grad()
def distribution_targets(
    reference: Tensor, target_boxes: Tensor, table: Tensor, reg_scale: float
) -> tuple[Tensor, Tensor]:
    """Where the edges of the targets lie in the table of distances, seen from the reference boxes.

    Args:
        reference: `(..., 4)` cxcywh base boxes the distributions refine.
        target_boxes: `(..., 4)` cxcywh.
        table: `(reg_max + 1,)` ascending distances W(n).
        reg_scale: scale of the distances.

    Returns:
        `(..., 4)` int64 left bin and `(..., 4)` float32 weight of the bin to its right (the left one has the rest);
        edges left, top, right, bottom. Distances outside the table go to its ends.
    """
    corners = box_cxcywh_to_xyxy(target_boxes)
    unit = (reference[..., 2:] / reg_scale).clamp(min=1e-16)
    before = (reference[..., :2] - corners[..., :2]) / unit
    after = (corners[..., 2:] - reference[..., :2]) / unit
    distance = torch.cat((before, after), dim=-1) - 0.5 * reg_scale
    last = table.shape[0] - 2
    left = (torch.bucketize(distance, table, right=True) - 1).clamp(0, last)
    low, high = table[left], table[left + 1]
    return left, ((distance - low) / (high - low)).clamp(0.0, 1.0)


def distribution_loss(corners: Tensor, left: Tensor, weight_right: Tensor, iou: Tensor) -> Tensor:
    """Fine-grained localisation loss (D-FINE, Peng et al., 2024, equation 5).

    Args:
        corners: `(S, M, 4, bins)` logits of the edges of each pair.
        left: `(S, M, 4)` left bin of the target.
        weight_right: `(S, M, 4)` weight of the next bin.
        iou: `(S, M)` IoU of each pair, without gradient.

    Returns:
        `(S,)` cross-entropy between neighbouring bins, weighted by IoU, summed over pairs and edges.
    """
    log_prob = corners.log_softmax(-1)
    log_left = log_prob.gather(-1, left[..., None]).squeeze(-1)
    log_right = log_prob.gather(-1, left[..., None] + 1).squeeze(-1)
    cross_entropy = -(log_left * (1 - weight_right) + log_right * weight_right)
    return (cross_entropy * iou[..., None]).sum((1, 2))


def distillation_loss(
    corners: Tensor,
    teacher_corners: Tensor,
    teacher_prob: Tensor,
    query: Tensor,
    iou: Tensor,
    temperature: float,
    balance: tuple[float, float],
) -> Tensor:
    """Decoupled distillation of the last layer's distributions into earlier ones (D-FINE, equations 6 and 7).

    Args:
        corners: `(S, N, 4, bins)` logits of the earlier layers.
        teacher_corners: `(N, 4, bins)` logits of the last layer, without gradient.
        teacher_prob: `(N,)` the last layer's highest class probability, without gradient.
        query: `(S, M)` paired queries.
        iou: `(S, M)` IoU of each pair (student box), without gradient.
        temperature: softens both distributions.
        balance: weights of the paired and of the other queries.

    Returns:
        `(S,)` weighted mean of the means over paired and other edges.
    """
    log_student = (corners / temperature).log_softmax(-1)
    with torch.no_grad():
        log_teacher = (teacher_corners / temperature).log_softmax(-1)
        teacher = log_teacher.exp()
        sets = torch.arange(corners.shape[0], device=corners.device)[:, None]
        paired_weight = torch.zeros(corners.shape[:2], device=corners.device)
        paired_weight[sets, query] = iou
        other_weight = teacher_prob.repeat(corners.shape[0], 1)
        other_weight[sets, query] = 0.0
        num_paired, num_other = query.shape[1], corners.shape[1] - query.shape[1]
        total = max(sum(balance), 1e-12)
        scale = temperature**2 / 4.0 / total
        weight = paired_weight * (scale * balance[0] / max(num_paired, 1))
        weight += other_weight * (scale * balance[1] / max(num_other, 1))
    # Entropy and cross-entropy subtracted bin by bin: their sums nearly cancel when the layers agree.
    divergence = (teacher * (log_teacher - log_student)).sum((-1, -2))
    return (divergence * weight).sum(1)
