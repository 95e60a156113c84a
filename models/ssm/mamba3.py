"""Mamba-3 recurrence: trapezoidal rule, rotating complex states, one or several ranks (arXiv:2603.15569, section 3).

With alpha = exp(A dt), beta = (1 - lambda) dt alpha, gamma = lambda dt and lambda = sigmoid(trap):
h_t = alpha_t h_{t-1} + beta_t sum_r v_{t-1}^r outer k_{t-1}^r + gamma_t sum_r v_t^r outer k_t^r,
y_t^r = h_t q_t^r + D v_t^r. q and k carry learned biases and are rotated by the angle accumulated so far, which equals
a complex-valued state.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from carpus.models.ssm.decay import decay_scan
from carpus.models.ssm.norms import rms_normalise
from carpus.runtime.errors import DataError

__all__ = ["Mamba3Inputs", "Mamba3State", "Ranks", "mamba3", "mamba3_step", "rotate"]


class Mamba3State(NamedTuple):
    """What the recurrence remembers between steps.

    Attributes:
        angle: (B, H, angles) accumulated rotation [rad], in [0, 2 pi).
        ssm: (B, H, P, N) state h.
        k: (B, H, R, N) last key, biased and rotated.
        v: (B, H, P) last value, before it is spread over the ranks.
    """

    angle: Tensor
    ssm: Tensor
    k: Tensor
    v: Tensor


class Ranks(NamedTuple):
    """Scales that spread values and gates over R ranks and collect the outputs (MIMO).

    Attributes:
        value: (H, R, P).
        gate: (H, R, P), or None where nothing is gated.
        out: (H, R, P).
    """

    value: Tensor
    gate: Tensor | None
    out: Tensor


class Mamba3Inputs(NamedTuple):
    """Inputs of the recurrence for a sequence; for one step without the axis L. Group g serves H / G heads.

    Attributes:
        q: (B, L, R, G, N) readers.
        k: (B, L, R, G, N) writers.
        v: (B, L, H, P) values.
        log_decay: (B, L, H), A dt, negative.
        dt: (B, L, H) step sizes, positive.
        trap: (B, L, H), lambda before its sigmoid.
        angles: (B, L, H, angles), before tanh; at most N / 2 of them.
        gate: (B, L, H, P) or None for no gate.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    dt: Tensor
    trap: Tensor
    angles: Tensor
    gate: Tensor | None


def rotate(x: Tensor, angle: Tensor, *, halves: bool) -> Tensor:
    """Rotate pairs of the last axis: (a, b) -> (a cos - b sin, a sin + b cos).

    Args:
        x: (..., N).
        angle: (..., A) [rad], A at most N / 2; pairs beyond A stay.
        halves: pair element i with i + N / 2 instead of 2i with 2i + 1.
    """
    pairs = x.shape[-1] // 2
    if angle.shape[-1] > pairs:
        raise DataError(f"Mamba-3: {angle.shape[-1]} angles need a state of twice their number, got {x.shape[-1]}")
    angle = functional.pad(angle, (0, pairs - angle.shape[-1]))
    cos, sin = torch.cos(angle), torch.sin(angle)
    a, b = x.chunk(2, -1) if halves else x.unflatten(-1, (pairs, 2)).unbind(-1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    return torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)


def mamba3(
    inputs: Mamba3Inputs,
    q_bias: Tensor,
    k_bias: Tensor,
    D: Tensor | None = None,
    *,
    ranks: Ranks | None = None,
    norm_weight: Tensor | None = None,
    halves: bool = False,
    state: Mamba3State | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Mamba3State]:
    """A whole sequence, in chunks.

    Args:
        inputs: the sequence.
        q_bias: (H, R, N).
        k_bias: (H, R, N).
        D: (H,) skip weights.
        ranks: scales of R ranks; None for a single rank without scales (SISO).
        norm_weight: (H, P), normalises every head and rank before the gate; None for no norm.
        halves: pairing of the rotation, see ``rotate``; the published MIMO mixers pair halves, SISO neighbours.
        state: where an earlier part of the sequence ended; the start where None.
        chunk_size: steps in a chunk; changes time and rounding only.

    Returns:
        (B, L, H, P) and the state after the last step.
    """
    heads, dt = inputs.v.shape[2], inputs.dt
    turn = (math.pi * torch.tanh(inputs.angles) * dt.unsqueeze(-1)).cumsum(1)
    if state is not None:
        turn = turn + state.angle.unsqueeze(1)
    angle = torch.remainder(turn, 2 * math.pi)
    q, k = (
        rotate(_per_head(w, heads) + bias, angle.unsqueeze(3), halves=halves)
        for w, bias in ((inputs.q, q_bias), (inputs.k, k_bias))
    )
    v = _spread(inputs.v, ranks)
    gamma = torch.sigmoid(inputs.trap) * dt
    # what step t gives to its predecessor, as seen after t has decayed the state
    back = torch.sigmoid(-inputs.trap) * dt
    past = gamma + functional.pad(back[:, 1:], (0, 0, 0, 1))
    start = None
    if state is not None:
        previous = _outer(_spread(state.v, ranks), state.k)
        start = state.ssm + back[:, 0, :, None, None] * previous
    y, ssm = decay_scan(q, k, v, inputs.log_decay, gamma, past, initial_state=start, chunk_size=chunk_size)
    y = _finish(y, v, D, inputs.gate, ranks, norm_weight)
    return y, Mamba3State(angle[:, -1], ssm, k[:, -1], inputs.v[:, -1])


def mamba3_step(
    inputs: Mamba3Inputs,
    q_bias: Tensor,
    k_bias: Tensor,
    D: Tensor | None = None,
    *,
    state: Mamba3State,
    ranks: Ranks | None = None,
    norm_weight: Tensor | None = None,
    halves: bool = False,
) -> tuple[Tensor, Mamba3State]:
    """One step: arguments of ``mamba3``, with inputs that lack the axis L.

    Returns:
        (B, H, P) and the new state.
    """
    heads, dt = inputs.v.shape[1], inputs.dt
    angle = torch.remainder(state.angle + math.pi * torch.tanh(inputs.angles) * dt.unsqueeze(-1), 2 * math.pi)
    q, k = (
        rotate(_per_head(w, heads) + bias, angle.unsqueeze(2), halves=halves)
        for w, bias in ((inputs.q, q_bias), (inputs.k, k_bias))
    )
    v = _spread(inputs.v, ranks)
    alpha = torch.exp(inputs.log_decay)
    beta = torch.sigmoid(-inputs.trap) * dt * alpha
    gamma = torch.sigmoid(inputs.trap) * dt
    ssm = (
        alpha[..., None, None] * state.ssm
        + beta[..., None, None] * _outer(_spread(state.v, ranks), state.k)
        + gamma[..., None, None] * _outer(v, k)
    )
    y = _finish(q @ ssm.transpose(-1, -2), v, D, inputs.gate, ranks, norm_weight)
    return y, Mamba3State(angle, ssm, k, inputs.v)


def _per_head(weights: Tensor, heads: int) -> Tensor:
    """(..., R, G, N) -> (..., H, R, N)."""
    groups = weights.shape[-2]
    if heads % groups:
        raise DataError(f"Mamba-3: {heads} heads cannot share {groups} groups equally")
    return weights.transpose(-2, -3).repeat_interleave(heads // groups, -3)


def _spread(values: Tensor, ranks: Ranks | None) -> Tensor:
    """(..., H, P) -> (..., H, R, P)."""
    values = values.unsqueeze(-2)
    return values if ranks is None else values * ranks.value


def _outer(v: Tensor, k: Tensor) -> Tensor:
    """Sum over ranks of v outer k: (B, H, R, P), (B, H, R, N) -> (B, H, P, N)."""
    return v.transpose(-1, -2) @ k


def _finish(
    y: Tensor, v: Tensor, D: Tensor | None, gate: Tensor | None, ranks: Ranks | None, norm_weight: Tensor | None
) -> Tensor:
    """Skip, norm, gate, and the ranks brought together: (..., H, R, P) -> (..., H, P)."""
    if D is not None:
        y = y + D[:, None, None] * v
    if norm_weight is not None:
        y = rms_normalise(y, norm_weight.unsqueeze(1))
    if gate is not None:
        gate = gate.unsqueeze(-2)
        y = y * functional.silu(gate if ranks is None or ranks.gate is None else gate * ranks.gate)
    return y.squeeze(-2) if ranks is None else (y * ranks.out).sum(-2)
