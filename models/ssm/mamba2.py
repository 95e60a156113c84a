"""Mamba-2: scalar decays per head (SSD), "Transformers are SSMs", arXiv:2405.21060."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from carpus.models.ssm.decay import decay_scan
from carpus.models.ssm.initial import step_bias
from carpus.models.ssm.norms import GatedRMSNorm
from carpus.runtime.errors import DataError

__all__ = ["Mamba2", "Mamba2State", "ssd", "ssd_step"]


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """S_t = exp(dt_t A_h) S_{t-1} + dt_t x_t outer B_t, y_t = S_t C_t + D_h x_t, times silu(z_t) if z is given.

    Args:
        x: (B, L, H, P) inputs.
        dt: (B, L, H) step sizes, before bias and softplus.
        A: (H,) decays, negative.
        B: (B, L, G, N) input weights; head h belongs to group h // (H / G).
        C: (B, L, G, N) output weights.
        D: (H,) skip weights.
        z: (B, L, H, P) gate.
        dt_bias: (H,).
        dt_softplus: apply softplus to the steps.
        initial_state: (B, H, P, N); zeros where None.
        chunk_size: steps in a chunk; changes time and rounding only.

    Returns:
        (B, L, H, P) outputs and the (B, H, P, N) last state.

    Raises:
        DataError: heads that the groups do not divide.
    """
    heads = x.shape[2]
    dt = _steps(dt, dt_bias, softplus=dt_softplus)
    y, state = decay_scan(
        _per_head(C, heads).unsqueeze(3),
        _per_head(B, heads).unsqueeze(3),
        x.unsqueeze(3),
        dt * A,
        dt,
        initial_state=initial_state,
        chunk_size=chunk_size,
    )
    return _finish(y.squeeze(3), x, D, z), state


def ssd_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    state: Tensor,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """One step of ``ssd``: its arguments without the length axis, and the (B, H, P, N) state.

    Returns:
        (B, H, P) output and the new state.
    """
    heads = x.shape[1]
    dt = _steps(dt, dt_bias, softplus=dt_softplus)
    read, write = (_per_head(w.unsqueeze(1), heads).squeeze(1) for w in (C, B))
    state = torch.exp(dt * A)[..., None, None] * state + (dt.unsqueeze(-1) * x).unsqueeze(-1) * write.unsqueeze(-2)
    return _finish((state @ read.unsqueeze(-1)).squeeze(-1), x, D, z), state


def _steps(dt: Tensor, bias: Tensor | None, *, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias
    return functional.softplus(dt) if softplus else dt


def _per_head(weights: Tensor, heads: int) -> Tensor:
    """(B, L, G, N) -> (B, L, H, N)."""
    if heads % weights.shape[2]:
        raise DataError(f"{heads} heads cannot share {weights.shape[2]} groups of B and C equally")
    return weights.repeat_interleave(heads // weights.shape[2], 2)


def _finish(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    if D is not None:
        y = y + D[:, None] * x
    return y if z is None else y * functional.silu(z)


class Mamba2State(NamedTuple):
    """What a ``Mamba2`` mixer remembers between steps.

    Attributes:
        window: (B, conv_size - 1, channels) last inputs of the convolution.
        ssm: (B, H, P, N).
    """

    window: Tensor
    ssm: Tensor


class Mamba2(nn.Module):
    """Mamba-2 mixer: projection, short causal convolution, SSD, gated norm, projection (arXiv:2405.21060, figure 6).

    Args:
        d_model: channels D.
        d_state: state size N.
        headdim: channels of a head P; d_model * expand must be a multiple.
        ngroups: groups of heads that share B and C.
        expand: inner width relative to d_model.
        conv_size: taps of the causal depthwise convolution.
        chunk_size: steps in a chunk of the full-sequence form.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        headdim: int = 64,
        ngroups: int = 1,
        expand: int = 2,
        conv_size: int = 4,
        chunk_size: int = 64,
    ) -> None:
        super().__init__()
        inner = expand * d_model
        if inner % headdim or (inner // headdim) % ngroups:
            raise DataError(
                f"Mamba-2: the inner width {inner} must be a multiple of headdim {headdim}, "
                f"and the heads a multiple of ngroups {ngroups}"
            )
        heads = inner // headdim
        self.d_state, self.headdim, self.ngroups, self.nheads = d_state, headdim, ngroups, heads
        self.chunk_size = chunk_size
        mixed = inner + 2 * ngroups * d_state
        self.splits = (inner, mixed, heads)
        self.in_proj = nn.Linear(d_model, sum(self.splits), bias=False)
        self.conv1d = nn.Conv1d(mixed, mixed, conv_size, groups=mixed)
        self.dt_bias = nn.Parameter(step_bias(heads))
        # decays start uniform in 1..16
        self.A_log = nn.Parameter(torch.log(1.0 + 15.0 * torch.rand(heads)))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GatedRMSNorm(inner)
        self.out_proj = nn.Linear(inner, d_model, bias=False)

    def initial_state(self, batch: int) -> Mamba2State:
        """The state before the first step."""
        weight = self.in_proj.weight
        return Mamba2State(
            weight.new_zeros(batch, self.conv1d.kernel_size[0] - 1, self.conv1d.in_channels),
            weight.new_zeros(batch, self.nheads, self.headdim, self.d_state),
        )

    def forward(self, u: Tensor, state: Mamba2State | None = None) -> tuple[Tensor, Mamba2State]:
        """Mix a sequence, or its continuation from ``state``.

        Args:
            u: (B, L, D).
            state: what an earlier call returned; the start where None.

        Returns:
            (B, L, D) and the state after the last step.
        """
        state = self.initial_state(len(u)) if state is None else state
        gate, mixed, dt = self.in_proj(u).split(self.splits, -1)
        window = torch.cat([state.window, mixed], 1)
        x, write, read = self._parts(functional.silu(self.conv1d(window.transpose(1, 2)).transpose(1, 2)))
        y, ssm = ssd(
            x,
            dt,
            -torch.exp(self.A_log),
            write,
            read,
            self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            initial_state=state.ssm,
            chunk_size=self.chunk_size,
        )
        taps = state.window.shape[1]
        return self.out_proj(self.norm(y.flatten(2), gate)), Mamba2State(window[:, window.shape[1] - taps :], ssm)

    def step(self, u: Tensor, state: Mamba2State) -> tuple[Tensor, Mamba2State]:
        """One step.

        Args:
            u: (B, D).
            state: of the step before.

        Returns:
            (B, D) and the new state.
        """
        gate, mixed, dt = self.in_proj(u).split(self.splits, -1)
        window = torch.cat([state.window, mixed.unsqueeze(1)], 1)
        x, write, read = self._parts(functional.silu(self.conv1d(window.transpose(1, 2)).squeeze(2)))
        y, ssm = ssd_step(
            x,
            dt,
            -torch.exp(self.A_log),
            write,
            read,
            self.D,
            state=state.ssm,
            dt_bias=self.dt_bias,
            dt_softplus=True,
        )
        return self.out_proj(self.norm(y.flatten(1), gate)), Mamba2State(window[:, 1:], ssm)

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., channels) -> x (..., H, P), B and C (..., G, N)."""
        shared = self.ngroups * self.d_state
        x, write, read = mixed.split((self.splits[0], shared, shared), -1)
        groups = (self.ngroups, self.d_state)
        return x.unflatten(-1, (self.nheads, self.headdim)), write.unflatten(-1, groups), read.unflatten(-1, groups)
