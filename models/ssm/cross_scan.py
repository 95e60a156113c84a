"""A map as four sequences and back: the cross-scan of VMamba, arXiv:2401.10166, section 4.2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["DIRECTIONS", "cross_merge", "cross_merge_steps", "cross_scan", "cross_scan_steps"]

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


def cross_scan_steps(x: Tensor) -> Tensor:
    """``cross_scan`` with steps before channels, which moves whole pixels: much faster on a CPU.

    Args:
        x: (H, W, B, D).

    Returns:
        (4, H * W, B, D).
    """
    return _CrossScan.apply(x)


def cross_merge_steps(ys: Tensor, height: int, width: int) -> Tensor:
    """``cross_merge`` with steps before channels; the adjoint of ``cross_scan_steps``.

    Args:
        ys: (4, H * W, B, D).
        height: H.
        width: W.

    Returns:
        (H, W, B, D).
    """
    return _CrossMerge.apply(ys, height, width)


def _spread(x: Tensor) -> Tensor:
    height, width = x.shape[:2]
    sequences = x.new_empty(DIRECTIONS, height * width, *x.shape[2:])
    sequences[0].unflatten(0, (height, width)).copy_(x)
    sequences[1].unflatten(0, (width, height)).copy_(x.transpose(0, 1))
    backwards = torch.arange(height * width - 1, -1, -1, device=x.device)
    for forward in (0, 1):
        torch.index_select(sequences[forward], 0, backwards, out=sequences[forward + 2])
    return sequences


def _collect(ys: Tensor, height: int, width: int) -> Tensor:
    backwards = torch.arange(height * width - 1, -1, -1, device=ys.device)
    rows, columns = (ys[forward] + ys[forward + 2].index_select(0, backwards) for forward in (0, 1))
    return rows.unflatten(0, (height, width)).add_(columns.unflatten(0, (width, height)).transpose(0, 1))


class _CrossScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape[:2]
        return _spread(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _collect(grads[0], *ctx.size)


class _CrossMerge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ys: Tensor, height: int, width: int) -> Tensor:
        ctx.size = (height, width)
        return _collect(ys, height, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _spread(grads[0]), None, None
