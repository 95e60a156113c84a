"""Input size that grows during training: early epochs on smaller images cost a fraction of full-size ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from carpus.models.data.augment import Augmenter, PickOther, Sample
from carpus.models.data.augment_config import AugmentConfig

__all__ = ["ProgressiveAugmenter", "Scales", "size_at"]

Scales = tuple[tuple[int, float], ...]
"""(first epoch, factor on the input size), ascending."""


def size_at(epoch: int, full: tuple[int, int], scales: Scales, multiple: int = 32) -> tuple[int, int]:
    """The training size of an epoch.

    Args:
        epoch: epoch, from 0.
        full: (height, width) of the final size [px].
        scales: (first epoch, factor on ``full``), in ascending order; before the first and without any it is 1.
        multiple: sides are rounded to multiples of this [px].

    Returns:
        (height, width) [px], at least ``multiple``.
    """
    factor = 1.0
    for start, value in scales:
        if epoch >= start:
            factor = value
    height, width = (max(round(side * factor / multiple), 1) * multiple for side in full)
    return height, width


class ProgressiveAugmenter:
    """An `Augmenter` whose output size depends on the epoch.

    Args:
        config: what is done, how often and when.
        full: (height, width) of the final size [px].
        scales, multiple: see `size_at`.
    """

    def __init__(self, config: AugmentConfig, full: tuple[int, int], scales: Scales = (), multiple: int = 32) -> None:
        self._full = full
        self._scales = scales
        self._multiple = multiple
        sizes = {size_at(start, full, scales, multiple) for start, _ in scales} | {full}
        self._augmenters = {size: Augmenter(config, size) for size in sizes}

    def __call__(
        self,
        image: NDArray[np.uint8],
        boxes: NDArray[np.float32],
        labels: NDArray[np.int64],
        rng: np.random.Generator,
        epoch: int,
        pick_other: PickOther | None = None,
    ) -> Sample:
        """Augments one sample; see `Augmenter`."""
        size = size_at(epoch, self._full, self._scales, self._multiple)
        return self._augmenters[size](image, boxes, labels, rng, epoch, pick_other)
