"""LW-DETR: state dict, counts and rates (schema.json, training.json), eval forwards (io.npz, io_padded.npz), deploy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from carpus.models.lw_detr.config import LWDETRConfig, OptimizerConfig, get_config
from carpus.models.lw_detr.deploy import deploy
from carpus.models.lw_detr.model import LWDETR
from carpus.models.lw_detr.optimizer import parameter_groups
from carpus.runtime.errors import CarpusError
from tests.goldens.case import Case, Check, UnusableFolder, compare_stored, input_array
from tests.goldens.deimv2_forward import TOLERANCE_FACTOR, reorder, row_order
from tests.goldens.recorder import Recorder
from tests.goldens.weights import fill_model

__all__ = [
    "check_deploy",
    "check_forward",
    "check_optimizer",
    "check_padded",
    "check_schema",
    "filled_model",
]

SUGGESTED = {"pred_logits": 1e-3, "pred_boxes": 1e-4, "dets": 1e-4, "labels": 1e-3}
"""Suggested by the eval cases; the padded and deploy cases state no float64 deviation of their own."""

_MODULES = (
    (re.compile(r"projector\.c2f\.(\d+)"), r"backbone.0.projector.stages.\1.0"),
    (re.compile(r"projector\.c2f\.(\d+)\.cv1"), r"backbone.0.projector.stages.\1.0.cv1"),
    (re.compile(r"decoder\.layers\.(\d+)\.out"), r"transformer.decoder.layers.\1"),
    (re.compile(r"decoder\.layers\.(\d+)\.(self_attn|cross_attn)"), r"transformer.decoder.layers.\1.\2"),
)


def case_config(case: Case) -> LWDETRConfig:
    """The configuration of the case's variant.

    Raises:
        UnusableFolder: a variant that does not exist here.
    """
    try:
        config = get_config(case.variant)
    except CarpusError as error:
        raise UnusableFolder(f"{case.folder}: {error}") from error
    hyper = case.schema.get("hyperparameters", {})
    return config.with_num_classes(int(hyper.get("num_classes_logits", config.num_classes)))


def filled_model(case: Case) -> tuple[LWDETR, list[Check]]:
    """The case's model with the recipe's weights, and the checks made on the way."""
    model = LWDETR(case_config(case)).eval()
    return model, list(fill_model(model, case.schema))


def check_schema(case: Case) -> Iterator[Check]:
    """Names, shapes, weights' hashes, parameter counts of training and inference."""
    model, checks = filled_model(case)
    yield from checks
    expected = case.schema["parameters"]
    total = sum(p.numel() for p in model.parameters())
    yield Check("parameters trainable", abs(total - expected["trainable_total"]), 0, str(total))
    for name, count in expected.get("per_module", {}).items():
        module = model.get_submodule(name)
        ours = sum(p.numel() for p in module.parameters())
        yield Check(f"parameters {name}", abs(ours - count), 0, str(ours))
    slim = sum(p.numel() for p in deploy(model, fuse=False).parameters())
    yield Check("parameters of one group", abs(slim - expected["inference_only_group_0"]), 0, str(slim))


def check_optimizer(case: Case) -> Iterator[Check]:
    """Learning rate and decay of every parameter."""
    description = case.json("training.json")
    config = case_config(case)
    with torch.device("meta"):
        model = LWDETR(config)
    groups = parameter_groups(model, config.encoder.depth, config.optimizer)
    ours = {name: (group.lr, group.weight_decay) for group in groups for name in group.names}
    stored = {name: (g["lr"], g["weight_decay"]) for g in description["parameter_groups"] for name in g["names"]}
    yield Check("parameter names", float(len(set(ours) ^ set(stored))), 0, f"{len(stored)} parameters")
    known = [name for name in stored if name in ours]
    # The stored rates are rounded to ten decimals and more
    worst = max(abs(ours[name][0] - stored[name][0]) / stored[name][0] for name in known)
    yield Check("learning rates", worst, 1e-5, "relative")
    yield Check("weight decays", float(sum(ours[name][1] != stored[name][1] for name in known)), 0, "that differ")
    finetune = description["finetune_coco"]
    given = OptimizerConfig(
        lr=finetune["lr"],
        lr_encoder=finetune["lr_encoder"],
        weight_decay=finetune["weight_decay"],
        layer_decay=finetune["lr_vit_layer_decay"],
        component_decay=finetune["lr_component_decay"],
    )
    yield Check("rates of fine-tuning", float(given != config.optimizer), 0)
    yield Check("drop path", abs(float(finetune["drop_path"]) - config.encoder.drop_path), 0)


def _per_query(name: str) -> bool:
    return name.startswith(("pred_", "aux.", "enc.pred_", "enc.topk_", "decoder."))


def compare_all(
    case: Case,
    archive: str,
    specs: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    tolerance: Mapping[str, float],
) -> Iterator[Check]:
    """Every stored tensor; queries are brought into the stored order when the same positions were selected.

    Args:
        case: the case.
        archive: .npz file with the stored values.
        specs: their descriptions.
        tensors: ours by name.
        tolerance: largest difference by name.
    """
    stored = case.arrays(archive)
    order = row_order(tensors["enc.topk_index"], stored.get("enc.topk_index"))
    for name, spec in specs.items():
        if name not in stored:
            raise UnusableFolder(f"{case.folder / archive}: has no array {name!r}, which the case describes")
        if name not in tensors:
            yield Check(name, math.inf, 0, "this model records no such tensor")
            continue
        ours = tensors[name]
        if order is not None and _per_query(name):
            ours = reorder(ours, order)
        yield compare_stored(name, ours, stored[name], spec, tolerance.get(name, 0.0))


def run_model(
    model: LWDETR, images: torch.Tensor, names: list[str], mask: torch.Tensor | None = None
) -> dict[str, np.ndarray]:
    """All named tensors of an eval forward."""
    paths = {n: pattern.sub(path, n) for n in names for pattern, path in _MODULES if pattern.fullmatch(n)}
    recorder = Recorder(model, paths)
    with torch.inference_mode():
        outputs = model(images, mask=mask, record=recorder)
    recorder.close()
    tensors = {name: tensor.numpy() for name, tensor in {**recorder.outputs, **outputs}.items()}
    tensors["enc.topk_index"] = tensors["enc.topk_index"][0]
    return tensors


def check_forward(case: Case) -> Iterator[Check]:
    """Every stored intermediate and final tensor of the eval forward."""
    description = case.json("case.json")
    model, _ = filled_model(case)
    specs = description["arrays"]
    tensors = run_model(model, torch.from_numpy(input_array(description["input"])), list(specs))
    deviations = description["float64_check"]["max_abs_difference_float32_vs_float64"]
    tolerance = {}
    for name, spec in specs.items():
        if spec["dtype"].startswith("float"):
            # Rounding of the stored value itself, where a tensor happens to deviate by nothing
            floor = 2.0 * float(np.finfo(np.float32).eps) * float(spec.get("absmax", 1.0))
            tolerance[name] = max(TOLERANCE_FACTOR * float(deviations.get(name, 0.0)), floor)
    yield from compare_all(case, "io.npz", specs, tensors, tolerance)


def check_padded(case: Case) -> Iterator[Check]:
    """A batch of two images of different size, padded at the right and the bottom."""
    description = case.json("io_padded.json")
    images = [torch.from_numpy(input_array(spec)) for spec in description["inputs"]]
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    batch = torch.zeros(len(images), 3, height, width)
    mask = torch.ones(len(images), height, width, dtype=torch.bool)
    for i, image in enumerate(images):
        batch[i, :, : image.shape[1], : image.shape[2]] = image
        mask[i, : image.shape[1], : image.shape[2]] = False
    model, _ = filled_model(case)
    specs = description["arrays"]
    tensors = run_model(model, batch, list(specs), mask)
    tolerance = {name: SUGGESTED.get(name.removeprefix("enc."), 1e-4) for name in specs}
    tolerance.update({"enc.topk_index": 0.0, "valid_ratios": 0.0})
    yield from compare_all(case, "io_padded.npz", specs, tensors, tolerance)


def check_deploy(case: Case) -> Iterator[Check]:
    """Outputs of the exported form, then the ranked detections."""
    description, stored = case.json("deploy.json"), case.arrays("deploy.npz")
    model, _ = filled_model(case)
    images = torch.from_numpy(input_array(description["input"]))
    for fuse in (False, True):
        with torch.inference_mode():
            outputs = {k: v.numpy() for k, v in deploy(model, fuse=fuse)(images).items()}
        for name, key in (("dets", "pred_boxes"), ("labels", "pred_logits")):
            spec = description["arrays"][name]
            yield compare_stored(name, outputs[key], stored[name], spec, SUGGESTED[name], f"fused: {fuse}")
    yield from _check_ranked(outputs["pred_logits"][0], outputs["pred_boxes"][0], stored)


def _check_ranked(logits: np.ndarray, boxes: np.ndarray, stored: Mapping[str, np.ndarray]) -> Iterator[Check]:
    """Scores by rank; labels and boxes by pairing each reference row with a like row of nearly equal score."""
    scores, labels, corners = stored["post_scores"], stored["post_labels"], stored["post_boxes"]
    height, width = (float(side) for side in stored["target_sizes"][0])
    flat = 1.0 / (1.0 + np.exp(-logits.astype(np.float64).reshape(-1)))
    index = np.argsort(-flat, kind="stable")[: len(scores)]
    cx, cy, w, h = np.moveaxis(boxes[index // logits.shape[1]].astype(np.float64), -1, 0)
    w, h = np.maximum(w, 0.0), np.maximum(h, 0.0)
    ours = np.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], -1) * [width, height, width, height]
    yield Check("post_scores", float(np.abs(flat[index] - scores).max()), 1e-4)
    unpaired, worst = 0, 0.0
    for label, box, score in zip(labels, corners, scores, strict=True):
        near = (index % logits.shape[1] == label) & (np.abs(flat[index] - score) < 1e-4)
        if near.any():
            worst = max(worst, float(np.abs(ours[near] - box).max(-1).min()))
        else:
            # rows about as good as the last may be cut differently
            unpaired += bool(score > scores[-1] + 1e-4)
    yield Check("post_labels", float(unpaired), 0, "rows without a partner")
    yield Check("post_boxes", worst, 1e-4 * max(height, width), "px")
