"""Root-mean-square norms of the state-space mixers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GatedRMSNorm", "RMSNorm", "rms_normalise"]


def rms_normalise(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, times ``weight``, which broadcasts from the right."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class RMSNorm(nn.Module):
    """Norm over the last axis, arXiv:1910.07467.

    Args:
        channels: size of the last axis, and of ``weight``.
        eps: added to the mean square.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., channels) -> (..., channels)."""
        return rms_normalise(x, self.weight, self.eps)


class GatedRMSNorm(RMSNorm):
    """Norm of the gated value x silu(z), as Mamba-2 ends its mixer."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """(..., channels) value and gate -> (..., channels)."""
        return super().forward(x * functional.silu(gate))
