"""The recurrence of the selective scan with its exact gradient, in blocks that stay in the processor's cache.

Only the decays exp(dt A) and states of one block of steps exist at a time; within a block everything but one fused
multiply-add per step works on the whole block. The backward pass keeps the state at each block's start and computes the
others again, so memory is linear in length without a factor of the state's size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["scan_blocks"]

BLOCK_ELEMENTS = 1 << 17
"""State elements (steps x channels x states) in a block: its few buffers fit a core's second-level cache."""
MIN_STEPS = 4
"""Fewest steps in a block; larger batches are scanned in parts before blocks get shorter."""


def scan_blocks(dt: Tensor, x: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + x_t B_t, y_t = <C_t, h_t>, h_{-1} = 0; time is the first axis.

    Args:
        dt: (L, b, G, d) step sizes.
        x: (L, b, G, d) inputs, already multiplied by the step.
        A: (G, N, d) continuous-time decays.
        B: (L, b, G, N) input weights.
        C: (L, b, G, N) output weights.

    Returns:
        (L, b, G, d) outputs and the (b, G, N, d) last state. Gradients are of first order only.
    """
    return _Scan.apply(dt, x, A, B, C)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dt: Tensor, x: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        dt, x, A, B, C = (tensor.contiguous() for tensor in (dt, x, A, B, C))
        keep = any(ctx.needs_input_grad)
        y = torch.empty_like(x)
        parts = []
        starts: list[Tensor] = []
        for rows in _parts(x, A):
            part, boundary = _forward(dt[:, rows], x[:, rows], A, B[:, rows], C[:, rows], y[:, rows], keep=keep)
            parts.append(part)
            starts += boundary
        ctx.save_for_backward(dt, x, A, B, C, *starts)
        return y, torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        grad_y, grad_last = grads
        dt, x, A, B, C, *starts = ctx.saved_tensors
        grad_y = grad_y.contiguous()
        out = tuple(torch.empty_like(tensor) for tensor in (dt, x, B, C))
        grad_A = torch.zeros_like(A)
        first = 0
        for rows in _parts(x, A):
            count = -(-len(x) // _steps(x[:, rows], A))
            _backward(
                (dt[:, rows], x[:, rows], A, B[:, rows], C[:, rows]),
                starts[first : first + count],
                grad_y[:, rows],
                grad_last[rows],
                tuple(tensor[:, rows] for tensor in out),
                grad_A,
            )
            first += count
        return out[0], out[1], grad_A, out[2], out[3]


def _parts(x: Tensor, A: Tensor) -> list[slice]:
    """The batch in parts whose state leaves room for ``MIN_STEPS`` steps in a block."""
    batch = x.shape[1]
    size = max(1, BLOCK_ELEMENTS // (MIN_STEPS * A.numel()))
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


def _steps(x: Tensor, A: Tensor) -> int:
    """Steps in a block."""
    return max(1, min(len(x), BLOCK_ELEMENTS // max(1, A.numel() * x.shape[1])))


def _states(a: Tensor, states: Tensor, before: Tensor) -> Tensor:
    """Run the recurrence over a block: ``states`` holds x B on entry and h on return; gives the last h."""
    h = before
    for a_t, h_t in zip(a.unbind(), states.unbind(), strict=True):
        h = torch.addcmul(h_t, a_t, h, out=h_t)
    return h


def _forward(
    dt: Tensor, x: Tensor, A: Tensor, B: Tensor, C: Tensor, y: Tensor, *, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    """Fill ``y``; returns the last state and, with ``keep``, the state before each block."""
    length, steps = len(x), _steps(x, A)
    h = x.new_zeros(x.shape[1], *A.shape)
    a_buffer, h_buffer = x.new_empty(steps, *h.shape), x.new_empty(steps, *h.shape)
    starts = []
    for start in range(0, length, steps):
        block = slice(start, min(start + steps, length))
        count = block.stop - block.start
        if keep:
            starts.append(h.clone())
        a, states = a_buffer[:count], h_buffer[:count]
        torch.mul(dt[block].unsqueeze(3), A, out=a).exp_()
        torch.mul(x[block].unsqueeze(3), B[block].unsqueeze(4), out=states)
        h = _states(a, states, h).clone()
        y[block] = torch.matmul(C[block].unsqueeze(3), states).squeeze(3)
    return h, starts


def _backward(
    inputs: tuple[Tensor, ...],
    starts: list[Tensor],
    grad_y: Tensor,
    grad_last: Tensor,
    out: tuple[Tensor, ...],
    grad_A: Tensor,
) -> None:
    """Fill the gradients ``out`` of dt, x, B, C and add to ``grad_A``; blocks from the last to the first."""
    dt, x, A, B, C = inputs
    grad_dt, grad_x, grad_B, grad_C = out
    length, steps = len(x), _steps(x, A)
    shape = (x.shape[1], *A.shape)
    a_buffer, h_buffer, g_buffer = (x.new_empty(n, *shape) for n in (steps, steps + 1, steps))
    # carry = a_{t+1} g_{t+1}: what the future hands back to h_t
    carry = grad_last.clone()
    for index in reversed(range(len(starts))):
        block = slice(index * steps, min((index + 1) * steps, length))
        count = block.stop - block.start
        a, states, g = a_buffer[:count], h_buffer[1 : count + 1], g_buffer[:count]
        h_buffer[0].copy_(starts[index])
        torch.mul(dt[block].unsqueeze(3), A, out=a).exp_()
        torch.mul(x[block].unsqueeze(3), B[block].unsqueeze(4), out=states)
        _states(a, states, h_buffer[0])

        dy = grad_y[block]
        torch.mul(dy.unsqueeze(3), C[block].unsqueeze(4), out=g)
        g_next = g[-1].add_(carry)
        for a_next, g_t in zip(reversed(a[1:].unbind()), reversed(g[:-1].unbind()), strict=True):
            g_next = torch.addcmul(g_t, a_next, g_next, out=g_t)
        carry = torch.mul(a[0], g[0])
        grad_C[block] = torch.matmul(states, dy.unsqueeze(4)).squeeze(4)
        grad_B[block] = torch.matmul(g, x[block].unsqueeze(4)).squeeze(4)
        grad_x[block] = torch.matmul(B[block].unsqueeze(3), g).squeeze(3)
        # gradient of the exponent dt A
        exponent = a.mul_(h_buffer[:count]).mul_(g)
        grad_dt[block] = torch.mul(exponent, A, out=g).sum(3)
        grad_A += exponent.mul_(dt[block].unsqueeze(3)).sum((0, 1))
