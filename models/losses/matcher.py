"""One-to-one pairing of predictions and ground truth, for all output sets of a decoder at once.

Costs of S output sets and B images are computed as one tensor; the assignment itself is solved per set and image by
`scipy.optimize.linear_sum_assignment` on matrices of a few rows. Sources: DETR (Carion et al., 2020), section 3.1, for
the pairing; D-FINE (Peng et al., 2024) for the union set; DEIM (Huang et al., 2024) for the later cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from carpus.models.losses.boxes import SMALLEST_AREA
from carpus.models.losses.config import MatcherConfig
from carpus.models.losses.targets import PackedTargets

__all__ = ["Assignment", "denoising_assignment", "match", "matching_cost", "union_assignment"]


@dataclass(frozen=True)
class Assignment:
    """Pairs (query, target) of S output sets; every set has the same number M of pairs.

    Attributes:
        query: `(S, M)` int64 index into the B * Q queries of the batch.
        target: `(S, M)` int64 index into the T concatenated targets.
    """

    query: Tensor
    target: Tensor

    @property
    def num_pairs(self) -> int:
        """Pairs in each set."""
        return int(self.query.shape[1])

    def per_image(self, set_index: int, num_queries: int, offsets: Sequence[int]) -> list[NDArray[np.int64]]:
        """Pairs of one set as `(2, m)` arrays an image: query indices (ascending) over target indices in the image."""
        query = self.query[set_index].cpu().numpy()
        target = self.target[set_index].cpu().numpy()
        image = query // max(num_queries, 1)
        pairs = []
        for i, offset in enumerate(offsets):
            q, t = query[image == i] - i * num_queries, target[image == i] - offset
            order = np.argsort(q)
            pairs.append(np.stack((q[order], t[order])))
        return pairs


def _corners(box: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Left, top, right, bottom and area of boxes given as planes cx, cy, w, h."""
    cx, cy, half_w, half_h = box[0], box[1], box[2].clamp(min=0.0) * 0.5, box[3].clamp(min=0.0) * 0.5
    x1, y1, x2, y2 = cx - half_w, cy - half_h, cx + half_w, cy + half_h
    return x1, y1, x2, y2, (x2 - x1) * (y2 - y1)


def _pairwise_iou(box: Sequence[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """As `iou_and_giou` for planes cx, cy, w, h that broadcast against each other."""
    ax1, ay1, ax2, ay2, area_a = _corners(box)
    bx1, by1, bx2, by2, area_b = _corners(target)
    intersection = (torch.minimum(ax2, bx2).sub_(torch.maximum(ax1, bx1))).clamp_(min=0.0)
    intersection *= (torch.minimum(ay2, by2).sub_(torch.maximum(ay1, by1))).clamp_(min=0.0)
    union = (area_a + area_b).sub_(intersection)
    hull = torch.maximum(ax2, bx2).sub_(torch.minimum(ax1, bx1))
    hull *= torch.maximum(ay2, by2).sub_(torch.minimum(ay1, by1))
    iou = intersection.div_(union.clamp(min=SMALLEST_AREA))
    giou = iou - (hull - union).div_(hull.clamp(min=SMALLEST_AREA))
    return iou, giou


def matching_cost(
    logits: Tensor, boxes: Tensor, targets: PackedTargets, config: MatcherConfig, *, changed: bool
) -> Tensor:
    """Cost of pairing each target with each query.

    Args:
        logits: `(S, B, Q, C)`.
        boxes: `(S, B, Q, 4)` cxcywh in 0..1.
        targets: ground truth, padded to G an image.
        config: weights of the cost.
        changed: use -(p * IoU^iou_order) in place of the weighted sum of class, L1 and generalised IoU costs.

    Returns:
        `(S, B, G, Q)` float32; padding targets have meaningless rows; NaN becomes 1 and infinities become finite.
    """
    sets, batch, num_queries, _ = boxes.shape
    num_targets = targets.padded_labels.shape[1]
    index = targets.padded_labels[None, :, None, :].expand(sets, batch, num_queries, num_targets)
    prob = logits.gather(-1, index).transpose(-1, -2).contiguous().sigmoid_()
    # Coordinate by coordinate, so that every operation runs over contiguous (S, B, G, Q) memory.
    box = [plane[:, :, None, :] for plane in boxes.permute(3, 0, 1, 2).contiguous().unbind()]
    target = [plane[None, :, :, None] for plane in targets.padded_boxes.unbind(-1)]
    iou, giou = _pairwise_iou(box, target)
    if changed:
        cost = -(prob * iou.pow(config.iou_order))
    else:
        absent = 1 - prob
        focal = absent.pow(config.gamma).mul_(-config.alpha).mul_((prob + 1e-8).log_())
        focal += prob.pow(config.gamma).mul_(1 - config.alpha).mul_(absent.add_(1e-8).log_())
        cost = (box[0] - target[0]).abs_()
        for i in range(1, 4):
            cost += (box[i] - target[i]).abs_()
        cost.mul_(config.cost_bbox).add_(focal, alpha=config.cost_class).sub_(giou, alpha=config.cost_giou)
    return cost.nan_to_num_(nan=1.0)


@torch.no_grad()
def match(
    logits: Tensor, boxes: Tensor, targets: PackedTargets, config: MatcherConfig, *, changed: bool = False
) -> Assignment:
    """Least-cost one-to-one pairing of every set and image; arguments as for `matching_cost`."""
    sets, _, num_queries, _ = boxes.shape
    cost = matching_cost(logits, boxes, targets, config, changed=changed).to("cpu", torch.float64).numpy()
    total = sum(min(count, num_queries) for count in targets.counts)
    query = np.empty((sets, total), dtype=np.int64)
    target = np.empty((sets, total), dtype=np.int64)
    for s in range(sets):
        at = 0
        for image, (count, offset) in enumerate(zip(targets.counts, targets.offsets, strict=True)):
            if count == 0 or num_queries == 0:
                continue
            rows, columns = linear_sum_assignment(cost[s, image, :count])
            end = at + len(rows)
            query[s, at:end] = columns + image * num_queries
            target[s, at:end] = rows + offset
            at = end
    device = boxes.device
    return Assignment(torch.from_numpy(query).to(device), torch.from_numpy(target).to(device))


def union_assignment(assignment: Assignment) -> Assignment:
    """Union of the pairs of all sets: each query that is paired anywhere keeps its most frequent target.

    Equal votes go to the target of the lower index. The result stands for one set, (1, M').
    """
    query = assignment.query.flatten().cpu().numpy()
    target = assignment.target.flatten().cpu().numpy()
    if query.size == 0:
        return Assignment(assignment.query[:1], assignment.target[:1])
    span = int(target.max()) + 1
    pairs, votes = np.unique(query * span + target, return_counts=True)
    pair_query, pair_target = pairs // span, pairs % span
    order = np.lexsort((pair_target, -votes, pair_query))
    _, first = np.unique(pair_query[order], return_index=True)
    best = order[first]
    device = assignment.query.device
    return Assignment(
        torch.from_numpy(pair_query[best]).to(device)[None], torch.from_numpy(pair_target[best]).to(device)[None]
    )


def denoising_assignment(
    positive_idx: Sequence[Tensor], num_groups: int, num_queries: int, targets: PackedTargets
) -> Assignment:
    """Pairs of denoising queries, known from their making: group after group, target by target; (1, M)."""
    device = targets.boxes.device
    target = [
        np.tile(np.arange(offset, offset + count), num_groups)
        for count, offset in zip(targets.counts, targets.offsets, strict=True)
    ]
    first = np.repeat(np.arange(len(target)) * num_queries, [len(part) for part in target])
    query = torch.cat(list(positive_idx)) + torch.from_numpy(first).to(positive_idx[0].device)
    return Assignment(query.to(device)[None], torch.from_numpy(np.concatenate(target)).to(device)[None])
