"""Figures that normalise a loss, over all processes that train together."""

from __future__ import annotations

from torch import Tensor, distributed

__all__ = ["mean_over_processes", "num_processes"]


def num_processes() -> int:
    """Processes that train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def mean_over_processes(value: Tensor) -> Tensor:
    """The mean of a tensor over the processes of ``torch.distributed`` where it runs; without gradient."""
    processes = num_processes()
    if processes == 1:
        return value.detach()
    total = value.detach().clone()
    distributed.all_reduce(total)
    return total / processes
