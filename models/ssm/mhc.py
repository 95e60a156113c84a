"""Manifold-constrained residual streams around a mixer (mHC-SSM): n streams, mixed by a doubly stochastic matrix.

A layer reads a convex combination of the streams, runs its core, and hands the result back to the streams by convex
weights, while the streams themselves are mixed by a matrix whose rows and columns sum to one: the mean over the streams
passes unchanged. Sinkhorn's projection after "mHC: Manifold-Constrained Hyper-Connections", arXiv:2512.24880.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from carpus.runtime.errors import DataError

__all__ = ["StreamAdapter", "StreamExpand", "StreamLayer", "StreamMerge", "sinkhorn"]


def sinkhorn(logits: Tensor, iterations: int = 20) -> Tensor:
    """exp(logits) scaled to a doubly stochastic matrix by alternating normalisation, in logarithms.

    Args:
        logits: (..., n, n).
        iterations: pairs of row and column normalisations; rows sum to one but for what has not converged, columns
            exactly.

    Returns:
        (..., n, n), non-negative.

    Raises:
        DataError: a matrix that is not square, or fewer than one iteration.
    """
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2] or iterations < 1:
        raise DataError(
            f"sinkhorn: needs square matrices and at least 1 iteration, got {tuple(logits.shape)} and {iterations}"
        )
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()


class StreamExpand(nn.Module):
    """A hidden state spread over n streams by a learned projection, which starts as n copies.

    Args:
        d_model: channels D.
        streams: n.
    """

    def __init__(self, d_model: int, streams: int) -> None:
        super().__init__()
        _check_streams(streams)
        self.streams = streams
        self.proj = nn.Linear(d_model, streams * d_model, bias=False)
        with torch.no_grad():
            self.proj.weight.copy_(torch.eye(d_model).repeat(streams, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., n, D)."""
        return self.proj(x).unflatten(-1, (self.streams, -1))


class StreamMerge(nn.Module):
    """n streams brought together by a learned projection, which starts as their mean.

    Args:
        d_model: channels D.
        streams: n.
    """

    def __init__(self, d_model: int, streams: int) -> None:
        super().__init__()
        _check_streams(streams)
        self.proj = nn.Linear(streams * d_model, d_model, bias=False)
        with torch.no_grad():
            self.proj.weight.copy_(torch.eye(d_model).repeat(1, streams) / streams)

    def forward(self, x: Tensor) -> Tensor:
        """(..., n, D) -> (..., D)."""
        return self.proj(x.flatten(-2))


class StreamAdapter(nn.Module):
    """Residual bottleneck D -> r -> D that all streams share but for a scale vector of each in the bottleneck.

    Args:
        d_model: channels D.
        streams: n.
        bottleneck: r. The way up starts at zero, so that the adapter starts as the identity.
    """

    def __init__(self, d_model: int, streams: int, bottleneck: int) -> None:
        super().__init__()
        _check_streams(streams)
        if bottleneck < 1:
            raise DataError(f"the bottleneck of a stream adapter must be at least 1 channel, got {bottleneck}")
        self.down = nn.Linear(d_model, bottleneck, bias=False)
        self.scale = nn.Parameter(torch.ones(streams, bottleneck))
        self.up = nn.Linear(bottleneck, d_model, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., n, D) -> (..., n, D)."""
        return x + self.up(functional.silu(self.down(x)) * self.scale)


class StreamLayer(nn.Module):
    """One layer over n residual streams: x_i <- sum_j M_ij x_j + post_i core(norm(sum_j pre_j x_j)).

    M is doubly stochastic, pre and post lie on the simplex. M starts near the identity, pre and post uniform.

    Args:
        d_model: channels D.
        streams: n.
        core: module (..., D) -> (..., D), or one that returns (output, state), such as the mixers here.
        adapter_bottleneck: width r of the stream adapters before and after the layer; None for no adapters.
        iterations: of Sinkhorn's projection.
    """

    def __init__(
        self,
        d_model: int,
        streams: int,
        core: nn.Module,
        *,
        adapter_bottleneck: int | None = None,
        iterations: int = 20,
    ) -> None:
        super().__init__()
        _check_streams(streams)
        self.core = core
        self.norm = nn.LayerNorm(d_model)
        self.pre = nn.Parameter(torch.zeros(streams))
        self.post = nn.Parameter(torch.zeros(streams))
        self.mix = nn.Parameter(4.0 * torch.eye(streams))
        self.iterations = iterations
        self.before: nn.Module = nn.Identity()
        self.after: nn.Module = nn.Identity()
        if adapter_bottleneck is not None:
            self.before = StreamAdapter(d_model, streams, adapter_bottleneck)
            self.after = StreamAdapter(d_model, streams, adapter_bottleneck)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, n, D) -> (B, L, n, D)."""
        y, _ = self._layer(x, lambda read: self.core(read))
        return y

    def step(self, x: Tensor, state: object) -> tuple[Tensor, object]:
        """One step of a core that has ``step``.

        Args:
            x: (B, n, D).
            state: of the core.

        Returns:
            (B, n, D) and the core's new state.
        """
        return self._layer(x, lambda read: self.core.step(read, state))  # type: ignore[operator]

    def _layer(self, x: Tensor, core: Callable[[Tensor], Tensor | tuple[Tensor, object]]) -> tuple[Tensor, object]:
        x = self.before(x)
        read = (self.pre.softmax(0).unsqueeze(-1) * x).sum(-2)
        result = core(self.norm(read))
        out, state = result if isinstance(result, tuple) else (result, None)
        written = self.post.softmax(0).unsqueeze(-1) * out.unsqueeze(-2)
        return self.after(sinkhorn(self.mix, self.iterations) @ x + written), state


def _check_streams(streams: int) -> None:
    if streams < 1:
        raise DataError(f"residual streams: at least 1 stream is needed, got {streams}")
