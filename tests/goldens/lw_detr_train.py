"""LW-DETR: the criterion on stored tensors, and one training-mode forward with 13 query groups (train.json)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carpus.models.losses.matcher import matching_cost
from carpus.models.losses.targets import pack_targets
from carpus.models.lw_detr.criterion import LWDETRCriterion, LWDETRCriterionConfig, group_match
from tests.goldens import lw_detr_forward
from tests.goldens.case import Case, Check, Kind, compare_stored, input_array
from tests.goldens.criterion_case import read_outputs, read_targets
from tests.goldens.lw_detr_forward import case_config, filled_model

__all__ = ["KINDS", "check_criterion", "check_train_forward"]

TOLERANCE = 1e-5
"""Of losses, gradients and costs on stored inputs, relative."""
OUTPUT_TOLERANCE = 2e-4
"""Relative to the tensor's largest value: batch statistics over few cells amplify rounding."""
LOSS_TOLERANCE = 1e-4
"""Relative. Here the criterion's inputs carry a network's rounding."""
GRADIENT_TOLERANCE = 1e-2
"""Relative, beyond the noise of float32 sums: a part of the whole gradient's norm."""
NOISE = 1e-6

_WEIGHTS = {"ce": 1.0, "bbox": 5.0, "giou": 2.0}
_SETS = ("main", "aux_0", "aux_1", "enc")


def _official(name: str) -> str:
    """Our name of a loss as the reference data writes it."""
    return name.replace("loss_class", "loss_ce").replace("_aux_", "_")


def check_criterion(case: Case) -> Iterator[Check]:
    """Cost matrices, assignments, loss terms and gradients, in training and in eval mode."""
    description, stored = case.json("train.json")["criterion"], case.arrays("train_criterion.npz")
    targets = read_targets(stored)
    config = LWDETRCriterionConfig(case_config(case).num_classes, int(description["groups"]))
    criterion = LWDETRCriterion(config)
    packed = pack_targets(targets, config.num_classes, torch.device("cpu"))
    for mode in ("train", "eval"):
        outputs = read_outputs(stored)
        groups = config.num_groups if mode == "train" else 1
        yield from _check_costs(mode, outputs, packed, config, groups, stored)
        yield from _check_matches(f"{mode}.match", outputs, packed, config, groups, stored)
        criterion.train(mode == "train")
        losses = criterion(outputs, targets)
        yield from _check_losses(mode, losses, description[mode], TOLERANCE)
        torch.stack(list(losses.values())).sum().backward()
        for name, value in description[mode]["gradient_l2_of_total_wrt_inputs"].items():
            head, tensor = name.split(".")
            norm = float(outputs[head][tensor].grad.double().norm())
            yield Check(f"{mode} |gradient| {name}", abs(norm - value) / max(value, 1e-12), TOLERANCE, "relative")


def _check_costs(
    mode: str,
    outputs: Mapping[str, Any],
    packed: Any,
    config: LWDETRCriterionConfig,
    groups: int,
    stored: Mapping[str, np.ndarray],
) -> Iterator[Check]:
    for name in _SETS:
        logits = outputs[name]["pred_logits"].detach()[None]
        boxes = outputs[name]["pred_boxes"].detach()[None]
        cost = matching_cost(logits, boxes, packed, config.matcher, changed=False)[0].numpy()
        size = cost.shape[2] // groups
        for group in range(groups):
            for image, count in enumerate(packed.counts):
                key = f"{mode}.cost.{name}.group{group}.img{image}"
                if key in stored:
                    ours = cost[image, :count, group * size : (group + 1) * size].T
                    error = np.abs(ours - stored[key]).max() / np.abs(stored[key]).max()
                    yield Check(key, float(error), TOLERANCE, "relative to the largest")


def _check_matches(
    prefix: str,
    outputs: Mapping[str, Any],
    packed: Any,
    config: LWDETRCriterionConfig,
    groups: int,
    stored: Mapping[str, np.ndarray],
) -> Iterator[Check]:
    for name in _SETS:
        logits = outputs[name]["pred_logits"].detach()[None]
        boxes = outputs[name]["pred_boxes"].detach()[None]
        pairs = group_match(logits, boxes, packed, config.matcher, groups)
        for image, ours in enumerate(pairs.per_image(0, boxes.shape[2], packed.offsets)):
            key = f"{prefix}.{name}.img{image}"
            if key in stored:
                wrong = {tuple(p) for p in ours.T.tolist()} ^ {tuple(p) for p in stored[key].T.tolist()}
                yield Check(key, float(len(wrong)), 0, "pairs that differ")


def _check_losses(
    mode: str, losses: Mapping[str, Tensor], expected: Mapping[str, Any], tolerance: float
) -> Iterator[Check]:
    ours = {_official(name): float(value.detach()) for name, value in losses.items()}
    reference = {n: v for n, v in expected["losses_unweighted"].items() if n.startswith("loss_")}
    yield Check(f"{mode} loss names", float(len(set(ours) ^ set(reference))), 0, ", ".join(set(ours) ^ set(reference)))
    for name, value in reference.items():
        weighted = value * _WEIGHTS[name.split("_")[1]]
        yield Check(f"{mode} {name}", abs(ours[name] - weighted) / max(abs(weighted), 1e-12), tolerance, "relative")
    total = sum(ours.values())
    yield Check(f"{mode} total", abs(total / expected["total_weighted"] - 1.0), tolerance, "relative")


def check_train_forward(case: Case) -> Iterator[Check]:
    """Selected positions, outputs of every group, assignments, losses, gradient norms, BatchNorm statistics."""
    description, stored = case.json("train.json")["forward"], case.arrays("train_forward.npz")
    targets = read_targets(stored)
    model, _ = filled_model(case)
    recorded: dict[str, Tensor] = {}
    scores: list[Tensor] = []

    def record(name: str, tensor: Tensor) -> None:
        if name == "enc.topk_score":
            scores.append(tensor.detach())
        recorded[name] = tensor.detach()

    model.train()
    outputs = model(torch.from_numpy(input_array(description["input"])), record=record)
    tensors = {**recorded, "topk_index": recorded["enc.topk_index"], "topk_score": torch.stack(scores)}
    for name in _SETS:
        tensors.update({f"{name}.{key}": value.detach() for key, value in outputs[name].items()})
    for name, spec in description["arrays"].items():
        if name.startswith(("targets.", "match.")):
            continue
        if name not in tensors:
            yield Check(name, math.inf, 0, "this model gives no such tensor")
            continue
        exact = not spec["dtype"].startswith("float")
        tolerance = 0.0 if exact else OUTPUT_TOLERANCE * max(float(spec.get("absmax", 1.0)), 1.0)
        yield compare_stored(name, tensors[name].numpy(), stored[name], spec, tolerance)

    config = LWDETRCriterionConfig(model.config.num_classes, model.config.decoder.num_groups)
    packed = pack_targets(targets, config.num_classes, torch.device("cpu"))
    yield from _check_matches("match", outputs, packed, config, config.num_groups, stored)
    for kind, expected in zip(
        ("running_mean", "running_var"),
        description["sum_of_l2_norms_of_all_running_mean_and_running_var_after_this_one_forward"],
        strict=True,
    ):
        norms = [float(b.double().norm()) for n, b in model.named_buffers() if n.endswith(kind)]
        yield Check(f"sum of |{kind}|", abs(sum(norms) / expected - 1.0), 1e-5, "relative")

    losses = LWDETRCriterion(config).train()(outputs, targets)
    yield from _check_losses("forward", losses, description, LOSS_TOLERANCE)
    boxes_only = [value for name, value in losses.items() if "class" not in name]
    for key, terms in (
        ("gradient_l2_per_parameter_without_ce_terms", boxes_only),
        ("gradient_l2_per_parameter", list(losses.values())),
    ):
        if key in description:
            yield from _check_gradients(key, model, torch.stack(terms).sum(), description[key])


def _check_gradients(
    title: str, model: torch.nn.Module, total: Tensor, expected: Mapping[str, float | None]
) -> Iterator[Check]:
    """Gradient norms of every parameter, the worst named."""
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(total, list(named.values()), retain_graph=True, allow_unused=True)
    ours = {n: 0.0 if g is None else float(g.double().norm()) for n, g in zip(named, gradients, strict=True)}
    floor = NOISE * math.sqrt(sum((value or 0.0) ** 2 for value in expected.values()))
    errors = {
        name: max(abs(ours[name] - (value or 0.0)) - floor, 0.0) / max(value or 0.0, floor)
        for name, value in expected.items()
        if name in ours
    }
    worst = max(errors, key=lambda name: errors[name])
    yield Check(f"{title} names", float(len(set(expected) ^ set(ours))), 0, f"{len(errors)} parameters")
    yield Check(title, errors[worst], GRADIENT_TOLERANCE, f"relative, worst {worst}")


KINDS = (
    Kind("schema", "lwdetr", (), lw_detr_forward.check_schema),
    Kind("optimizer", "lwdetr", ("training.json",), lw_detr_forward.check_optimizer),
    Kind("forward", "lwdetr", ("case.json", "io.npz"), lw_detr_forward.check_forward),
    Kind("padded", "lwdetr", ("io_padded.json", "io_padded.npz"), lw_detr_forward.check_padded),
    Kind("deploy", "lwdetr", ("deploy.json", "deploy.npz"), lw_detr_forward.check_deploy),
    Kind("criterion", "lwdetr", ("train.json", "train_criterion.npz"), check_criterion),
    # train.json also describes the criterion, so it may be there without this one
    Kind("training", "lwdetr", ("train.json", "train_forward.npz"), check_train_forward, optional=True),
)
"""The kinds of the LW-DETR family, as its reference data names it."""
