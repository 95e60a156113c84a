"""DEIMv2: denoising draws, matcher and criterion on stored predictions (train.json, train_criterion.npz)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carpus.models.deimv2.denoising import DenoisingDraws, make_denoising
from carpus.models.losses.config import CriterionConfig, LossWeights, MatcherConfig
from carpus.models.losses.criterion import DEIMCriterion, split_outputs
from carpus.models.losses.matcher import match, matching_cost, union_assignment
from carpus.models.losses.targets import pack_targets
from tests.goldens.case import Case, Check

__all__ = ["check_criterion", "config_from_settings", "read_outputs", "read_targets"]

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-5
COST_TOLERANCE = 1e-5
"""Relative to the largest cost; losses and gradients relative to the stored figure."""


def config_from_settings(settings: Mapping[str, Any]) -> CriterionConfig:
    """The criterion's configuration from the "settings" of a case."""
    weights, matcher = settings["weight_dict"], settings["matcher"]
    return CriterionConfig(
        losses=tuple(settings["losses"]),
        weights=LossWeights(**{name: float(weights[f"loss_{name}"]) for name in ("mal", "bbox", "giou", "fgl", "ddf")}),
        matcher=MatcherConfig(
            cost_class=matcher["cost_class"],
            cost_bbox=matcher["cost_bbox"],
            cost_giou=matcher["cost_giou"],
            alpha=matcher["alpha"],
            gamma=matcher["gamma"],
            change_epoch=matcher["matcher_change_epoch"] if matcher["change_matcher"] else None,
            iou_order=matcher["iou_order_alpha"],
        ),
        use_union_set=settings["use_uni_set"],
        gamma=settings["gamma"],
        num_classes=settings["num_classes"],
        reg_max=settings["reg_max"],
        reg_scale=settings["reg_scale"],
        reg_up=settings["up"],
    )


def read_targets(stored: Mapping[str, np.ndarray]) -> list[dict[str, Tensor]]:
    """The ground truth of every image of a case."""
    count = sum(name.startswith("targets.") and name.endswith(".labels") for name in stored)
    return [{key: torch.from_numpy(stored[f"targets.{i}.{key}"]) for key in ("labels", "boxes")} for i in range(count)]


def read_outputs(stored: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The stored predictions as the model would give them, every prediction with a gradient to come."""
    outputs: dict[str, Any] = {}
    for name, array in stored.items():
        parts = name.split(".")
        if parts[0] != "in":
            continue
        if len(parts) == 2:
            outputs[parts[1]] = torch.from_numpy(array)
        else:
            outputs.setdefault(parts[1], {})[parts[2]] = torch.from_numpy(array.copy()).requires_grad_()
    return outputs


def check_criterion(case: Case) -> Iterator[Check]:
    """Everything stored: denoising, cost matrices, assignments, union set, loss terms, gradients of the predictions."""
    description, stored = case.json("train.json")["criterion"], case.arrays("train_criterion.npz")
    config = config_from_settings(description["settings"])
    targets = read_targets(stored)
    num_groups, length, num_queries = (int(value) for value in stored["dn.num_group_and_split"])
    draws = DenoisingDraws(
        **{
            name: torch.from_numpy(stored[f"dn.draw.{name}"])
            for name in ("label_flip_uniform", "new_label", "box_sign_bit", "box_uniform")
        }
    )
    largest = max(len(target["labels"]) for target in targets)
    denoising = make_denoising(
        targets,
        num_classes=config.num_classes,
        num_queries=num_queries,
        num_denoising=num_groups * largest,
        draws=draws,
    )
    if denoising is None:
        yield Check("dn", math.inf, 0, "no denoising queries were made")
        return
    size = int(stored["dn.attn_mask_shape"][1])
    mask = np.unpackbits(stored["dn.attn_mask_packed"], axis=1)[:, :size].astype(bool)
    split_same = (denoising.num_groups, *denoising.split) == (num_groups, length, num_queries)
    yield _differing("dn.num_group_and_split", np.array(not split_same))
    yield _differing("dn.class_ids", denoising.class_ids.numpy() != stored["dn.class_ids"])
    yield _differing("dn.bbox_unact", denoising.bbox_unact.numpy() != stored["dn.bbox_unact"])
    yield _differing("dn.attn_mask", denoising.attn_mask.numpy() != mask)
    for i, positive in enumerate(denoising.positive_idx):
        same = np.array_equal(positive.numpy(), stored[f"dn.positive_idx.{i}"])
        yield _differing(f"dn.positive_idx.{i}", np.array(not same))

    criterion = DEIMCriterion(config)
    for moment in ("before_change", "after_change"):
        if moment in description:
            outputs = {**read_outputs(stored), "dn_meta": denoising}
            yield from _check_matching(moment, config, outputs, targets, description[moment], stored)
            yield from _check_losses(moment, criterion, outputs, targets, description[moment])


def _differing(name: str, wrong: np.ndarray) -> Check:
    return Check(name, float(wrong.sum()), 0, "elements that differ")


def _check_matching(
    moment: str,
    config: CriterionConfig,
    outputs: Mapping[str, Any],
    targets: list[dict[str, Tensor]],
    expected: Mapping[str, Any],
    stored: Mapping[str, np.ndarray],
) -> Iterator[Check]:
    sets, _ = split_outputs(outputs)
    packed = pack_targets(targets, config.num_classes, sets.boxes.device)
    changed = config.matcher.changed(int(expected["epoch"]))
    logits, boxes = sets.logits.detach(), sets.boxes.detach()
    cost = matching_cost(logits, boxes, packed, config.matcher, changed=changed).numpy()
    own = match(logits, boxes, packed, config.matcher, changed=changed)
    named = {name: own.per_image(s, sets.num_queries, packed.offsets) for s, name in enumerate(sets.names)}
    for image, count in enumerate(packed.counts):
        for s, name in enumerate(sets.names):
            key = f"{moment}.cost.{name}.img{image}"
            if key in stored:
                reference = stored[key]
                error = np.abs(cost[s, image, :count].T - reference).max() / np.abs(reference).max()
                yield Check(key, float(error), COST_TOLERANCE, "relative to the largest")
            key = f"{moment}.match.{name}.img{image}"
            if key in stored:
                yield _pairs(key, named[name][image], stored[key])
    ties = int(expected.get("union_vote_ties", 0))
    union = union_assignment(own).per_image(0, sets.num_queries, packed.offsets)
    for image in range(len(packed.counts)):
        key = f"{moment}.union.img{image}"
        if key in stored and not ties:
            yield _pairs(key, union[image], stored[key])


def _pairs(name: str, ours: np.ndarray, stored: np.ndarray) -> Check:
    wrong = {tuple(pair) for pair in ours.T.tolist()} ^ {tuple(pair) for pair in stored.T.tolist()}
    return Check(name, float(len(wrong)), 0, "pairs that differ")


def _check_losses(
    moment: str,
    criterion: DEIMCriterion,
    outputs: Mapping[str, Any],
    targets: list[dict[str, Tensor]],
    expected: Mapping[str, Any],
) -> Iterator[Check]:
    losses = criterion(outputs, targets, epoch=int(expected["epoch"]))
    reference = expected["losses_weighted"]
    names = set(losses) ^ set(reference)
    yield Check(f"{moment} loss names", float(len(names)), 0, ", ".join(sorted(names)))
    for name, value in reference.items():
        if name in losses:
            error = abs(float(losses[name].detach()) - value) / max(abs(value), 1e-12)
            yield Check(f"{moment} {name}", error, LOSS_TOLERANCE, "relative")
    total = torch.stack(list(losses.values())).sum()
    error = abs(float(total.detach()) / expected["total"] - 1)
    yield Check(f"{moment} total", error, LOSS_TOLERANCE, "relative")
    total.backward()
    for name, value in expected["gradient_l2_of_total_wrt_inputs"].items():
        head, tensor = name.split(".")
        gradient = outputs[head][tensor].grad
        norm = 0.0 if gradient is None else float(gradient.double().norm())
        error = abs(norm - value) / max(abs(value), 1e-12)
        yield Check(f"{moment} |gradient| {name}", error, GRADIENT_TOLERANCE, "relative")
