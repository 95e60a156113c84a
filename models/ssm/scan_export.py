"""The recurrence of the selective scan as one looping operator, for graphs that are exported (ONNX: Scan)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["scan_exported"]


def scan_exported(dt: Tensor, x: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Arguments and results of ``scan_blocks``; only while ``torch.export`` traces, for any length.

    The decays travel as a second state that does not change: OpenVINO refuses loop bodies that read outer values, and
    computes products wrongly whose first factor is the slice of a scanned input, so states come first in the body.
    """
    from torch._higher_order_ops.scan import scan

    def step(carry: tuple[Tensor, Tensor], now: tuple[Tensor, ...]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, decay = carry
        dt_t, x_t, in_t, out_t = now
        h = h * torch.exp(decay * dt_t.unsqueeze(2)) + x_t.unsqueeze(2) * in_t.unsqueeze(3)
        return (h, decay.clone()), torch.matmul(out_t.unsqueeze(2), h).squeeze(2)

    # (B, G, N, d) zeros without a batch size computed in the graph
    start = x[0].unsqueeze(2) * x.new_zeros(A.shape[1], 1)
    (last, _), y = scan(step, (start, A), (dt, x, B, C))
    return y, last
