"""A map as four sequences and back: the cross-scan of VMamba, arXiv:2401.10166, section 4.2."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DIRECTIONS", "cross_merge", "cross_scan"]

DIRECTIONS = 4
"""Row-major, column-major, and both reversed, in this order."""


def cross_scan(x: Tensor) -> Tensor:
    """Read a map in four orders.

    Args:
        x: (B, D, H, W).

    Returns:
        (B, 4, D, H * W): row by row, column by column, and both backwards.
    """
    forward = torch.stack([x.flatten(2), x.transpose(2, 3).flatten(2)], 1)
    return torch.cat([forward, forward.flip(-1)], 1)


def cross_merge(ys: Tensor, height: int, width: int) -> Tensor:
    """Sum four sequences where they visited the same position; the adjoint of ``cross_scan``.

    Args:
        ys: (B, 4, D, H * W) in the orders of ``cross_scan``.
        height: H.
        width: W.

    Returns:
        (B, D, H * W) row-major.
    """
    both = ys[:, :2] + ys[:, 2:].flip(-1)
    columns = both[:, 1].unflatten(2, (width, height)).transpose(2, 3).flatten(2)
    return both[:, 0] + columns
