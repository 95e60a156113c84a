"""DEIMv2: one training-mode forward with denoising, its losses and gradients (train.json, train_forward.npz)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carpus.models.deimv2.denoising import Denoising, DenoisingDraws, make_denoising
from carpus.models.losses.config import get_criterion_config
from carpus.models.losses.criterion import DEIMCriterion, split_outputs
from carpus.models.losses.matcher import match, union_assignment
from carpus.models.losses.targets import pack_targets
from tests.goldens.case import Case, Check, compare_stored, input_array
from tests.goldens.deimv2_forward import filled_model, reorder, row_order

__all__ = ["check_train_forward"]

OUTPUT_TOLERANCE = 2e-4
"""Relative to the tensor's largest value: batch statistics over few cells amplify rounding."""
LOSS_TOLERANCE = 1e-4
"""Relative. The criterion alone is held to 1e-5 on stored inputs; here the inputs carry a network's rounding."""
GRADIENT_TOLERANCE = 1e-2
"""Relative, as the reference data advises, beyond the noise of float32 sums: a part of the whole gradient's norm."""
NOISE = 1e-6
SCALAR_NOISE = 5e-4
"""A one-element parameter's gradient is a sum over a whole map that a following BatchNorm makes cancel."""


def check_train_forward(case: Case) -> Iterator[Check]:
    """Denoising queries, output sets, losses before and after the matcher changes, gradient norms, BN statistics."""
    description, stored = case.json("train.json")["forward"], case.arrays("train_forward.npz")
    specs = description["arrays"]
    shape = description["input"]["shape"]
    targets = _targets(stored, shape[0])
    model, _ = filled_model(case)
    config = model.config
    draws = DenoisingDraws(
        **{
            name: torch.from_numpy(stored[f"dn.draw.{name}"])
            for name in ("label_flip_uniform", "new_label", "box_sign_bit", "box_uniform")
        }
    )
    denoising = make_denoising(
        targets,
        num_classes=config.num_classes,
        num_queries=config.decoder.num_queries,
        num_denoising=int(description["num_denoising"]),
        draws=draws,
    )
    if denoising is None:
        yield Check("dn", math.inf, 0, "no denoising queries were made")
        return
    yield from _check_denoising(denoising, stored)

    captured: dict[str, Tensor] = {}
    handles = [
        part.register_forward_hook(_keep_list(captured, name))
        for name, part in (("backbone", model.backbone), ("encoder", model.encoder))
    ]
    model.train()
    outputs = model(
        torch.from_numpy(input_array(description["input"])),
        targets,
        denoising,
        record=lambda name, tensor: captured.__setitem__(name, tensor.detach()),
    )
    for handle in handles:
        handle.remove()

    tensors = {**captured, "topk_index": captured["decoder.topk_index"], "topk_score": captured["decoder.topk_score"]}
    for name, values in outputs.items():
        if isinstance(values, dict):
            tensors.update({f"{name}.{key}": tensor.detach() for key, tensor in values.items()})
            reference = outputs["dn_ref_points" if name.startswith("dn_") else "ref_points"]
            tensors[f"{name}.ref_points"] = reference
    order = row_order(captured["decoder.topk_index"].numpy(), stored["topk_index"])
    for name, spec in specs.items():
        if name.split(".")[0] in ("targets", "dn", "before_change", "after_change"):
            continue
        if name not in tensors:
            yield Check(name, math.inf, 0, "this model gives no such tensor")
            continue
        exact = not spec["dtype"].startswith("float")
        tolerance = 0.0 if exact else OUTPUT_TOLERANCE * max(float(spec.get("absmax", 1.0)), 1.0)
        ours = tensors[name].numpy()
        if order is not None and name.split(".")[0].split("_")[0] in ("topk", "main", "aux", "pre", "enc"):
            ours = reorder(ours, order)
        yield compare_stored(name, ours, stored[name], spec, tolerance)

    statistics = description.get("sum_of_l2_norms_of_all_running_mean_and_running_var_after_this_one_forward")
    if statistics:
        for kind, expected in zip(("running_mean", "running_var"), statistics, strict=True):
            norms = [float(b.double().norm()) for n, b in model.named_buffers() if n.endswith(kind)]
            yield Check(f"sum of |{kind}|", abs(sum(norms) / expected - 1.0), 1e-5, "relative")

    criterion = DEIMCriterion(get_criterion_config(case.variant, config.num_classes))
    for moment, expected in description["losses"].items():
        epoch = int(expected["epoch"])
        if order is not None:
            changed = criterion.config.matcher.changed(epoch)
            yield from _check_matches(moment, outputs, targets, criterion, order, stored, changed=changed)
        losses = criterion(outputs, targets, epoch=epoch)
        yield from _check_losses(moment, losses, expected)
        for key, select in (
            ("gradient_l2_per_parameter_without_mal_terms", False),
            ("gradient_l2_per_parameter", True),
        ):
            if key in expected:
                total = torch.stack([v for name, v in losses.items() if select or "mal" not in name]).sum()
                yield from _check_gradients(f"{moment} {key}", model, total, expected[key])


def _targets(stored: Mapping[str, np.ndarray], batch: int) -> list[dict[str, Tensor]]:
    return [{key: torch.from_numpy(stored[f"targets.{i}.{key}"]) for key in ("labels", "boxes")} for i in range(batch)]


def _keep_list(store: dict[str, Tensor], name: str):  # type: ignore[no-untyped-def]
    def hook(module: torch.nn.Module, args: object, maps: list[Tensor]) -> None:
        store.update({f"{name}.out.{i}": level.detach() for i, level in enumerate(maps)})

    return hook


def _check_denoising(denoising: Denoising, stored: Mapping[str, np.ndarray]) -> Iterator[Check]:
    """The generator, given its draws: exact but for the boxes' inverse sigmoid."""
    size = int(stored["dn.attn_mask_shape"][1])
    mask = np.unpackbits(stored["dn.attn_mask_packed"], axis=1)[:, :size].astype(bool)
    split = [denoising.num_groups, *denoising.split]
    yield Check("dn.class_ids", float((denoising.class_ids.numpy() != stored["dn.class_ids"]).sum()), 0)
    yield Check("dn.attn_mask", float((denoising.attn_mask.numpy() != mask).sum()), 0)
    yield Check("dn.num_group_and_split", float(split != stored["dn.num_group_and_split"].tolist()), 0, str(split))
    for i, index in enumerate(denoising.positive_idx):
        same = np.array_equal(index.numpy(), stored[f"dn.positive_idx.{i}"])
        yield Check(f"dn.positive_idx.{i}", float(not same), 0)
    error = np.abs(denoising.bbox_unact.numpy() - stored["dn.bbox_unact"]).max()
    yield Check("dn.bbox_unact", float(error), 1e-5)


def _check_matches(
    moment: str,
    outputs: Mapping[str, Any],
    targets: list[dict[str, Tensor]],
    criterion: DEIMCriterion,
    order: np.ndarray,
    stored: Mapping[str, np.ndarray],
    *,
    changed: bool,
) -> Iterator[Check]:
    """Assignments of every output set and their union: identical."""
    sets = split_outputs(outputs)[0]
    packed = pack_targets(targets, criterion.config.num_classes, sets.boxes.device)
    own = match(sets.logits.detach(), sets.boxes.detach(), packed, criterion.config.matcher, changed=changed)
    # our query q stands in row rank[q] of the stored order
    rank = np.argsort(order, 1)
    assignments = [
        (f"match.{name}", own.per_image(i, sets.num_queries, packed.offsets)) for i, name in enumerate(sets.names)
    ]
    assignments.append(("union", union_assignment(own).per_image(0, sets.num_queries, packed.offsets)))
    for name, images in assignments:
        for i, pairs in enumerate(images):
            key = f"{moment}.{name}.img{i}"
            if key in stored:
                ours = {(int(rank[i, query]), int(target)) for query, target in pairs.T}
                reference = {(int(query), int(target)) for query, target in stored[key].T}
                yield Check(key, float(len(ours ^ reference)), 0, f"{len(reference)} pairs")


def _check_losses(moment: str, losses: Mapping[str, Tensor], expected: Mapping[str, Any]) -> Iterator[Check]:
    reference = expected["losses_weighted"]
    names = set(losses) ^ set(reference)
    yield Check(f"{moment} loss names", float(len(names)), 0, ", ".join(sorted(names)))
    for name in reference:
        if name in losses:
            error = abs(float(losses[name].detach()) - reference[name]) / max(abs(reference[name]), 1e-6)
            yield Check(f"{moment} {name}", error, LOSS_TOLERANCE, "relative")


def _check_gradients(
    title: str, model: torch.nn.Module, total: Tensor, expected: Mapping[str, float | None]
) -> Iterator[Check]:
    """Gradient norms of every parameter, the worst few named."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(total, list(named.values()), retain_graph=True, allow_unused=True)
    ours = {name: None if g is None else float(g.double().norm()) for name, g in zip(named, gradients, strict=True)}
    known = {name: value for name, value in expected.items() if name in ours}
    whole = math.sqrt(sum(value**2 for value in known.values() if value is not None))
    errors: dict[str, float] = {}
    for name, value in known.items():
        floor = whole * (SCALAR_NOISE if named[name].numel() == 1 else NOISE)
        mine = ours[name]
        if value is None or mine is None:
            # an unused parameter may count as a zero gradient
            errors[name] = 0.0 if (value or 0.0) == (mine or 0.0) else math.inf
        else:
            errors[name] = max(abs(mine - value) - floor, 0.0) / max(abs(value), floor)
    worst = max(errors, key=lambda name: errors[name])
    yield Check(f"{title} names", float(len(set(expected) - set(ours))), 0, f"{len(known)} parameters")
    yield Check(title, errors[worst], GRADIENT_TOLERANCE, f"relative, worst {worst}")
