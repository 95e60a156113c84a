"""Boxes as distributions over edge distances (D-FINE's fine-grained distribution refinement)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decode_edges", "distribution_table"]


def distribution_table(reg_max: int = 32, reg_scale: float = 4.0, up: float = 0.5) -> Tensor:
    """The distances W(n) that the bins of an edge stand for.

    Args:
        reg_max: number of bins minus one, even.
        reg_scale: scale of the regression.
        up: bound of the fine part, relative to ``reg_scale``.

    Returns:
        (reg_max + 1,) float32: ends at -+2b, between them s^i - 1 mirrored around zero, with b = up * reg_scale and
        s = (b + 1)^(2 / (reg_max - 2)).
    """
    bound = abs(up) * abs(reg_scale)
    step = (bound + 1.0) ** (2.0 / (reg_max - 2))
    right = [step**i - 1.0 for i in range(1, reg_max // 2)]
    values = [-2.0 * bound, *(-value for value in reversed(right)), 0.0, *right, 2.0 * bound]
    return torch.tensor(values, dtype=torch.float64).float()


def decode_edges(boxes: Tensor, distances: Tensor, reg_scale: float) -> Tensor:
    """Move the edges of base boxes.

    Args:
        boxes: (..., 4) base boxes cxcywh.
        distances: (..., 4) distances left, top, right, bottom in units of W(n).
        reg_scale: scale of the regression.

    Returns:
        (..., 4) boxes cxcywh: every edge at (reg_scale / 2 + distance) * size / reg_scale from the centre.
    """
    size = boxes[..., 2:] / reg_scale
    before, after = distances.split(2, -1)
    # corners are centre - (r + before) * size and centre + (r + after) * size with r = reg_scale / 2
    centre = boxes[..., :2] + (after - before) * (0.5 * size)
    extent = (before + after + reg_scale) * size
    return torch.cat([centre, extent], -1)
