"""Contrastive denoising queries: noised ground truth that the decoder learns to restore.

Source: DINO (Zhang et al., 2022), section 3.3, with the settings of DEIMv2. Every image gets `num_groups` groups; a
group holds one slightly noised (positive) and one strongly noised (negative) copy of each ground truth, padded to the
largest ground-truth count of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from carpus.models.losses.boxes import box_cxcywh_to_xyxy, box_xyxy_to_cxcywh, exact_inverse_sigmoid
from carpus.runtime.errors import DataError

__all__ = ["Denoising", "DenoisingDraws", "attention_mask", "make_denoising"]


@dataclass(frozen=True)
class DenoisingDraws:
    """The random numbers one batch of denoising queries is made from (N = number of denoising queries an image).

    Attributes:
        label_flip_uniform: `(B, N)` float in [0, 1); a label flips where it is below half the label noise ratio.
        new_label: `(B, N)` integer in [0, num_classes), the label a flip writes.
        box_sign_bit: `(B, N, 4)` 0 or 1: the direction each box edge moves in.
        box_uniform: `(B, N, 4)` float in [0, 1): how far it moves.
    """

    label_flip_uniform: Tensor
    new_label: Tensor
    box_sign_bit: Tensor
    box_uniform: Tensor

    @classmethod
    def sample(
        cls, batch: int, length: int, num_classes: int, device: torch.device, generator: torch.Generator | None
    ) -> DenoisingDraws:
        """Draw for `batch` images with `length` queries each, on the CPU so that one seed means one result."""
        return cls(
            label_flip_uniform=torch.rand(batch, length, generator=generator).to(device),
            new_label=torch.randint(0, num_classes, (batch, length), generator=generator).to(device),
            box_sign_bit=torch.randint(0, 2, (batch, length, 4), generator=generator).to(device),
            box_uniform=torch.rand(batch, length, 4, generator=generator).to(device),
        )


@dataclass(frozen=True)
class Denoising:
    """Denoising queries of one batch, which stand before the matching queries in the decoder.

    Attributes:
        class_ids: `(B, N)` int64 noised classes; `num_classes` marks padding.
        bbox_unact: `(B, N, 4)` float32 noised boxes, cxcywh through the inverse sigmoid.
        attn_mask: `(N + Q, N + Q)` bool, True where a row must not attend to a column.
        positive_idx: for each image the int64 query indices of its positives, group after group, in target order.
        num_groups: groups an image.
        split: `(N, Q)`, the sizes to cut the decoder's queries into.
    """

    class_ids: Tensor
    bbox_unact: Tensor
    attn_mask: Tensor
    positive_idx: list[Tensor]
    num_groups: int
    split: tuple[int, int]


def attention_mask(num_groups: int, group_size: int, num_queries: int, device: torch.device | None = None) -> Tensor:
    """Bool mask `(N + Q, N + Q)`, N = num_groups * group_size: groups are hidden from each other and from matching."""
    group = torch.cat(
        (
            torch.arange(num_groups, device=device).repeat_interleave(group_size),
            torch.full((num_queries,), -1, device=device, dtype=torch.int64),
        )
    )
    return (group[None, :] >= 0) & (group[:, None] != group[None, :])


def make_denoising(
    targets: Sequence[dict[str, Tensor]],
    *,
    num_classes: int,
    num_queries: int,
    num_denoising: int = 100,
    label_noise_ratio: float = 0.5,
    box_noise_scale: float = 1.0,
    generator: torch.Generator | None = None,
    draws: DenoisingDraws | None = None,
) -> Denoising | None:
    """Make the denoising queries of a batch.

    Args:
        targets: for each image `{"labels": (n,) int64, "boxes": (n, 4) float32 cxcywh in 0..1}`.
        num_classes: number of classes; this id stands for padding.
        num_queries: matching queries Q of the decoder.
        num_denoising: queries aimed at; the number of groups is this over the largest ground-truth count, at least 1.
        label_noise_ratio: twice the probability of replacing a label.
        box_noise_scale: how far an edge may move, in half box sizes, for positives; negatives move one step further.
        generator: CPU generator of the noise; the default generator of torch when None.
        draws: the random numbers themselves, in place of a generator.

    Returns:
        The queries, or None when there is nothing to restore (no ground truth in the batch, or num_denoising < 1).

    Raises:
        DataError: draws of another shape than the targets need.
    """
    counts = [int(target["labels"].shape[0]) for target in targets]
    largest = max(counts, default=0)
    if largest == 0 or num_denoising < 1:
        return None
    batch, device = len(targets), targets[0]["boxes"].device
    num_groups = max(1, num_denoising // largest)
    group_size = 2 * largest
    length = num_groups * group_size

    real = torch.arange(largest) < torch.tensor(counts)[:, None]
    slots = real.flatten().nonzero().squeeze(1).to(device)
    labels = torch.full((batch * largest,), num_classes, dtype=torch.int64, device=device)
    boxes = torch.zeros((batch * largest, 4), dtype=torch.float32, device=device)
    labels[slots] = torch.cat([target["labels"] for target in targets])
    boxes[slots] = torch.cat([target["boxes"] for target in targets])
    labels, boxes = labels.view(batch, largest), boxes.view(batch, largest, 4)

    if draws is None:
        draws = DenoisingDraws.sample(batch, length, num_classes, device, generator)
    elif draws.box_uniform.shape != (batch, length, 4):
        raise DataError(
            f"denoising draws: box_uniform has shape {tuple(draws.box_uniform.shape)}, expected {(batch, length, 4)} "
            f"for {batch} images with at most {largest} boxes and num_denoising={num_denoising}; draw again for it"
        )

    labels = labels.repeat(1, 2 * num_groups)
    real_slots = real.to(device).repeat(1, 2 * num_groups)
    flip = (draws.label_flip_uniform < label_noise_ratio * 0.5) & real_slots
    class_ids = torch.where(flip, draws.new_label.to(torch.int64), labels)

    negative = (torch.arange(length, device=device) % group_size >= largest)[None, :, None].to(torch.float32)
    boxes = boxes.repeat(1, 2 * num_groups, 1)
    corners = box_cxcywh_to_xyxy(boxes)
    reach = (boxes[..., 2:] * 0.5).repeat(1, 1, 2) * box_noise_scale
    sign = draws.box_sign_bit.to(torch.float32) * 2.0 - 1.0
    step = (draws.box_uniform + 1.0) * negative + draws.box_uniform * (1.0 - negative)
    corners = torch.clip(corners + step * sign * reach, min=0.0, max=1.0)
    noised = box_xyxy_to_cxcywh(corners)
    noised = torch.where(noised < 0, -noised, noised)

    # The positives of group g are the slots g * group_size + target index.
    places = torch.arange(length, device=device).view(num_groups, group_size)
    positive_idx = [places[:, :count].flatten() for count in counts]
    return Denoising(
        class_ids=class_ids,
        bbox_unact=exact_inverse_sigmoid(noised),
        attn_mask=attention_mask(num_groups, group_size, num_queries, device),
        positive_idx=positive_idx,
        num_groups=num_groups,
        split=(length, num_queries),
    )
