"""Task-aligned assignment of anchor points to objects ("TOOD", arXiv:2108.07755, section 3.2), and complete IoU."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Assignment", "assign", "complete_iou"]


def complete_iou(a_xyxy: Tensor, b_xyxy: Tensor, eps: float = 1e-7) -> Tensor:
    """Complete IoU: IoU less the centre distance and the difference in aspect ratio (arXiv:1911.08287, equation 10).

    Args:
        a_xyxy: (..., 4) boxes.
        b_xyxy: (..., 4) boxes, broadcast against the first.
        eps: added to heights and denominators.

    Returns:
        (...) in -1..1; the trade-off factor alpha carries no gradient.
    """
    ax1, ay1, ax2, ay2 = a_xyxy.unbind(-1)
    bx1, by1, bx2, by2 = b_xyxy.unbind(-1)
    a_width, a_height = ax2 - ax1, ay2 - ay1 + eps
    b_width, b_height = bx2 - bx1, by2 - by1 + eps
    overlap_width = (torch.minimum(ax2, bx2) - torch.maximum(ax1, bx1)).clamp(min=0)
    overlap_height = (torch.minimum(ay2, by2) - torch.maximum(ay1, by1)).clamp(min=0)
    intersection = overlap_width * overlap_height
    iou = intersection / (a_width * a_height + b_width * b_height - intersection + eps)
    hull_width = torch.maximum(ax2, bx2) - torch.minimum(ax1, bx1)
    hull_height = torch.maximum(ay2, by2) - torch.minimum(ay1, by1)
    diagonal = hull_width.square() + hull_height.square() + eps
    distance = ((bx1 + bx2 - ax1 - ax2).square() + (by1 + by2 - ay1 - ay2).square()) / 4
    aspect = (4 / math.pi**2) * ((b_width / b_height).atan() - (a_width / a_height).atan()).square()
    with torch.no_grad():
        alpha = aspect / (aspect - iou + (1 + eps))
    return iou - (distance / diagonal + aspect * alpha)


class Assignment(NamedTuple):
    """Which object each anchor point is responsible for.

    Attributes:
        foreground: (B, A) bool.
        object_index: (B, A) int64 object of the point; 0 where it is background.
        labels: (B, A) int64 class of that object.
        boxes: (B, A, 4) its box, xyxy [px].
        scores: (B, A, C) float target scores, zero for background.
    """

    foreground: Tensor
    object_index: Tensor
    labels: Tensor
    boxes: Tensor
    scores: Tensor


@torch.no_grad()
def assign(
    scores: Tensor,
    boxes: Tensor,
    points: Tensor,
    object_labels: Tensor,
    object_boxes: Tensor,
    object_mask: Tensor,
    *,
    top_k: int = 10,
    alpha: float = 0.5,
    beta: float = 6.0,
    eps: float = 1e-9,
) -> Assignment:
    """Assign points to objects by score^alpha * overlap^beta.

    An object takes its ``top_k`` best points among those inside its box. A point taken by several objects goes to the
    one it overlaps most among all that contain it. The target score is the metric, scaled so that an object's best
    point gets the object's largest overlap.

    Args:
        scores: (B, A, C) predicted probabilities.
        boxes: (B, A, 4) predicted boxes, xyxy [px].
        points: (A, 2) anchor points [px].
        object_labels: (B, N) int64, 0 for padding.
        object_boxes: (B, N, 4) xyxy [px], 0 for padding.
        object_mask: (B, N) bool, False for padding.
        top_k: points an object may take.
        alpha: exponent of the score.
        beta: exponent of the overlap, which is the complete IoU, at least 0.
        eps: margin of "inside" [px], and guard of the denominator.
    """
    batch, num_points, num_classes = scores.shape
    num_objects = object_boxes.shape[1]
    if num_objects == 0:
        return Assignment(
            scores.new_zeros((batch, num_points), dtype=torch.bool),
            object_labels.new_zeros((batch, num_points)),
            object_labels.new_full((batch, num_points), num_classes),
            torch.zeros_like(boxes),
            torch.zeros_like(scores),
        )
    near, far = object_boxes[:, :, None].chunk(2, -1)
    inside = torch.cat([points - near, far - points], -1).amin(-1) > eps
    inside = inside & object_mask[..., None]

    own_scores = scores.transpose(1, 2).gather(1, object_labels[..., None].expand(-1, -1, num_points))
    zero = scores.new_zeros(())
    own_scores = torch.where(inside, own_scores, zero)
    overlaps = complete_iou(object_boxes[:, :, None], boxes[:, None]).clamp(min=0)
    overlaps = torch.where(inside, overlaps, zero)
    metric = own_scores.pow(alpha) * overlaps.pow(beta)

    best = metric.topk(min(top_k, num_points), -1).indices
    taken = torch.zeros_like(inside).scatter(-1, best, torch.ones_like(best, dtype=torch.bool)) & inside

    contested = taken.sum(1, keepdim=True) > 1
    winner = torch.zeros_like(taken).scatter(1, overlaps.argmax(1, keepdim=True), True)
    taken = torch.where(contested, winner, taken)

    foreground = taken.any(1)
    object_index = taken.to(torch.uint8).argmax(1)
    labels = object_labels.gather(1, object_index)
    target_boxes = object_boxes.gather(1, object_index[..., None].expand(-1, -1, 4))

    metric = metric * taken
    scale = (overlaps * taken).amax(-1, keepdim=True)
    strength = (metric * scale / (metric.amax(-1, keepdim=True) + eps)).amax(1)
    targets = torch.zeros_like(scores).scatter(-1, labels[..., None], 1.0)
    targets = targets * (strength * foreground)[..., None]
    return Assignment(foreground, object_index, labels, target_boxes, targets)
