"""The YOLO families' detection loss on given maps, and their letterbox (folder without a schema)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from carpus.models.yolo.assigner import assign
from carpus.models.yolo.head import STRIDES, anchor_points, flatten_levels
from carpus.models.yolo.letterbox import letterbox_preprocess, letterbox_to_source
from carpus.models.yolo.loss import LossConfig, YOLOCriterion, decode_distances, pad_targets
from tests.goldens.case import Case, Check
from tests.goldens.yolo_master_train import check_loss_items, targets_of_rows

__all__ = ["check_loss", "check_preprocess"]

TOLERANCE = 1e-5
"""Relative to the largest value."""


def _relative(name: str, ours: torch.Tensor, goal: np.ndarray, tolerance: float = TOLERANCE) -> Check:
    values = ours.detach().numpy()
    if values.shape != goal.shape:
        return Check(name, math.inf, tolerance, f"shape {values.shape}, expected {goal.shape}")
    error = float(np.abs(values - goal).max(initial=0.0)) / max(float(np.abs(goal).max(initial=0.0)), 1e-12)
    return Check(name, error, tolerance, "relative to the largest")


def _equal(name: str, ours: torch.Tensor, goal: np.ndarray) -> Check:
    values = ours.numpy()
    wrong = math.inf if values.shape != goal.shape else float((values != goal).sum())
    return Check(name, wrong, 0, "number that differ")


def check_loss(case: Case) -> Iterator[Check]:
    """Assignment, terms and gradients of every case."""
    description, stored = case.json("detection_loss.json"), case.arrays("detection_loss.npz")
    for name, spec in description["cases"].items():
        prefix = f"{name}/"
        own = {key[len(prefix) :]: value for key, value in stored.items() if key.startswith(prefix)}
        yield from _check_loss_case(f"{name} ", spec, own)


def _maps(seed: int, stored: Mapping[str, np.ndarray]) -> list[torch.Tensor]:
    """Raw level maps: as stored, or made by the case's recipe where they are left out."""
    rng = np.random.Generator(np.random.PCG64(seed))
    slope = 0.25 * np.tile(np.arange(16), 4).reshape(1, -1, 1, 1)
    maps = []
    for level in range(3):
        batch, _, height, width = stored[f"grad_feat{level}"].shape
        box = rng.standard_normal((batch, 64, height, width)) - slope
        classes = rng.standard_normal((batch, 80, height, width)) - 2
        made = np.concatenate([box, classes], 1).astype(np.float32)
        maps.append(torch.from_numpy(stored.get(f"feat{level}", made)))
    return maps


def _check_loss_case(name: str, spec: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Iterator[Check]:
    config = LossConfig()
    raw = [level.requires_grad_() for level in _maps(spec["seed"], stored)]
    batch = raw[0].shape[0]
    targets = targets_of_rows(stored["targets"], batch)
    box_logits, class_logits = flatten_levels(raw, 4 * config.reg_max)
    points, stride = anchor_points(raw)
    boxes = decode_distances(box_logits.transpose(1, 2).unflatten(-1, (4, config.reg_max)), points)
    yield _equal(f"{name}anchor points", points, stored["anchor_points"])
    yield _equal(f"{name}strides", stride, stored["stride_per_anchor"])
    yield _relative(f"{name}boxes", boxes, stored["pred_boxes_grid_xyxy"])
    size = (raw[0].shape[2] * STRIDES[0], raw[0].shape[3] * STRIDES[0])
    labels, object_boxes, mask = pad_targets(targets, size, torch.device("cpu"))
    yield _equal(f"{name}object labels", labels[..., None], stored["gt_labels"])
    yield _relative(f"{name}object boxes", object_boxes, stored["gt_boxes_px_xyxy"])
    yield _equal(f"{name}object mask", mask[..., None], stored["gt_mask"] > 0)
    assignment = assign(
        class_logits.transpose(1, 2).detach().sigmoid(),
        boxes.detach() * stride,
        points * stride,
        labels,
        object_boxes,
        mask,
    )
    yield _equal(f"{name}foreground", assignment.foreground, stored["fg_mask"])
    yield _equal(f"{name}object of each point", assignment.object_index, stored["target_gt_idx"])
    yield _equal(f"{name}target labels", assignment.labels, stored["target_labels"])
    yield _relative(f"{name}target boxes", assignment.boxes, stored["target_boxes_px_xyxy"])
    index = assignment.scores.nonzero()
    yield _equal(f"{name}target score places", index, stored["target_scores_index"])
    yield _relative(f"{name}target scores", assignment.scores[tuple(index.T)], stored["target_scores_value"])
    losses = YOLOCriterion(config)({"raw": raw}, targets)
    yield from check_loss_items(name, losses, spec["loss_items_after_gain"], batch)
    total = torch.stack(list(losses.values())).sum()
    goal = spec["total_returned_times_batch"]
    yield Check(f"{name}loss total", abs(float(total.detach()) - goal) / goal, TOLERANCE, "relative")
    total.backward()
    for level, values in enumerate(raw):
        gradient = torch.zeros_like(values) if values.grad is None else values.grad
        yield _relative(f"{name}gradient of level {level}", gradient, stored[f"grad_feat{level}"])


def check_preprocess(case: Case) -> Iterator[Check]:
    """Letterboxed images and boxes brought back to the image."""
    description, stored = case.json("preprocess.json"), case.arrays("preprocess.npz")
    for spec in description["cases"]:
        name = spec["name"]
        height, width = spec["image_hw"]
        rng = np.random.Generator(np.random.PCG64(spec["image_seed"]))
        block = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3)).astype(np.uint8)
        bgr = block.repeat(4, 0).repeat(4, 1)[:height, :width]
        tensor, letterbox = letterbox_preprocess(
            bgr[..., ::-1], (spec["target"], spec["target"]), minimal=spec["auto"], enlarge=spec["scaleup"]
        )
        yield Check(f"{name} size", float(tensor.shape[1:] != tuple(spec["out_hw"])), 0, str(tensor.shape))
        left, top = letterbox.offset
        rows, columns = [top, top + letterbox.content_size[0]], [left, left + letterbox.content_size[1]]
        yield Check(f"{name} rows", float(rows != spec["content_rows"]), 0, str(rows))
        yield Check(f"{name} columns", float(columns != spec["content_cols"]), 0, str(columns))
        sample = tensor.reshape(-1)[:: spec["tensor_stride"]]
        # Bilinear resizing in fixed point may round to the neighbouring grey level
        error = float(np.abs(sample - stored[f"{name}/tensor"]).max())
        yield Check(f"{name} values", error, 1.01 / 255)
        mean = abs(tensor.mean(dtype=np.float64) - spec["tensor_mean_float64"])
        yield Check(f"{name} mean", mean, 1e-4)
        boxes = letterbox_to_source(stored[f"{name}/boxes_in"], letterbox)
        error = float(np.abs(boxes - stored[f"{name}/boxes_out"]).max())
        yield Check(f"{name} boxes", error, 1e-4)
