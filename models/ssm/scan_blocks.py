"""The selective scan with its exact gradient, in blocks of steps that stay in the processor's cache.

Only the decays exp(dt A) and states of one block exist at a time; within a block everything but one fused multiply-add
per step works on the whole block. The backward pass keeps the state at each block's start and computes the others
again, so memory is linear in length without a factor of the state's size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["scan_blocks"]

BLOCK_ELEMENTS = 1 << 18
"""State elements (steps x batch x channels x states) in a block: few enough for its buffers to stay in cache."""
MIN_STEPS = 4
"""Fewest steps in a block; larger batches are scanned in parts before blocks get shorter."""


def scan_blocks(
    delta: Tensor,
    u: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    softplus: bool = True,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t, y_t = <C_t, h_t> + D u_t; h_{-1} = 0, dt = softplus(delta + bias).

    Args:
        delta: (G, L, b, d) step sizes before bias and softplus.
        u: (G, L, b, d) inputs.
        A: (G, N, d) continuous-time decays.
        B: (G, L, b, N) input weights.
        C: (G, L, b, N) output weights.
        D: (G, d) skip weights.
        bias: (G, d) added to the step sizes.
        softplus: apply softplus to the steps.

    Returns:
        (G, L, b, d) outputs and the (G, b, N, d) last state. Gradients are of first order only.
    """
    if u.is_meta:  # shapes are all there is, and one step after the other would take its time to find them
        return torch.empty_like(u), u.new_empty(u.shape[0], u.shape[2], *A.shape[1:])
    return _Scan.apply(delta, u, A, B, C, D, bias, softplus)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        delta: Tensor,
        u: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        bias: Tensor | None,
        softplus: bool,
    ) -> tuple[Tensor, Tensor]:
        keep = any(ctx.needs_input_grad)
        y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
        dt = torch.empty_like(y) if keep else None
        starts: list[Tensor] = []
        last = u.new_empty(u.shape[0], u.shape[2], *A.shape[1:])
        for rows in _parts(u, A):
            last[:, rows] = _forward(
                tuple(t[:, :, rows] for t in (delta, u, B, C)),
                (A, D, bias),
                softplus,
                y[:, :, rows],
                (dt[:, :, rows], starts) if dt is not None else None,
            )
        if dt is not None:
            ctx.save_for_backward(dt, u, B, C, A, D, *starts)
            ctx.softplus, ctx.biased = softplus, bias is not None
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_y, grad_last = grads
        dt, u, B, C, A, D, *starts = ctx.saved_tensors
        inputs = (dt, u, B, C)
        out = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs)
        grad_A, grad_D, grad_bias = torch.zeros_like(A), torch.zeros_like(A[:, 0]), torch.zeros_like(A[:, 0])
        first = 0
        for rows in _parts(u, A):
            count = -(-u.shape[1] // _steps(u[:, :, rows], A))
            _backward(
                tuple(t[:, :, rows] for t in inputs),
                (A, D),
                ctx.softplus,
                starts[first : first + count],
                (grad_y[:, :, rows], grad_last[:, rows]),
                tuple(t[:, :, rows] for t in out),
                (grad_A, grad_D, grad_bias),
            )
            first += count
        grad_delta, grad_u, grad_B, grad_C = out
        shared = (None if D is None else grad_D, grad_bias if ctx.biased else None)
        return grad_delta, grad_u, grad_A, grad_B, grad_C, *shared, None


def _parts(u: Tensor, A: Tensor) -> list[slice]:
    """The batch in parts whose state leaves room for ``MIN_STEPS`` steps in a block."""
    batch = u.shape[2]
    size = max(1, BLOCK_ELEMENTS // (MIN_STEPS * max(1, A.numel())))
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


def _steps(u: Tensor, A: Tensor) -> int:
    """Steps in a block."""
    return max(1, min(u.shape[1], BLOCK_ELEMENTS // max(1, A.numel() * u.shape[2])))


def _blocks(length: int, steps: int) -> list[slice]:
    return [slice(start, min(start + steps, length)) for start in range(0, length, steps)]


def _per_step(weights: Tensor) -> Tensor:
    """(G, ...) -> (G, 1, 1, ...): along steps and batch."""
    return weights[:, None, None]


def _states(dt: Tensor, x: Tensor, A: Tensor, B: Tensor, before: Tensor, a: Tensor, h: Tensor) -> Tensor:
    """Fill a block's decays ``a`` and states ``h`` from the state ``before``; gives the last one, a part of ``h``."""
    # exp2 is several times faster than exp on a CPU
    torch.mul(dt.unsqueeze(3), _per_step(A / math.log(2.0)), out=a).exp2_()
    torch.mul(x.unsqueeze(3), B.unsqueeze(4), out=h)
    for a_t, h_t in zip(a.unbind(1), h.unbind(1), strict=True):
        before = h_t.addcmul_(a_t, before)
    return before


def _forward(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, Tensor | None, Tensor | None],
    softplus: bool,
    y: Tensor,
    keep: tuple[Tensor, list[Tensor]] | None,
) -> Tensor:
    """Fill ``y`` and what to ``keep``, the step sizes and the state before each block; return the last state."""
    delta, u, B, C = inputs
    A, D, bias = weights
    groups, length, batch, _ = u.shape
    steps = _steps(u, A)
    last = u.new_zeros(groups, batch, *A.shape[1:])
    a_buffer, h_buffer = (u.new_empty(groups, steps, *last.shape[1:]) for _ in range(2))
    for block in _blocks(length, steps):
        count = block.stop - block.start
        dt = delta[:, block] if bias is None else delta[:, block] + _per_step(bias)
        if softplus:
            dt = functional.softplus(dt)
        if keep is not None:
            keep[0][:, block] = dt
            keep[1].append(last.clone())
        h = h_buffer[:, :count]
        last.copy_(_states(dt, dt * u[:, block], A, B[:, block], last, a_buffer[:, :count], h))
        read = torch.matmul(C[:, block].unsqueeze(3), h).squeeze(3)
        y[:, block] = read if D is None else read.addcmul_(u[:, block], _per_step(D))
    return last


def _backward(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, Tensor | None],
    softplus: bool,
    starts: list[Tensor],
    grads: tuple[Tensor, Tensor],
    out: tuple[Tensor, ...],
    shared: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill the gradients ``out`` of delta, u, B, C and add to those of A, D and the bias, ``shared``."""
    A, D = weights
    grad_A, grad_D, grad_bias = shared
    groups, length, batch, _ = inputs[0].shape
    steps = _steps(inputs[0], A)
    size = (batch, *A.shape[1:])
    a_buffer, h_buffer, g_buffer, product = (A.new_empty(groups, n, *size) for n in (steps, steps + 1, steps, steps))
    # carry = a_{t+1} g_{t+1}: what the future hands back to h_t
    carry = grads[1].clone()
    for start, block in zip(reversed(starts), reversed(_blocks(length, steps)), strict=True):
        count = block.stop - block.start
        a, h, g, p = (t[:, :count] for t in (a_buffer, h_buffer[:, 1:], g_buffer, product))
        dt, u, B, C = (t[:, block] for t in inputs)
        grad_delta, grad_u, grad_B, grad_C = (t[:, block] for t in out)
        dy = grads[0][:, block]
        x = dt * u
        _states(dt, x, A, B, h_buffer[:, 0].copy_(start), a, h)

        torch.mul(dy.unsqueeze(3), C.unsqueeze(4), out=g)
        g_next = g[:, -1].add_(carry)
        for a_next, g_t in zip(reversed(a[:, 1:].unbind(1)), reversed(g[:, :-1].unbind(1)), strict=True):
            g_next = g_t.addcmul_(a_next, g_next)
        torch.mul(a[:, 0], g_next, out=carry)

        # products and sums, as matrices times vectors are slow in batches
        torch.sum(torch.mul(h, dy.unsqueeze(3), out=p), 4, out=grad_C)
        torch.sum(torch.mul(g, x.unsqueeze(3), out=p), 4, out=grad_B)
        grad_x = torch.matmul(B.unsqueeze(3), g).squeeze(3)
        # gradient of the exponent dt A
        exponent = a.mul_(h_buffer[:, :count]).mul_(g)
        grad_dt = torch.mul(exponent, _per_step(A), out=p).sum(3).addcmul_(u, grad_x)
        grad_A += exponent.mul_(dt.unsqueeze(3)).sum((1, 2))

        if softplus:
            # its derivative, a sigmoid of its argument, is 1 - exp(-dt)
            grad_dt.mul_(torch.expm1(-dt).neg_())
        grad_delta.copy_(grad_dt)
        grad_bias += grad_dt.sum((1, 2))
        torch.mul(grad_x, dt, out=grad_u)
        if D is not None:
            grad_u.addcmul_(dy, _per_step(D))
            grad_D += (dy * u).sum((1, 2))
