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
SEGMENT_BLOCKS = 8
"""Blocks whose step sizes and inputs, which have no axis of states, are worked on together."""


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


def _segments(length: int, steps: int) -> list[slice]:
    size = steps * SEGMENT_BLOCKS
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _per_step(weights: Tensor) -> Tensor:
    """(G, ...) -> (G, 1, 1, ...): along steps and batch."""
    return weights[:, None, None]


class _Block:
    """Buffers of a block's decays and states, and views of their steps."""

    def __init__(self, A: Tensor, steps: int, batch: int) -> None:
        shape = (A.shape[0], steps, batch, *A.shape[1:])
        self.decays, self.states = A.new_empty(shape), A.new_empty(shape)
        self.decay_steps, self.state_steps = self.decays.unbind(1), self.states.unbind(1)
        # exp2 is several times faster than exp on a CPU
        self._exponent = _per_step(A / math.log(2.0))

    def run(self, dt: Tensor, x: Tensor, B: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Decays and states from the state ``before``; arguments have axes (G, steps, b, N, d)."""
        count = dt.shape[1]
        a, h = self.decays[:, :count], self.states[:, :count]
        torch.mul(dt, self._exponent, out=a).exp2_()
        torch.mul(x, B, out=h)
        for a_t, h_t in zip(self.decay_steps[:count], self.state_steps, strict=False):
            before = h_t.addcmul_(a_t, before)
        return a, h


def _forward(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, Tensor | None, Tensor | None],
    softplus: bool,
    y: Tensor,
    keep: tuple[Tensor, list[Tensor]] | None,
) -> Tensor:
    """Fill ``y`` and what to ``keep``, the step sizes and the state before each block; return the last state."""
    A, D, bias = weights
    groups, length, batch, _ = y.shape
    steps = _steps(y, A)
    last = A.new_zeros(groups, batch, *A.shape[1:])
    buffers = _Block(A, steps, batch)
    for segment in _segments(length, steps):
        dt, u, B, C = (t[:, segment] for t in inputs)
        if bias is not None:
            dt = dt + _per_step(bias)
        if softplus:
            dt = functional.softplus(dt)
        rows = (dt.unsqueeze(3), (dt * u).unsqueeze(3), B.unsqueeze(4), C.unsqueeze(4))
        outputs = y[:, segment]
        for dt_block, x, write, read, y_block in zip(*(t.split(steps, 1) for t in (*rows, outputs)), strict=True):
            if keep is not None:
                keep[1].append(last.clone())
            a, h = buffers.run(dt_block, x, write, last)
            last.copy_(h[:, -1])
            torch.sum(torch.mul(h, read, out=a), 3, out=y_block)
        if D is not None:
            outputs.addcmul_(u, _per_step(D))
        if keep is not None:
            keep[0][:, segment] = dt
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
    _, length, batch, _ = inputs[0].shape
    steps = _steps(inputs[0], A)
    rate = _per_step(A)
    buffers = _Block(A, steps, batch)
    g_buffer, product = (torch.empty_like(buffers.states) for _ in range(2))
    g_steps = g_buffer.unbind(1)
    # carry = a_{t+1} g_{t+1}: what the future hands back to h_t
    carry = grads[1].clone()
    left = list(starts)
    for segment in reversed(_segments(length, steps)):
        dt, u, B, C = (t[:, segment] for t in inputs)
        grad_delta, grad_u, grad_B, grad_C = (t[:, segment] for t in out)
        dy = grads[0][:, segment]
        rows = (t.unsqueeze(3) for t in (dt, dt * u, dy))
        blocks = [
            t.split(steps, 1) for t in (*rows, B.unsqueeze(4), C.unsqueeze(4), grad_delta, grad_u, grad_B, grad_C)
        ]
        for dt_block, x, dy_block, write, read, grad_dt, grad_x, grad_write, grad_read in zip(
            *(reversed(t) for t in blocks), strict=True
        ):
            count = dt_block.shape[1]
            start = left.pop()
            a, h = buffers.run(dt_block, x, write, start)
            g, p = g_buffer[:, :count], product[:, :count]

            torch.mul(dy_block, read, out=g)
            g_next = g_steps[count - 1].add_(carry)
            for t in range(count - 2, -1, -1):
                g_next = g_steps[t].addcmul_(buffers.decay_steps[t + 1], g_next)
            torch.mul(buffers.decay_steps[0], g_next, out=carry)

            # products and sums, as matrices times vectors are slow in batches
            torch.sum(torch.mul(h, dy_block, out=p), 4, out=grad_read)
            torch.sum(torch.mul(g, x, out=p), 4, out=grad_write)
            torch.sum(torch.mul(g, write, out=p), 3, out=grad_x)
            # gradient of the exponent dt A: a h_{t-1} g
            exponent = g.mul_(a)
            exponent[:, 0].mul_(start)
            exponent[:, 1:].mul_(h[:, :-1])
            torch.sum(torch.mul(exponent, rate, out=p), 3, out=grad_dt)
            grad_A += exponent.mul_(dt_block).sum((1, 2))

        grad_delta.addcmul_(u, grad_u)
        if softplus:
            # its derivative, a sigmoid of its argument, is 1 - exp(-dt)
            grad_delta.mul_(torch.neg(dt).expm1_().neg_())
        grad_bias += grad_delta.sum((1, 2))
        grad_u.mul_(dt)
        if D is not None:
            grad_u.addcmul_(dy, _per_step(D))
            grad_D += (dy * u).sum((1, 2))
