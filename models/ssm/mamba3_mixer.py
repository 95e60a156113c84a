"""Mamba-3 mixer: projections, normed and biased B and C, the recurrence, output projection (arXiv:2603.15569)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from carpus.models.ssm.initial import step_bias
from carpus.models.ssm.mamba3 import Mamba3Inputs, Mamba3State, Ranks, mamba3, mamba3_step
from carpus.models.ssm.norms import RMSNorm
from carpus.runtime.errors import DataError

__all__ = ["Mamba3", "decay_rate", "num_rotations"]

DECAY_FLOOR = 1e-4
"""Slowest decay rate |A| [1/step unit]."""


def decay_rate(raw: Tensor) -> Tensor:
    """A = -(max(a, 0) + 1 / (1 - min(a, 0))), at most -1e-4: negative, smooth, linear for large a."""
    rate = raw.clamp(min=0.0) + 1.0 / (1.0 - raw.clamp(max=0.0))
    return -rate.clamp(min=DECAY_FLOOR)


def num_rotations(d_state: int, fraction: float) -> int:
    """Angles that rotate a ``fraction`` of the state.

    Raises:
        DataError: a fraction outside (0, 1], or too small for one pair.
    """
    angles = int(d_state * fraction) // 2
    if not 0.0 < fraction <= 1.0 or angles < 1:
        raise DataError(
            f"rope_fraction must be in (0, 1] and leave at least one pair of the state of {d_state}, got {fraction}"
        )
    return angles


class Mamba3(nn.Module):
    """Mamba-3 mixer for sequences and, step by step, for streams.

    Args:
        d_model: channels D.
        d_state: state size N, even.
        headdim: channels of a head P; d_model * expand must be a multiple.
        ngroups: groups of heads that share B and C.
        expand: inner width relative to d_model.
        rope_fraction: part of the state that rotates.
        mimo_rank: rank R of inputs and outputs; None for one rank without scales (SISO).
        output_norm: normalise every head before the gate.
        chunk_size: steps in a chunk of the full-sequence form.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 128,
        headdim: int = 64,
        ngroups: int = 1,
        expand: int = 2,
        rope_fraction: float = 0.5,
        mimo_rank: int | None = None,
        output_norm: bool = False,
        chunk_size: int = 64,
    ) -> None:
        super().__init__()
        inner = expand * d_model
        if inner % headdim or (inner // headdim) % ngroups or d_state % 2:
            raise DataError(
                f"Mamba-3: the inner width {inner} must be a multiple of headdim {headdim}, the heads a multiple of "
                f"ngroups {ngroups}, and d_state even, got {d_state}"
            )
        if mimo_rank is not None and mimo_rank < 1:
            raise DataError(f"Mamba-3: mimo_rank must be at least 1, or None for SISO, got {mimo_rank}")
        heads, rank = inner // headdim, mimo_rank or 1
        self.nheads, self.headdim, self.d_state, self.ngroups, self.rank = heads, headdim, d_state, ngroups, rank
        self.angles = num_rotations(d_state, rope_fraction)
        self.chunk_size = chunk_size
        shared = d_state * ngroups * rank
        self.splits = (inner, inner, shared, shared, heads, heads, heads, self.angles)

        self.dt_bias = nn.Parameter(step_bias(heads))
        self.B_bias = nn.Parameter(torch.ones(heads, rank, d_state))
        self.C_bias = nn.Parameter(torch.ones(heads, rank, d_state))
        self.mimo = mimo_rank is not None
        if self.mimo:
            self.mimo_x = nn.Parameter(torch.full((heads, rank, headdim), 1.0 / rank))
            self.mimo_z = nn.Parameter(torch.ones(heads, rank, headdim))
            self.mimo_o = nn.Parameter(torch.full((heads, rank, headdim), 1.0 / rank))
        self.D = nn.Parameter(torch.ones(heads))
        self.in_proj = nn.Linear(d_model, sum(self.splits), bias=False)
        self.B_norm = RMSNorm(d_state)
        self.C_norm = RMSNorm(d_state)
        if output_norm:
            self.norm = RMSNorm(inner)
        self.output_norm = output_norm
        self.out_proj = nn.Linear(inner, d_model, bias=False)

    def initial_state(self, batch: int) -> Mamba3State:
        """The state before the first step."""
        zeros = self.in_proj.weight.new_zeros
        return Mamba3State(
            zeros(batch, self.nheads, self.angles),
            zeros(batch, self.nheads, self.headdim, self.d_state),
            zeros(batch, self.nheads, self.rank, self.d_state),
            zeros(batch, self.nheads, self.headdim),
        )

    def forward(self, u: Tensor, state: Mamba3State | None = None) -> tuple[Tensor, Mamba3State]:
        """Mix a sequence, or its continuation from ``state``.

        Args:
            u: (B, L, D).
            state: what an earlier call returned; the start where None.

        Returns:
            (B, L, D) and the state after the last step.
        """
        y, state = mamba3(
            self._inputs(u),
            self.C_bias,
            self.B_bias,
            self.D,
            ranks=self._ranks(),
            norm_weight=self._norm_weight(),
            halves=self.mimo,
            state=state,
            chunk_size=self.chunk_size,
        )
        return self.out_proj(y.flatten(-2)), state

    def step(self, u: Tensor, state: Mamba3State) -> tuple[Tensor, Mamba3State]:
        """One step.

        Args:
            u: (B, D).
            state: of the step before.

        Returns:
            (B, D) and the new state.
        """
        y, state = mamba3_step(
            self._inputs(u),
            self.C_bias,
            self.B_bias,
            self.D,
            state=state,
            ranks=self._ranks(),
            norm_weight=self._norm_weight(),
            halves=self.mimo,
        )
        return self.out_proj(y.flatten(-2)), state

    def _inputs(self, u: Tensor) -> Mamba3Inputs:
        z, x, write, read, dt, rate, trap, angles = self.in_proj(u).split(self.splits, -1)
        heads = (self.nheads, self.headdim)
        groups = (self.rank, self.ngroups, self.d_state)
        dt = functional.softplus(dt + self.dt_bias)
        return Mamba3Inputs(
            q=self.C_norm(read.unflatten(-1, groups)),
            k=self.B_norm(write.unflatten(-1, groups)),
            v=x.unflatten(-1, heads),
            log_decay=decay_rate(rate) * dt,
            dt=dt,
            trap=trap,
            angles=angles.unsqueeze(-2).expand(*angles.shape[:-1], self.nheads, self.angles),
            gate=z.unflatten(-1, heads),
        )

    def _ranks(self) -> Ranks | None:
        return Ranks(self.mimo_x, self.mimo_z, self.mimo_o) if self.mimo else None

    def _norm_weight(self) -> Tensor | None:
        return self.norm.weight.unflatten(0, (self.nheads, self.headdim)) if self.output_norm else None
