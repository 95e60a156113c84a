"""Chunked form of linear recurrences with one decay per head: the common core of Mamba-2 and Mamba-3.

After "Transformers are SSMs" (state-space duality), arXiv:2405.21060, section 6, with ranks and with weights that
differ between the present and the past, which the trapezoidal rule of Mamba-3 needs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from carpus.runtime.errors import DataError

__all__ = ["decay_scan"]


def decay_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    now_weight: Tensor,
    past_weight: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """y_t^r = (sum over s <= t, rank i of decay(t, s) w(t, s) v_s^i outer k_s^i + decay(t, -1) h_{-1}) q_t^r.

    decay(t, s) = exp(sum of log_decay over s+1..t); w is ``now_weight[t]`` for s = t and ``past_weight[s]`` for s < t.
    Quadratic inside a chunk, linear between chunks; any length.

    Args:
        q: (B, L, H, R, N) readers, R ranks.
        k: (B, L, H, R, N) writers.
        v: (B, L, H, R, P) values.
        log_decay: (B, L, H), at most 0.
        now_weight: (B, L, H).
        past_weight: (B, L, H); ``now_weight`` where None.
        initial_state: (B, H, P, N); zeros where None.
        chunk_size: steps in a chunk.

    Returns:
        (B, L, H, R, P) outputs and the (B, H, P, N) state after the last step, in which step s has weight
        ``past_weight[s]``.

    Raises:
        DataError: chunk_size below 1.
    """
    if chunk_size < 1:
        raise DataError(f"chunk_size must be at least 1 step, got {chunk_size}")
    batch, length, heads, rank, states = q.shape
    if past_weight is None:
        past_weight = now_weight
    size = min(chunk_size, length)
    pad = -length % size

    def chunked(tensor: Tensor, trailing: int) -> Tensor:
        """(B, L, H, ...) -> (B, H, chunks, size, ...); steps that fill up the last chunk neither write nor decay."""
        padded = functional.pad(tensor, (0, 0) * trailing + (0, 0, 0, pad))
        return padded.unflatten(1, (-1, size)).movedim(3, 1)

    readers, writers, values = (chunked(tensor, 2).flatten(3, 4) for tensor in (q, k, v))
    now, past = chunked(now_weight, 0), chunked(past_weight, 0)
    log_decay = chunked(log_decay, 0)
    total = log_decay.cumsum(-1)

    # (B, H, chunks, t, s): decay from s to t, weighted. Summed from s on: differences of totals would lose digits.
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).tril(-1)
    decay = torch.exp((log_decay.unsqueeze(-1) * later).cumsum(-2))
    weights = torch.where(later, decay * past.unsqueeze(-2), torch.diag_embed(now))
    from_start, to_end = torch.exp(total), decay[..., -1, :] * past
    if rank > 1:
        weights = weights.repeat_interleave(rank, -1).repeat_interleave(rank, -2)
        from_start, to_end = (tensor.repeat_interleave(rank, -1) for tensor in (from_start, to_end))
    y = (readers @ writers.transpose(-1, -2) * weights) @ values

    written = values.transpose(-1, -2) @ (writers * to_end.unsqueeze(-1))
    if initial_state is not None:
        h = initial_state
    elif torch.compiler.is_exporting():  # zeros without a batch size computed in the graph
        h = written[:, :, 0] * 0.0
    else:
        h = q.new_zeros(batch, heads, v.shape[-1], states)
    before = []
    for whole, chunk in zip(torch.exp(total[..., -1]).unbind(2), written.unbind(2), strict=True):
        before.append(h)
        h = whole[..., None, None] * h + chunk
    y = y + (readers * from_start.unsqueeze(-1)) @ torch.stack(before, 2).transpose(-1, -2)
    y = y.unflatten(3, (size, rank)).movedim(1, 3).flatten(1, 2)
    return y[:, :length], h
