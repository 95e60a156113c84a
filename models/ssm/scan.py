"""Selective scan (S6), "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv:2312.00752."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from carpus.models.ssm.scan_blocks import scan_blocks
from carpus.models.ssm.scan_export import scan_exported
from carpus.runtime.errors import DataError

__all__ = ["selective_scan", "selective_scan_reference"]


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = True,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Diagonal state-space recurrence whose step, input and output weights depend on the input.

    With dt = softplus(delta + delta_bias) (softplus is the identity above 20):
    h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t, y_t = <C_t, h_t> + D u_t, times silu(z_t) if z is given; h_{-1} = 0
    (arXiv:2312.00752, algorithm 2, B discretised by Euler's rule). Everything is computed in float32 at least. Works on
    any device without a compiled extension; differentiable once.

    Args:
        u: (b, E, L) inputs.
        delta: (b, E, L) step sizes before bias and softplus.
        A: (E, N) decays, negative for a stable recurrence.
        B: (b, G, N, L) input weights; channel e belongs to group e // (E / G).
        C: (b, G, N, L) output weights.
        D: (E,) skip weights.
        delta_bias: (E,).
        delta_softplus: apply softplus to the steps.
        z: (b, E, L) gate.

    Returns:
        y: (b, E, L) of u's dtype; last state: (b, E, N) float32 (float64 for float64 inputs).

    Raises:
        DataError: shapes that do not fit together.
    """
    _check(u, delta, A, B, C)
    batch, channels, length = u.shape
    groups, states = B.shape[1:3]
    wide = torch.promote_types(u.dtype, torch.float32)
    if u.is_meta:  # shapes are all there is, and one step after the other would take its time to find them
        return torch.empty_like(u), u.new_empty(batch, channels, states, dtype=wide)
    x, delta, A, B, C = (tensor.to(wide) for tensor in (u, delta, A, B, C))
    grouped = (groups, channels // groups)
    if torch.compiler.is_exporting():
        dt = _steps(delta, delta_bias, softplus=delta_softplus)
        y, last = scan_exported(
            dt.unflatten(1, grouped).permute(3, 0, 1, 2),
            (dt * x).unflatten(1, grouped).permute(3, 0, 1, 2),
            A.unflatten(0, grouped).transpose(1, 2),
            B.permute(3, 0, 1, 2),
            C.permute(3, 0, 1, 2),
        )
        y = _finish(y.permute(1, 2, 3, 0).reshape(batch, channels, length), x, D, z)
        return y.to(u.dtype), last.transpose(2, 3).reshape(batch, channels, states)
    bias, skip = (None if weights is None else weights.to(wide).unflatten(0, grouped) for weights in (delta_bias, D))
    y, last = scan_blocks(
        delta.unflatten(1, grouped).permute(1, 3, 0, 2).contiguous(),
        x.unflatten(1, grouped).permute(1, 3, 0, 2).contiguous(),
        A.unflatten(0, grouped).transpose(1, 2),
        B.permute(1, 3, 0, 2).contiguous(),
        C.permute(1, 3, 0, 2).contiguous(),
        skip,
        bias,
        softplus=delta_softplus,
    )
    y = _finish(y.permute(2, 0, 3, 1).reshape(batch, channels, length), x, None, z)
    return y.to(u.dtype), last.permute(1, 0, 3, 2).reshape(batch, channels, states)


def selective_scan_reference(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = True,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The formulas of ``selective_scan`` one step after the other: slow, for comparison.

    Arguments, results and errors are those of ``selective_scan``.
    """
    _check(u, delta, A, B, C)
    wide = torch.promote_types(u.dtype, torch.float32)
    x = u.to(wide)
    dt = _steps(delta.to(wide), delta_bias, softplus=delta_softplus)
    share = u.shape[1] // B.shape[1]
    weights_in, weights_out = (w.to(wide).repeat_interleave(share, 1) for w in (B, C))
    h = x.new_zeros(u.shape[0], *A.shape)
    outputs = []
    for t in range(u.shape[2]):
        h = torch.exp(dt[:, :, t, None] * A) * h + (dt * x)[:, :, t, None] * weights_in[..., t]
        outputs.append((h * weights_out[..., t]).sum(-1))
    return _finish(torch.stack(outputs, -1), x, D, z).to(u.dtype), h


def _steps(delta: Tensor, bias: Tensor | None, *, softplus: bool) -> Tensor:
    if bias is not None:
        delta = delta + bias[:, None].to(delta.dtype)
    return functional.softplus(delta) if softplus else delta


def _finish(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    if D is not None:
        y = y + D[:, None].to(y.dtype) * x
    return y if z is None else y * functional.silu(z.to(y.dtype))


def _check(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> None:
    if u.ndim != 3 or delta.shape != u.shape:
        raise DataError(
            "selective scan: u and delta must both be (batch, channels, length), "
            f"got {tuple(u.shape)} and {tuple(delta.shape)}"
        )
    if A.ndim != 2 or A.shape[0] != u.shape[1]:
        raise DataError(f"selective scan: A must be ({u.shape[1]} channels, states), got {tuple(A.shape)}")
    if B.ndim != 4 or B.shape != C.shape or B.shape[0] != u.shape[0] or tuple(B.shape[2:]) != (A.shape[1], u.shape[2]):
        raise DataError(
            f"selective scan: B and C must both be ({u.shape[0]}, groups, {A.shape[1]}, {u.shape[2]}), "
            f"got {tuple(B.shape)} and {tuple(C.shape)}"
        )
    if u.shape[1] % B.shape[1]:
        raise DataError(
            f"selective scan: {u.shape[1]} channels cannot be split into {B.shape[1]} equal groups; "
            "the channels must be a multiple of the groups of B and C"
        )
