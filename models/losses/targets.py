"""Ground truth of a batch, packed once for matching and losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from carpus.runtime.errors import DataError

__all__ = ["PackedTargets", "pack_targets"]


@dataclass(frozen=True)
class PackedTargets:
    """Ground truth of B images: concatenated (T objects in all) and padded to the largest count G.

    Attributes:
        labels: `(T,)` int64.
        boxes: `(T, 4)` float32 cxcywh in 0..1.
        counts: objects of each image.
        offsets: index of each image's first object among the T.
        padded_labels: `(B, G)` int64, padding 0.
        padded_boxes: `(B, G, 4)` float32, padding 0.
    """

    labels: Tensor
    boxes: Tensor
    counts: tuple[int, ...]
    offsets: tuple[int, ...]
    padded_labels: Tensor
    padded_boxes: Tensor

    @property
    def total(self) -> int:
        """Objects in the batch."""
        return int(self.labels.shape[0])


def pack_targets(targets: Sequence[dict[str, Tensor]], num_classes: int, device: torch.device) -> PackedTargets:
    """Pack `{"labels": (n,) int64, "boxes": (n, 4) cxcywh in 0..1}` of each image.

    Raises:
        DataError: shapes that disagree, or a label outside 0..num_classes-1; the message names the image.
    """
    counts = []
    for i, target in enumerate(targets):
        labels, boxes = target["labels"], target["boxes"]
        if labels.ndim != 1 or boxes.shape != (labels.shape[0], 4):
            raise DataError(
                f"targets[{i}]: labels must be (n,) and boxes (n, 4), got {tuple(labels.shape)} and "
                f"{tuple(boxes.shape)}"
            )
        counts.append(int(labels.shape[0]))
    offsets, total = [], 0
    for count in counts:
        offsets.append(total)
        total += count
    if total == 0:
        return PackedTargets(
            labels=torch.zeros(0, dtype=torch.int64, device=device),
            boxes=torch.zeros(0, 4, device=device),
            counts=tuple(counts),
            offsets=tuple(offsets),
            padded_labels=torch.zeros(len(counts), 0, dtype=torch.int64, device=device),
            padded_boxes=torch.zeros(len(counts), 0, 4, device=device),
        )
    all_labels = torch.cat([target["labels"] for target in targets]).to(device, torch.int64)
    all_boxes = torch.cat([target["boxes"] for target in targets]).to(device, torch.float32)
    low, high = (int(value) for value in torch.aminmax(all_labels))
    if low < 0 or high >= num_classes:
        bad = next(i for i, t in enumerate(targets) if ((t["labels"] < 0) | (t["labels"] >= num_classes)).any())
        raise DataError(
            f"targets[{bad}]: labels must lie in 0..{num_classes - 1}, got {targets[bad]['labels'].tolist()}; "
            f"give the model the number of classes of the dataset"
        )
    largest = max(counts)
    # Flat slots of the real objects in the padded (B, G) table.
    slots = torch.cat([torch.arange(count) + i * largest for i, count in enumerate(counts)]).to(device)
    padded_labels = torch.zeros(len(counts) * largest, dtype=torch.int64, device=device)
    padded_boxes = torch.zeros(len(counts) * largest, 4, device=device)
    padded_labels[slots] = all_labels
    padded_boxes[slots] = all_boxes
    return PackedTargets(
        labels=all_labels,
        boxes=all_boxes,
        counts=tuple(counts),
        offsets=tuple(offsets),
        padded_labels=padded_labels.view(len(counts), largest),
        padded_boxes=padded_boxes.view(len(counts), largest, 4),
    )
