"""What every YOLO detector takes and returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from carpus.models.losses.boxes import box_xyxy_to_cxcywh
from carpus.models.yolo.head import Detect
from carpus.runtime.errors import DataError

__all__ = ["check_images", "eval_outputs"]


def check_images(family: str, images: Tensor) -> None:
    """Refuse what the network cannot take.

    Raises:
        DataError: not (B, 3, H, W), or sides that are not multiples of 32 px.
    """
    if images.dim() != 4 or images.shape[1] != 3 or images.shape[2] % 32 or images.shape[3] % 32:
        raise DataError(
            f"{family} input must be (B, 3, H, W) with H and W multiples of 32 px, got {tuple(images.shape)}"
        )


def eval_outputs(head: Detect, raw: Sequence[Tensor], images: Tensor) -> dict[str, Tensor]:
    """Decoded outputs in the form that all detectors share.

    Args:
        head: head that made the maps.
        raw: its level maps.
        images: (B, 3, H, W) input of the network.

    Returns:
        {"pred_logits": (B, A, C), "pred_boxes": (B, A, 4) cxcywh in units of the input}: all A positions, before
        non-maximum suppression. A box may reach beyond 0..1.
    """
    boxes, logits = head.decode(raw)
    height, width = images.shape[-2:]
    size = torch.tensor([width, height, width, height], dtype=boxes.dtype, device=boxes.device)
    return {"pred_logits": logits, "pred_boxes": box_xyxy_to_cxcywh(boxes) / size}
