"""Two-dimensional state-space mixing: four scans of a map, merged and gated (SS2D, VMamba, arXiv:2401.10166).

The scan is a part of its own: the selective scan, whose names are those of the published weights, or the recurrence of
Mamba-3 in its place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from carpus.models.mamba_yolo.config import ScanConfig
from carpus.models.ssm.cross_scan import DIRECTIONS, cross_merge, cross_merge_steps, cross_scan, cross_scan_steps
from carpus.models.ssm.initial import step_bias
from carpus.models.ssm.mamba3 import Mamba3Inputs, mamba3
from carpus.models.ssm.mamba3_mixer import decay_rate, num_rotations
from carpus.models.ssm.norms import RMSNorm
from carpus.models.ssm.scan import selective_scan
from carpus.models.ssm.scan_blocks import scan_blocks

__all__ = ["SS2D", "Mamba3CrossScan", "cross_selective_scan"]


def cross_selective_scan(
    x: Tensor, x_proj_weight: Tensor, dt_projs_weight: Tensor, dt_projs_bias: Tensor, A_logs: Tensor, Ds: Tensor
) -> Tensor:
    """Selective scans of a map in four directions, summed where they meet.

    Args:
        x: (B, D, H, W).
        x_proj_weight: (4, R + 2 N, D): rows of the step's low-rank input, of B and of C.
        dt_projs_weight: (4, D, R) from there to the steps.
        dt_projs_bias: (4, D).
        A_logs: (4 D, N); the decays are -exp of it.
        Ds: (4 D,) skip weights.

    Returns:
        (B, D, H * W), row-major.
    """
    height, width = x.shape[-2:]
    states, rank = A_logs.shape[1], dt_projs_weight.shape[2]
    wide = torch.promote_types(x.dtype, torch.float32)
    A = -torch.exp(A_logs.to(wide))
    if torch.compiler.is_exporting():
        sequences = cross_scan(x)
        low_rank, write, read = (x_proj_weight @ sequences).split((rank, states, states), 2)
        delta = dt_projs_weight @ low_rank
        y, _ = selective_scan(
            sequences.flatten(1, 2), delta.flatten(1, 2), A, write, read, Ds, delta_bias=dt_projs_bias.flatten()
        )
        return cross_merge(y.unflatten(1, (DIRECTIONS, -1)), height, width)
    steps = cross_scan_steps(x.permute(2, 3, 0, 1))
    pixels = steps.flatten(1, 2)
    low_rank, write, read = torch.bmm(pixels, x_proj_weight.transpose(1, 2)).split((rank, states, states), 2)
    delta = torch.bmm(low_rank, dt_projs_weight.transpose(1, 2))
    y, _ = scan_blocks(
        delta.to(wide).view_as(steps),
        steps.to(wide),
        A.unflatten(0, (DIRECTIONS, -1)).transpose(1, 2),
        write.to(wide).unflatten(1, steps.shape[1:3]),
        read.to(wide).unflatten(1, steps.shape[1:3]),
        Ds.to(wide).unflatten(0, (DIRECTIONS, -1)),
        dt_projs_bias.to(wide),
    )
    return cross_merge_steps(y.to(x.dtype), height, width).flatten(0, 1).permute(1, 2, 0)


class Mamba3CrossScan(nn.Module):
    """Mamba-3 recurrences of a map in four directions, each with its own projections.

    The heads of all directions run side by side; every direction is one group that shares B and C.

    Args:
        channels: D.
        config: state size, width of a head, rotation.
    """

    def __init__(self, channels: int, config: ScanConfig) -> None:
        super().__init__()
        self.headdim = math.gcd(channels, config.headdim)
        self.heads, self.d_state, self.chunk_size = channels // self.headdim, config.d_state, config.chunk_size
        self.angles = num_rotations(config.d_state, config.rope_fraction)
        self.splits = (config.d_state, config.d_state, self.heads, self.heads, self.heads, self.angles)
        all_heads = DIRECTIONS * self.heads
        bound = 1.0 / math.sqrt(channels)
        self.proj = nn.Parameter(torch.empty(DIRECTIONS, sum(self.splits), channels).uniform_(-bound, bound))
        self.dt_bias = nn.Parameter(step_bias(all_heads))
        self.B_bias = nn.Parameter(torch.ones(all_heads, 1, config.d_state))
        self.C_bias = nn.Parameter(torch.ones(all_heads, 1, config.d_state))
        self.D = nn.Parameter(torch.ones(all_heads))
        self.B_norm = RMSNorm(config.d_state)
        self.C_norm = RMSNorm(config.d_state)

    def forward(self, x: Tensor) -> Tensor:
        """(B, D, H, W) -> (B, D, H * W), row-major."""
        height, width = x.shape[-2:]
        sequences = cross_scan(x)
        # (B, L, 4, ...): directions are groups
        write, read, dt, rate, trap, angles = (self.proj @ sequences).permute(0, 3, 1, 2).split(self.splits, -1)
        dt = functional.softplus(dt.flatten(2) + self.dt_bias)
        angles = angles.unsqueeze(3).expand(*angles.shape[:3], self.heads, self.angles)
        y, _ = mamba3(
            Mamba3Inputs(
                q=self.C_norm(read).unsqueeze(2),
                k=self.B_norm(write).unsqueeze(2),
                v=sequences.permute(0, 3, 1, 2).unflatten(3, (-1, self.headdim)).flatten(2, 3),
                log_decay=decay_rate(rate.flatten(2)) * dt,
                dt=dt,
                trap=trap.flatten(2),
                angles=angles.flatten(2, 3),
                gate=None,
            ),
            self.C_bias,
            self.B_bias,
            self.D,
            chunk_size=self.chunk_size,
        )
        y = y.flatten(2).unflatten(2, (DIRECTIONS, -1)).permute(0, 2, 3, 1)
        return cross_merge(y, height, width)


class SS2D(nn.Module):
    """State-space mixing of a map: projection, depthwise convolution, four scans, norm, gate, projection.

    Args:
        d_model: channels.
        config: the scan.
    """

    def __init__(self, d_model: int, config: ScanConfig) -> None:
        super().__init__()
        inner = config.expand * d_model
        self.kind = config.kind
        if config.kind == "s6":
            rank, states = math.ceil(d_model / 16), config.d_state
            bound = 1.0 / math.sqrt(inner)
            self.x_proj_weight = nn.Parameter(torch.empty(DIRECTIONS, rank + 2 * states, inner).uniform_(-bound, bound))
            self.Ds = nn.Parameter(torch.ones(DIRECTIONS * inner))
            self.A_logs = nn.Parameter(torch.zeros(DIRECTIONS * inner, states))
            self.dt_projs_weight = nn.Parameter(torch.randn(DIRECTIONS, inner, rank))
            self.dt_projs_bias = nn.Parameter(torch.randn(DIRECTIONS, inner))
        else:
            self.scan = Mamba3CrossScan(inner, config)
        self.act = nn.GELU()
        self.out_norm = nn.LayerNorm(inner)
        self.in_proj = nn.Conv2d(d_model, 2 * inner, 1, bias=False)
        self.conv2d = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.out_proj = nn.Conv2d(inner, d_model, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, d_model, H, W) -> (B, d_model, H, W)."""
        values, gate = self.in_proj(x).chunk(2, 1)
        gate = self.act(gate)
        values = self.act(self.conv2d(values))
        y = self._scan(values)
        # float32 scans, and the map's own type afterwards, in half precision
        y = self.out_norm(y.transpose(1, 2)).transpose(1, 2).to(values.dtype)
        return self.out_proj(y.unflatten(2, values.shape[-2:]) * gate)

    def _scan(self, x: Tensor) -> Tensor:
        if self.kind == "s6":
            return cross_selective_scan(
                x, self.x_proj_weight, self.dt_projs_weight, self.dt_projs_bias, self.A_logs, self.Ds
            )
        return self.scan(x)
