"""Batches of augmented samples, the same ones for any number of worker processes.

Everything random about a sample comes from a generator seeded by (seed, epoch, sample); everything random about the
order from (seed, epoch). Nothing carries over from one sample to the next, so training can stop after any batch and go
on from there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from carpus.models.data.store import ImageStore
from carpus.runtime.errors import DataError

__all__ = ["Batch", "BatchPlan", "SampleAugmenter", "training_batches"]

PickOther = Callable[[np.random.Generator], tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.int64]]]
Augmented = tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.int64]]

_ORDER, _SAMPLE = 0, 1  # separates the random streams of order and samples


class SampleAugmenter(Protocol):
    """What `carpus.models.data.augment.Augmenter` does: augments one sample and resizes it to the training size."""

    def __call__(
        self,
        image: NDArray[np.uint8],
        boxes: NDArray[np.float32],
        labels: NDArray[np.int64],
        rng: np.random.Generator,
        epoch: int,
        pick_other: PickOther,
    ) -> Augmented: ...


@dataclass(frozen=True)
class Batch:
    """A batch as training takes it.

    Attributes:
        images: (B, H, W, 3) uint8 RGB.
        targets: per image ``labels`` (n,) int64 and ``boxes`` (n, 4) float32 cxcywh in 0..1.
        samples: dataset positions of the images.
    """

    images: Tensor
    targets: list[dict[str, Tensor]]
    samples: tuple[int, ...]

    def nchw(self, device: torch.device | None = None, *, channels_last: bool = False) -> Tensor:
        """The images as (B, 3, H, W) float32 in 0..1."""
        images = self.images if device is None else self.images.to(device, non_blocking=True)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        return images.permute(0, 3, 1, 2).to(torch.float32, memory_format=memory_format).div_(255.0)


@dataclass(frozen=True)
class BatchPlan:
    """Which samples go into which batch, for every epoch and process.

    W processes with batches of B see together exactly what one process with batches of W*B sees.

    Attributes:
        num_samples: images in the dataset.
        batch_size: images per process and step.
        seed: of the order.
        rank, world_size: this process among all.
    """

    num_samples: int
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError("The training set has no images.")
        if self.batch_size < 1:
            raise DataError(f"batch_size must be at least 1, got {self.batch_size}.")
        if not 0 <= self.rank < self.world_size:
            raise DataError(f"rank {self.rank} is not below world_size {self.world_size}.")

    @property
    def batches_per_epoch(self) -> int:
        """Full batches in an epoch; images that do not fill one wait for another epoch's order."""
        return max(self.num_samples // (self.batch_size * self.world_size), 1)

    @property
    def images_per_epoch(self) -> int:
        """Images that all processes see in an epoch."""
        return self.batches_per_epoch * self.batch_size * self.world_size

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """Dataset positions (batches_per_epoch, batch_size) of this process."""
        rng = np.random.default_rng([self.seed, epoch, _ORDER])
        wanted = self.images_per_epoch
        order = rng.permutation(self.num_samples)
        while len(order) < wanted:  # fewer images than one batch holds
            order = np.concatenate([order, rng.permutation(self.num_samples)])
        batches = order[:wanted].reshape(self.batches_per_epoch, self.batch_size, self.world_size)
        return batches[:, :, self.rank].astype(np.int64)

    def keys(self, first_epoch: int, first_batch: int, epochs: int) -> Iterator[list[tuple[int, int]]]:
        """(epoch, sample) pairs, one list a batch, from the given batch to the end of the last epoch."""
        for epoch in range(first_epoch, epochs):
            start = first_batch if epoch == first_epoch else 0
            for batch in self.epoch(epoch)[start:]:
                yield [(epoch, int(sample)) for sample in batch]


class _AugmentedSamples(Dataset[Augmented]):
    def __init__(self, store: ImageStore, augmenter: SampleAugmenter, seed: int) -> None:
        self._store = store
        self._augmenter = augmenter
        self._seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        rng = np.random.default_rng([self._seed, epoch, _SAMPLE, index])
        sample = self._store[index]
        augmented = self._augmenter(sample.image, sample.boxes, sample.labels, rng, epoch, self._pick_other)
        return (*augmented, index)

    def _pick_other(self, rng: np.random.Generator) -> Augmented:
        other = self._store[int(rng.integers(len(self._store)))]
        return other.image, other.boxes, other.labels


# A batch crosses the process boundary as five flat arrays: one file descriptor each, instead of two per image.
_Flat = tuple[Tensor, Tensor, Tensor, list[int], tuple[int, ...]]


def _collate(items: list[tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.int64], int]]) -> _Flat:
    images, boxes, labels, samples = zip(*items, strict=True)
    return (
        torch.from_numpy(np.stack(images)),
        torch.from_numpy(np.concatenate(boxes).astype(np.float32, copy=False).reshape(-1, 4)),
        torch.from_numpy(np.concatenate(labels).astype(np.int64, copy=False)),
        [len(item) for item in labels],
        tuple(samples),
    )


def _start_worker(worker_id: int) -> None:
    del worker_id
    # 0 runs OpenCV in this thread. 1 would first join the threads of the parent's pool, which a fork does not inherit.
    cv2.setNumThreads(0)
    # Signals are the main process's to handle: it finishes its step and then ends the workers. A group of its own keeps
    # those away that are sent to all (a terminal, `timeout`, a job scheduler); orphans end by torch's own watch.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)


def training_batches(
    store: ImageStore,
    augmenter: SampleAugmenter,
    plan: BatchPlan,
    *,
    first_epoch: int = 0,
    first_batch: int = 0,
    epochs: int,
    workers: int = 1,
    prefetch: int = 4,
) -> Iterator[Batch]:
    """Augmented batches from a given point of training to its end, across epochs without a pause.

    Args:
        store: decoded images; fill it before, so that forked workers share it.
        augmenter: augments and resizes one sample.
        plan: order, batch size and seed.
        first_epoch, first_batch: where to start.
        epochs: end of training (exclusive).
        workers: processes that augment; 0 does it in the calling process. The batches do not depend on it.
        prefetch: batches that each worker keeps ready.

    Yields:
        ``(epochs - first_epoch) * batches_per_epoch - first_batch`` batches.
    """
    forked = "fork" in multiprocessing.get_all_start_methods()
    loader = DataLoader(
        _AugmentedSamples(store, augmenter, plan.seed),
        batch_sampler=_Keys(plan, first_epoch, first_batch, epochs),
        num_workers=workers,
        collate_fn=_collate,
        worker_init_fn=_start_worker,
        prefetch_factor=prefetch if workers else None,
        multiprocessing_context=("fork" if forked else "spawn") if workers else None,
    )
    for images, boxes, labels, counts, samples in loader:
        targets = [
            {"labels": label, "boxes": box}
            for label, box in zip(labels.split(counts), boxes.split(counts), strict=True)
        ]
        yield Batch(images, targets, samples)


@dataclass(frozen=True)
class _Keys:
    plan: BatchPlan
    first_epoch: int
    first_batch: int
    epochs: int

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.plan.keys(self.first_epoch, self.first_batch, self.epochs)

    def __len__(self) -> int:
        return (self.epochs - self.first_epoch) * self.plan.batches_per_epoch - self.first_batch
