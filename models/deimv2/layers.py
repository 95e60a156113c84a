"""Small blocks that several parts of DEIMv2 share: convolution units, norms, MLPs, self-attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "MLP",
    "ConvNorm",
    "QueryGroups",
    "RMSNorm",
    "SelfAttention",
    "SwiGLU",
    "attend",
    "fused_conv",
    "inverse_sigmoid",
]


def inverse_sigmoid(x: Tensor, eps: float = 1e-5) -> Tensor:
    """log(x / (1 - x)) of ``x`` clipped to [0, 1], both terms at least ``eps``."""
    x = x.clamp(0.0, 1.0)
    return torch.log(x.clamp(min=eps) / (1.0 - x).clamp(min=eps))


def fused_conv(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    """A new convolution with bias that computes ``norm(conv(x))`` with the norm's running statistics."""
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("a BatchNorm without running statistics cannot be fused")
    scale = norm.weight.double() / torch.sqrt(norm.running_var.double() + norm.eps)
    bias = norm.bias.double() - norm.running_mean.double() * scale
    if conv.bias is not None:
        bias = bias + conv.bias.double() * scale
    fused = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,  # type: ignore[arg-type]
        stride=conv.stride,  # type: ignore[arg-type]
        padding=conv.padding,  # type: ignore[arg-type]
        groups=conv.groups,
        bias=True,
        device=conv.weight.device,
        dtype=conv.weight.dtype,
    )
    with torch.no_grad():
        fused.weight.copy_(conv.weight.double() * scale[:, None, None, None])
        if fused.bias is not None:
            fused.bias.copy_(bias)
    return fused


class ConvNorm(nn.Module):
    """Convolution without bias, BatchNorm, optional activation; "same" padding for odd kernels.

    Args:
        in_channels: input channels.
        out_channels: output channels.
        kernel_size: odd kernel size.
        stride: stride.
        groups: convolution groups.
        act: apply SiLU at the end.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 1,
        stride: int = 1,
        groups: int = 1,
        *,
        act: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, (kernel_size - 1) // 2, groups=groups, bias=False
        )
        self.norm: nn.Module = nn.BatchNorm2d(out_channels)
        self.act: nn.Module = nn.SiLU() if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H/stride, W/stride)."""
        return self.act(self.norm(self.conv(x)))

    def fuse(self) -> None:
        """Fold the norm into the convolution, in place. Does nothing the second time."""
        if isinstance(self.norm, nn.BatchNorm2d):
            self.conv = fused_conv(self.conv, self.norm)
            self.norm = nn.Identity()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-6) * scale over the last dimension."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.scale


class SwiGLU(nn.Module):
    """w3(silu(u) * v) with (u, v) the halves of w12(x)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * hidden_dim)
        self.w3 = nn.Linear(hidden_dim, dim)
        for linear in (self.w12, self.w3):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        u, v = self.w12(x).chunk(2, -1)
        return self.w3(F.silu(u) * v)


class MLP(nn.Module):
    """Linear layers with an activation between them.

    Args:
        dims: widths from input to output; ``len(dims) - 1`` layers.
        zero_last: start with a last layer of zeros (heads that predict a correction).
        activation: what stands between the layers.
    """

    def __init__(self, *dims: int, zero_last: bool = False, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.activation = activation
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(dims))
        if zero_last:
            last = self.layers[-1]
            nn.init.zeros_(last.weight)  # type: ignore[arg-type]
            nn.init.zeros_(last.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """(..., dims[0]) -> (..., dims[-1])."""
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i < last:
                x = self.activation(x)
        return x


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself: queries and keys carry the position, values do not.

    Parameter names and layout are those of ``torch.nn.MultiheadAttention``.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        self.query_scale: float | None = 1.0 / math.sqrt(self.head_dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def fuse(self) -> None:
        """Fold the softmax scale into the query projection, in place. Does nothing the second time."""
        if self.query_scale is not None:
            with torch.no_grad():
                self.in_proj_weight[: self.out_proj.in_features] *= self.query_scale
                self.in_proj_bias[: self.out_proj.in_features] *= self.query_scale
            self.query_scale = None

    def forward(self, x: Tensor, pos: Tensor, groups: QueryGroups | None = None) -> Tensor:
        """Attend.

        Args:
            x: (B, N, dim) content.
            pos: (B or 1, N, dim) position, added for queries and keys.
            groups: how the first queries are grouped; see ``QueryGroups``.

        Returns:
            (B, N, dim).
        """
        dim = self.num_heads * self.head_dim
        qk = F.linear(x + pos, self.in_proj_weight[: 2 * dim], self.in_proj_bias[: 2 * dim])
        q, k = qk.unflatten(-1, (2 * self.num_heads, self.head_dim)).transpose(1, 2).chunk(2, 1)
        v = F.linear(x, self.in_proj_weight[2 * dim :], self.in_proj_bias[2 * dim :])
        v = v.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        if self.query_scale is not None:
            q = q * self.query_scale
        out = attend(q, k, v, fused=self.training) if groups is None else attend_groups(q, k, v, groups)
        return self.out_proj(out.transpose(1, 2).flatten(2))


def attend(q: Tensor, k: Tensor, v: Tensor, *, fused: bool) -> Tensor:
    """softmax(q k^T) v for scaled queries.

    Args:
        q, k, v: (B, heads, N, d).
        fused: call torch's fused kernel (faster, less memory). Written out, exporters turn it into three nodes, where
            the fused call becomes a dozen.
    """
    if fused:
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


@dataclass(frozen=True)
class QueryGroups:
    """Queries of which the first ``count`` form ``groups`` equal groups.

    A grouped query sees its own group and all ungrouped queries; ungrouped queries see each other only. This is the
    attention mask of denoising queries; computing just the visible blocks costs about a third of the masked whole.
    """

    count: int
    groups: int

    @property
    def size(self) -> int:
        """Queries of a group."""
        return self.count // self.groups


def attend_groups(q: Tensor, k: Tensor, v: Tensor, groups: QueryGroups) -> Tensor:
    """As ``attend``, with what ``groups`` hides left out; (B, heads, N, d) each."""
    sizes, shape = (groups.count, q.shape[2] - groups.count), (groups.groups, groups.size)
    q_group, q_rest = q.split(sizes, 2)
    k_group, k_rest = k.split(sizes, 2)
    v_group, v_rest = v.split(sizes, 2)
    within = q_group.unflatten(2, shape) @ k_group.unflatten(2, shape).transpose(-1, -2)
    beyond = (q_group @ k_rest.transpose(-1, -2)).unflatten(2, shape)
    seen = torch.softmax(torch.cat([within, beyond], -1), -1)
    grouped = (seen[..., : groups.size] @ v_group.unflatten(2, shape)).flatten(2, 3)
    grouped = grouped + seen[..., groups.size :].flatten(2, 3) @ v_rest
    return torch.cat([grouped, attend(q_rest, k_rest, v_rest, fused=False)], 2)
