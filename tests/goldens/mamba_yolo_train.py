"""Mamba-YOLO: one training-mode forward and backward (train_step.json, train_step.npz)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from carpus.models.mamba_yolo.config import get_loss_config
from carpus.models.yolo.loss import YOLOCriterion
from tests.goldens.case import Case, Check
from tests.goldens.mamba_yolo_forward import filled_model
from tests.goldens.yolo_common import image_input, sample_check
from tests.goldens.yolo_master_train import targets_of_rows

__all__ = ["check_train_step"]

RAW_TOLERANCE = 2e-4
"""Of the largest value. The coarsest maps hold 16 cells an image, so that their batch statistics enlarge the rounding
of everything before them: the stored values are 5e-4 of the largest away from what this network gives in float64."""
LOSS_TOLERANCE = 5e-5
"""Relative; the stored float32 losses are 9e-5 (classes) and 2e-5 (boxes) away from those in float64. The criterion
alone is held to 1e-5 on stored inputs by the cases of the loss."""
STATISTICS_TOLERANCE = 1e-4
"""Relative, for the same reason."""
GRADIENT_TOLERANCE = 5e-3
"""Relative to the tensor's norm: gradients pass through every BatchNorm of the network."""


def check_train_step(case: Case) -> Iterator[Check]:
    """Raw maps, losses, gradients and running statistics of one step."""
    description, stored = case.json("train_step.json"), case.arrays("train_step.npz")
    model, _ = filled_model(case)
    model.train()
    spec = description["input"]
    images = torch.from_numpy(image_input(spec["seed"], spec["shape"], spec["sum_float64"]))
    outputs = model(images)
    for entry, level in zip(description["raw"], outputs["raw"], strict=True):
        ours = level.detach().numpy()
        tolerance = RAW_TOLERANCE * float(np.abs(ours).max())
        yield sample_check(entry["key"], ours, stored[entry["key"]], entry, tolerance)

    criterion = YOLOCriterion(get_loss_config(case.variant, model.config.num_classes))
    targets = targets_of_rows(description["targets_rows_image_class_cx_cy_w_h"], len(images))
    losses = criterion(outputs, targets)
    for term, goal in description["loss_items_after_gain"].items():
        ours = float(losses[f"loss_{term}"].detach()) / len(images)
        yield Check(f"loss {term}", abs(ours - goal) / abs(goal), LOSS_TOLERANCE, "relative")
    total = torch.stack(list(losses.values())).sum()
    goal = description["loss_returned_sum_times_batch"]
    yield Check("loss total", abs(float(total.detach()) - goal) / goal, LOSS_TOLERANCE, "relative")

    total.backward()
    yield from _check_gradients(dict(model.named_parameters()), description["grad_l2_order"], stored)
    for kind in ("running_mean", "running_var"):
        norms = [float(getattr(model.get_submodule(name), kind).double().norm()) for name in description["bn_order"]]
        error = np.abs(np.array(norms) / stored[f"bn_{kind}_l2"] - 1.0).max()
        yield Check(f"{kind} of {len(norms)} norms", float(error), STATISTICS_TOLERANCE, "relative")


def _check_gradients(
    parameters: Mapping[str, torch.nn.Parameter], order: list[str], stored: Mapping[str, np.ndarray]
) -> Iterator[Check]:
    gradients = {name: p.grad.double().flatten() for name, p in parameters.items() if p.grad is not None}
    extra = sorted(set(gradients) ^ set(order))
    yield Check("parameters with a gradient", len(extra), 0, f"{len(order)}{', not ' if extra else ''}{extra[:3]}")
    norms, few = stored["grad_l2"], stored["grad_first_mid_last"]
    # Gradients that vanish before a BatchNorm hold nothing but rounding
    floor = 1e-6 * float(np.linalg.norm(norms))
    errors, elements = {}, {}
    for row, name in enumerate(order):
        if name in gradients:
            gradient, scale = gradients[name], max(float(norms[row]), floor)
            errors[name] = max(abs(float(gradient.norm()) - float(norms[row])) - floor, 0.0) / scale
            ours = gradient[[0, len(gradient) // 2, -1]].numpy()
            elements[name] = max(float(np.abs(ours - few[row]).max()) - floor, 0.0) / scale
    for title, values in (("gradient norms", errors), ("gradient elements", elements)):
        worst = max(values, key=lambda name: values[name])
        yield Check(title, values[worst], GRADIENT_TOLERANCE, f"relative, worst {worst}")
    for key, goal in stored.items():
        if key.startswith("grad/"):
            ours = gradients[key[5:]].numpy().reshape(goal.shape)
            error = float(np.abs(ours - goal).max() / np.abs(goal).max())
            yield Check(key, error, GRADIENT_TOLERANCE, "relative to the largest")
