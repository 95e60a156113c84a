"""From a recipe to the augmentation of samples and batches."""

from __future__ import annotations

import cv2
import numpy as np
from carpus.models.data.loader import Augmented, PickOther, SampleAugmenter
from carpus.models.engine import BatchMixer
from carpus.models.recipe import Recipe
from numpy.typing import NDArray

__all__ = ["make_augmenter", "make_mixer"]


class _Stub:
    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def __call__(
        self,
        image: NDArray[np.uint8],
        boxes: NDArray[np.float32],
        labels: NDArray[np.int64],
        rng: np.random.Generator,
        epoch: int,
        pick_other: PickOther,
    ) -> Augmented:
        h, w = image.shape[:2]
        out = cv2.resize(image, (self.size[1], self.size[0]), interpolation=cv2.INTER_AREA)
        b = boxes / np.array([w, h, w, h], np.float32)
        if rng.random() < 0.5:
            out = np.ascontiguousarray(out[:, ::-1])
            b = np.stack([1 - b[:, 2], b[:, 1], 1 - b[:, 0], b[:, 3]], 1)
        b = np.concatenate([(b[:, :2] + b[:, 2:]) / 2, b[:, 2:] - b[:, :2]], 1).astype(np.float32)
        return out, b, labels


def make_augmenter(recipe: Recipe, size: tuple[int, int]) -> SampleAugmenter:
    return _Stub(size)


def make_mixer(recipe: Recipe) -> BatchMixer | None:
    return None
