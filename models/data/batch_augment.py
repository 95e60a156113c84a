"""Augmentation across a batch: mixup and copy-blend (DEIM and DEIMv2, Dense O2O)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from carpus.models.data.augment_config import AugmentConfig

__all__ = ["BatchAugmenter", "copy_blend", "mixup"]

Targets = list[dict[str, Tensor]]


def mixup(images: Tensor, targets: Targets, share: float) -> tuple[Tensor, Targets]:
    """Blend every image with its predecessor in the batch and unite their targets.

    Args:
        images: `(B, 3, H, W)` float.
        targets: `{"labels", "boxes"}` of each image.
        share: share of the image itself.
    """
    mixed = torch.lerp(images.roll(1, dims=0), images, share)
    united = [
        {key: torch.cat((targets[i][key], targets[i - 1][key])) for key in ("labels", "boxes")}
        for i in range(len(targets))
    ]
    return mixed, united


def copy_blend(
    images: Tensor, targets: Targets, config: AugmentConfig, rng: np.random.Generator, share: float
) -> tuple[Tensor, Targets]:
    """Blend objects of the batch into every image at random places.

    A patch is the object with some of its surroundings; the new label's box is the object alone.

    Args:
        images: `(B, 3, H, W)` float; not changed.
        targets: `{"labels": (n,), "boxes": (n, 4) cxcywh in 0..1}` of each image.
        config: number, smallest area and surroundings of the objects.
        rng: source of randomness.
        share: share of the patch.
    """
    batch, _, height, width = images.shape
    counts = [len(target["labels"]) for target in targets]
    if sum(counts) == 0:
        return images, targets
    owner = np.repeat(np.arange(batch), counts)
    labels = torch.cat([target["labels"] for target in targets])
    boxes = torch.cat([target["boxes"] for target in targets]).cpu().numpy().astype(np.float64)
    sides = boxes[:, 2:] * (width, height)
    corners = np.concatenate((boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2), 1)
    corners = np.clip(corners * (width, height, width, height), 0, (width, height, width, height))
    large = np.flatnonzero(sides.prod(axis=1) >= config.copyblend_min_area)
    if len(large) == 0:
        return images, targets
    low, high = config.copyblend_context
    blended, united = images.clone(), []
    for i in range(batch):
        number = min(int(rng.integers(1, config.copyblend_objects + 1)), len(large))
        new_boxes, chosen = [], rng.choice(large, size=number, replace=False)
        for k in chosen:
            x1, y1, x2, y2 = corners[k]
            reach = rng.uniform(low, high, size=2) * (x2 - x1, y2 - y1)
            left, top = int(max(x1 - reach[0], 0)), int(max(y1 - reach[1], 0))
            right = min(int(np.ceil(x2 + reach[0])), width)
            bottom = min(int(np.ceil(y2 + reach[1])), height)
            at_x, at_y = (int(v) for v in rng.integers(0, (width - (right - left) + 1, height - (bottom - top) + 1)))
            patch = images[int(owner[k]), :, top:bottom, left:right]
            place = blended[i, :, at_y : at_y + bottom - top, at_x : at_x + right - left]
            place.lerp_(patch, share)
            dx, dy = at_x - left, at_y - top
            centre = ((x1 + x2) / 2 + dx, (y1 + y2) / 2 + dy)
            new_boxes.append((centre[0] / width, centre[1] / height, (x2 - x1) / width, (y2 - y1) / height))
        target = targets[i]
        added = torch.tensor(new_boxes, dtype=target["boxes"].dtype, device=target["boxes"].device)
        united.append(
            {
                "labels": torch.cat((target["labels"], labels[torch.from_numpy(chosen)])),
                "boxes": torch.cat((target["boxes"], added)),
            }
        )
    return blended, united


class BatchAugmenter:
    """Mixup, or else copy-blend, each in its range of epochs and with its probability a batch.

    Args:
        config: what is done, how often and when.
    """

    def __init__(self, config: AugmentConfig) -> None:
        self.config = config

    def active(self, epoch: int) -> bool:
        """Whether anything can happen in this epoch."""
        config = self.config
        return any(
            prob > 0 and start <= epoch < stop
            for prob, (start, stop) in (
                (config.mixup_prob, config.mixup_epochs),
                (config.copyblend_prob, config.copyblend_epochs),
            )
        )

    def __call__(
        self, images: Tensor, targets: Targets, rng: np.random.Generator, epoch: int
    ) -> tuple[Tensor, Targets]:
        """Augment a batch.

        Args:
            images: `(B, 3, H, W)` float; not changed.
            targets: for each image `{"labels": (n,) int64, "boxes": (n, 4) float32 cxcywh in 0..1}`; not changed.
            rng: source of all randomness.
            epoch: epoch, from 0.
        """
        config = self.config
        mix, paste = rng.random(2) < (config.mixup_prob, config.copyblend_prob)
        share = float(rng.uniform(*config.blend))
        start, stop = config.mixup_epochs
        if mix and start <= epoch < stop and len(images) > 1:
            return mixup(images, targets, share)
        start, stop = config.copyblend_epochs
        if paste and start <= epoch < stop:
            return copy_blend(images, targets, config, rng, share)
        return images, targets
