"""YOLO-Master: one training-mode forward and backward (train_step.json, train_step.npz)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from carpus.models.yolo.loss import YOLOCriterion
from carpus.models.yolo_master.config import get_loss_config
from carpus.models.yolo_master.routing import SpatialRouter
from tests.goldens.case import Case, Check
from tests.goldens.yolo_common import image_input, sample_check
from tests.goldens.yolo_master_forward import filled_model, moe_layers

__all__ = ["check_loss_items", "check_train_step", "targets_of_rows"]

LOSS_TOLERANCE = 1e-5
"""Relative."""
RAW_TOLERANCE = 2e-5
"""Of the largest value: batch statistics of few values enlarge rounding; the case states no deviation of its own."""
GRADIENT_TOLERANCE = 1e-2
"""Relative to the tensor's norm. The stored float32 gradients deviate from float64 by up to 3.4e-3 themselves: the
batch statistics of the coarsest level come from 32 values."""
MEDIAN_GRADIENT_TOLERANCE = 1e-4
"""Relative: half of the tensors must agree far better."""


def targets_of_rows(rows: np.ndarray, batch: int) -> list[dict[str, torch.Tensor]]:
    """Rows (n, 6) of image index, class, cx, cy, w, h as one target an image."""
    rows = np.asarray(rows, np.float32).reshape(-1, 6)
    targets = []
    for image in range(batch):
        own = rows[rows[:, 0] == image]
        labels = torch.from_numpy(own[:, 1].astype(np.int64))
        targets.append({"labels": labels, "boxes": torch.from_numpy(own[:, 2:].copy())})
    return targets


def check_loss_items(
    name: str, losses: Mapping[str, torch.Tensor], expected: Mapping[str, float], batch: int
) -> Iterator[Check]:
    """Loss terms after their gain, which the criterion returns times the batch size."""
    for term, value in expected.items():
        ours = float(losses[f"loss_{term}"].detach()) / batch if f"loss_{term}" in losses else 0.0
        yield Check(f"{name}loss {term}", abs(ours - value) / max(abs(value), 1e-12), LOSS_TOLERANCE, "relative")


def check_train_step(case: Case) -> Iterator[Check]:
    """Raw maps, losses, gradients and running statistics of one step."""
    description, stored = case.json("train_step.json"), case.arrays("train_step.npz")
    model, _ = filled_model(case)
    for layer in moe_layers(model).values():
        if isinstance(layer.routing, SpatialRouter):
            layer.routing.noise_std = 0.0
    model.train()
    spec = description["input"]
    images = torch.from_numpy(image_input(spec["seed"], spec["shape"], spec["sum_float64"]))
    batch = images.shape[0]
    auxiliary: dict[str, float] = {}
    handles = [
        module.register_forward_hook(lambda _m, _a, out, name=name: auxiliary.update({name: float(out[1].detach())}))
        for name, module in moe_layers(model).items()
    ]
    outputs = model(images)
    for handle in handles:
        handle.remove()
    for entry, level in zip(description["raw"], outputs["raw"], strict=True):
        ours = level.detach().numpy()
        tolerance = RAW_TOLERANCE * float(np.abs(ours).max())
        yield sample_check(entry["key"], ours, stored[entry["key"]], entry, tolerance)
    for name, value in description["aux_loss_per_moe_layer"].items():
        yield Check(f"auxiliary {name}", abs(auxiliary[name] - value) / abs(value), LOSS_TOLERANCE, "relative")

    criterion = YOLOCriterion(get_loss_config(case.variant, model.config.num_classes))
    targets = targets_of_rows(description["targets_rows_image_class_cx_cy_w_h"], batch)
    losses = criterion(outputs, targets)
    yield from check_loss_items("", losses, description["loss_items_after_gain"], batch)
    total = torch.stack(list(losses.values())).sum()
    goal = description["loss_returned_sum_times_batch"]
    yield Check("loss total", abs(float(total.detach()) - goal) / goal, LOSS_TOLERANCE, "relative")
    total.backward()
    yield from _check_gradients(dict(model.named_parameters()), description["grad_l2_order"], stored)
    yield from _check_statistics(model, description["bn_order"], stored)


def _check_gradients(
    parameters: Mapping[str, Any], order: Sequence[str], stored: Mapping[str, np.ndarray]
) -> Iterator[Check]:
    with_gradient = {name for name, p in parameters.items() if p.grad is not None and bool(p.grad.any())}
    extra = sorted(with_gradient - set(order))
    yield Check("parameters without a stored gradient", len(extra), 0, ", ".join(extra[:3]))
    norms, few = stored["grad_l2"], stored["grad_first_mid_last"]
    # Gradients that vanish by symmetry hold nothing but rounding
    largest = float(norms.max())
    worst_norm = worst_value = 0.0
    errors = []
    where = ""
    for row, name in enumerate(order):
        gradient = parameters[name].grad.double().flatten()
        scale = max(float(norms[row]), 1e-6 * largest)
        error = abs(float(gradient.norm()) - float(norms[row])) / scale
        ours = gradient[[0, len(gradient) // 2, -1]].numpy()
        worst_value = max(worst_value, float(np.abs(ours - few[row]).max()) / scale)
        errors.append(error)
        if error > worst_norm:
            worst_norm, where = error, name
    yield Check("gradient norms", worst_norm, GRADIENT_TOLERANCE, f"relative, {len(order)} tensors, worst {where}")
    yield Check("gradient norms, median", float(np.median(errors)), MEDIAN_GRADIENT_TOLERANCE, "relative")
    yield Check("gradient elements", worst_value, GRADIENT_TOLERANCE, "relative to the norm")
    for key in stored:
        if key.startswith("grad/"):
            ours, goal = parameters[key[5:]].grad.numpy(), stored[key]
            error = float(np.abs(ours - goal).max() / np.abs(goal).max())
            yield Check(key, error, GRADIENT_TOLERANCE, "relative")


def _check_statistics(
    model: torch.nn.Module, order: Sequence[str], stored: Mapping[str, np.ndarray]
) -> Iterator[Check]:
    for kind in ("running_mean", "running_var"):
        ours = np.array([float(getattr(model.get_submodule(name), kind).double().norm()) for name in order])
        error = np.abs(ours - stored[f"bn_{kind}_l2"]) / stored[f"bn_{kind}_l2"]
        yield Check(f"{kind} of {len(order)} norms", float(error.max()), LOSS_TOLERANCE, "relative")
