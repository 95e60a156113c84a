"""Initial values that the state-space mixers share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["step_bias"]


def step_bias(heads: int) -> Tensor:
    """(heads,) biases whose softplus is log-uniform in 1e-3..1e-1."""
    start = torch.exp(torch.rand(heads) * math.log(100.0) + math.log(1e-3))
    return start + torch.log(-torch.expm1(-start))
