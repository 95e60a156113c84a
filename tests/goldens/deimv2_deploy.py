"""DEIMv2: the fused form and the ranked detections (deploy.json, deploy.npz)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from carpus.models.deimv2.deploy import deploy
from tests.goldens.case import Case, Check, compare_stored, input_array
from tests.goldens.deimv2_forward import filled_model

__all__ = ["check_deploy"]

LOGITS_TOLERANCE = 1e-3
BOXES_TOLERANCE = 1e-4
"""Suggested by the eval cases; the deploy case states no float64 deviation of its own."""


def check_deploy(case: Case) -> Iterator[Check]:
    """Outputs of both fused forms, then labels, boxes and scores as the published post-processing ranks them."""
    description, stored = case.json("deploy.json"), case.arrays("deploy.npz")
    model, _ = filled_model(case)
    images = torch.from_numpy(input_array(description["input"]))
    specs = description["arrays"]
    outputs = {}
    for form in ("official", "all"):
        with torch.inference_mode():
            outputs = {k: v.numpy() for k, v in deploy(model, fuse=form)(images).items()}
        for key, tolerance in (("pred_logits", LOGITS_TOLERANCE), ("pred_boxes", BOXES_TOLERANCE)):
            name = f"deploy_{key}"
            yield compare_stored(name, outputs[key], stored[name], specs[name], tolerance, f"fused: {form}")

    top = int(case.schema["hyperparameters"]["postprocess"]["num_top_queries"])
    ours = _ranked(outputs["pred_logits"], outputs["pred_boxes"], stored["orig_target_sizes"][0], top)
    reference = stored["labels"][0], stored["boxes"][0], stored["scores"][0]
    yield from _compare_ranked("", ours, reference, float(stored["orig_target_sizes"].max()))
    if "eval_scores" in stored:
        ids = np.asarray(case.schema["hyperparameters"]["label_to_coco_category_id"])
        mapped = ids[ours[0]], ours[1], ours[2]
        reference = stored["eval_labels_coco_category_ids"], stored["eval_boxes"], stored["eval_scores"]
        yield from _compare_ranked("eval_", mapped, reference, float(stored["orig_target_sizes"].max()))


Ranked = tuple[np.ndarray, np.ndarray, np.ndarray]


def _ranked(logits: np.ndarray, boxes: np.ndarray, size: np.ndarray, top: int) -> Ranked:
    """Labels (K,), boxes (K, 4) xyxy pixels and scores (K,) of one image, best first."""
    classes = logits.shape[2]
    scores = 1.0 / (1.0 + np.exp(-logits[0].astype(np.float64).reshape(-1)))
    index = np.argsort(-scores, kind="stable")[:top]
    cx, cy, w, h = np.moveaxis(boxes[0][index // classes].astype(np.float64), -1, 0)
    corners = np.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], -1)
    return index % classes, corners * np.tile(size, 2), scores[index]


def _compare_ranked(prefix: str, ours: Ranked, reference: Ranked, side: float) -> Iterator[Check]:
    """Scores by rank; labels and boxes by pairing each reference row with the like row of nearly equal score."""
    labels, boxes, scores = reference
    if ours[2].shape != scores.shape:
        yield Check(f"{prefix}scores", math.inf, 0, f"shape {ours[2].shape}, expected {scores.shape}")
        return
    yield Check(f"{prefix}scores", float(np.abs(ours[2] - scores).max()), 1e-4)
    unpaired, worst = 0, 0.0
    edge = scores[-1] + 1e-4
    for label, box, score in zip(labels, boxes, scores, strict=True):
        near = (ours[0] == label) & (np.abs(ours[2] - score) < 1e-4)
        if not near.any():
            # rows about as good as the last may be cut differently
            unpaired += bool(score > edge)
            continue
        worst = max(worst, float(np.abs(ours[1][near] - box).max(-1).min()))
    yield Check(f"{prefix}labels", float(unpaired), 0, "rows without a partner")
    yield Check(f"{prefix}boxes", worst, BOXES_TOLERANCE * side, "px")
