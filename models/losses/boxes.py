"""Box arithmetic of the DETR family: corner and centre forms, IoU, generalised IoU.

Every function takes float tensors `(..., 4)` and broadcasts over the leading dimensions. Boxes are relative to the
image (0..1), but nothing here depends on that. Degenerate boxes (no area) give IoU 0 and finite gradients, never NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "SMALLEST_AREA",
    "box_cxcywh_to_xyxy",
    "box_xyxy_to_cxcywh",
    "exact_inverse_sigmoid",
    "inverse_sigmoid",
    "iou_and_giou",
    "paired_iou",
]

SMALLEST_AREA = 1e-12
"""Areas below this count as this in a denominator."""


def box_cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """Convert `(..., 4)` centre, size boxes to corners; a negative size counts as zero."""
    centre, half = boxes[..., :2], boxes[..., 2:].clamp(min=0.0) * 0.5
    return torch.cat((centre - half, centre + half), dim=-1)


def box_xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """Convert `(..., 4)` corner boxes to centre, size."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.cat(((low + high) / 2, high - low), dim=-1)


def inverse_sigmoid(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Logit of `x` clipped to [0, 1], with both sides of the ratio kept at least `eps`."""
    x = x.clip(min=0.0, max=1.0)
    return torch.log(x.clip(min=eps) / (1 - x).clip(min=eps))


def exact_inverse_sigmoid(x: Tensor, eps: float = 1e-5) -> Tensor:
    """As `inverse_sigmoid`, with the logarithm rounded correctly: the same bits on every machine (no gradient needed).

    The float32 logarithm of torch differs by one unit in the last place between processors.
    """
    x = x.clip(min=0.0, max=1.0)
    return torch.log((x.clip(min=eps) / (1 - x).clip(min=eps)).to(torch.float64)).to(x.dtype)


def iou_and_giou(a_xyxy: Tensor, b_xyxy: Tensor) -> tuple[Tensor, Tensor]:
    """IoU and generalised IoU of corner boxes, broadcast over the leading dimensions.

    For all pairs pass `a[..., :, None, :]` and `b[..., None, :, :]`. Source: Rezatofighi et al., "Generalized
    Intersection over Union", 2019, algorithm 1.
    """
    a_low, a_high = a_xyxy[..., :2], a_xyxy[..., 2:]
    b_low, b_high = b_xyxy[..., :2], b_xyxy[..., 2:]
    overlap = (torch.minimum(a_high, b_high) - torch.maximum(a_low, b_low)).clamp(min=0.0)
    hull = torch.maximum(a_high, b_high) - torch.minimum(a_low, b_low)
    a_size, b_size = a_high - a_low, b_high - b_low
    intersection = overlap[..., 0] * overlap[..., 1]
    union = a_size[..., 0] * a_size[..., 1] + b_size[..., 0] * b_size[..., 1] - intersection
    hull_area = hull[..., 0] * hull[..., 1]
    iou = intersection / union.clamp(min=SMALLEST_AREA)
    giou = iou - (hull_area - union) / hull_area.clamp(min=SMALLEST_AREA)
    return iou, giou


def paired_iou(a_cxcywh: Tensor, b_cxcywh: Tensor) -> Tensor:
    """IoU `(...)` of centre, size boxes that correspond one to one."""
    return iou_and_giou(box_cxcywh_to_xyxy(a_cxcywh), box_cxcywh_to_xyxy(b_cxcywh))[0]
