"""What the reference data of the YOLO families share: their schema, inputs and samples."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from carpus.models.yolo.head import Detect
from carpus.models.yolo.nms import non_maximum_suppression
from tests.goldens.case import Check, UnusableFolder, compare_stored
from tests.goldens.deimv2_forward import TOLERANCE_FACTOR
from tests.goldens.weights import fill_model

__all__ = [
    "FLOAT32_EPS",
    "check_decoded",
    "check_suppression",
    "decoded",
    "figures_check",
    "fill_yolo",
    "image_input",
    "sample_check",
    "weights_schema",
]

FLOAT32_EPS = float(np.finfo(np.float32).eps)
_DISTANCE_WEIGHTS = re.compile(r".*\.dfl\.conv\.weight")


def weights_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as ``fill_model`` reads it: the first rule that matches applies, formulas without remarks."""
    overrides = [
        {"match": rule["regex"], "formula": re.split(r"\s{2,}\(", rule["formula"])[0]}
        for rule in reversed(schema.get("overrides", []))
    ]
    keep = [{"match": rule["regex"]} for rule in schema.get("keep", [])]
    return {"state_dict": schema["state_dict"], "overrides": overrides, "keep": keep}


def fill_yolo(model: nn.Module, schema: Mapping[str, Any]) -> Iterator[Check]:
    """Fill a model by the recipe, yielding checks of names, shapes and of the kept bin weights."""
    yield from fill_model(model, weights_schema(schema))
    for name, tensor in model.state_dict().items():
        if _DISTANCE_WEIGHTS.fullmatch(name):
            expected = torch.arange(tensor.shape[1], dtype=tensor.dtype).reshape(tensor.shape)
            yield Check(f"kept {name}", float((tensor - expected).abs().max()), 0)


def image_input(seed: int, shape: list[int], sum_float64: float | None = None) -> np.ndarray:
    """The image of a case: fine noise mixed with coarse noise, (B, 3, H, W) float32 in 0..1.

    Raises:
        UnusableFolder: the sum that the case states is another.
    """
    batch, channels, height, width = shape
    rng = np.random.Generator(np.random.PCG64(seed))
    fine = rng.random((batch, channels, height, width))
    coarse = rng.random((batch, channels, height // 16, width // 16))
    image = (0.5 * fine + 0.5 * coarse.repeat(16, 2).repeat(16, 3)).astype(np.float32)
    if sum_float64 is not None and abs(image.sum(dtype=np.float64) - sum_float64) > 1e-9 * abs(sum_float64):
        raise UnusableFolder(f"the input made from seed {seed} has another sum than the case states")
    return image


def sample_check(name: str, ours: np.ndarray, stored: np.ndarray, spec: Mapping[str, Any], tolerance: float) -> Check:
    """Compare a tensor with the sample stored of it, and with its mean and deviation where they are given.

    The tolerance is at least the rounding of the largest value itself.
    """
    largest = float(np.abs(stored).max()) if stored.size else 0.0
    floor = 2.0 * FLOAT32_EPS * largest
    return compare_stored(name, ours, stored, {**spec, "storage": "strided"}, max(tolerance, floor))


def figures_check(label: str, ours: np.ndarray, entry: Mapping[str, Any], tolerance: float) -> Check:
    """Compare mean, deviation, least and greatest value of a whole tensor."""
    figures = {"mean": ours.mean(dtype=np.float64), "std": ours.std(dtype=np.float64)}
    figures |= {"min": ours.min(), "max": ours.max()}
    error = max(abs(float(value) - entry[key]) for key, value in figures.items())
    return Check(label, error, max(tolerance, 2.0 * FLOAT32_EPS * float(np.abs(ours).max())))


def decoded(head: Detect, raw: list[torch.Tensor]) -> np.ndarray:
    """(B, 4 + C, A): cx, cy, w, h [px] and scores, as the reference data stores them."""
    boxes, logits = head.decode(raw)
    near, far = boxes.chunk(2, -1)
    return torch.cat([(near + far) / 2, far - near, logits.sigmoid()], -1).transpose(1, 2).numpy()


def check_decoded(
    name: str,
    head: Detect,
    raw: list[torch.Tensor],
    answer: Mapping[str, torch.Tensor],
    spec: Mapping[str, Any],
    stored: Mapping[str, np.ndarray],
    deviation: Mapping[str, Any],
    image_size: tuple[int, int],
) -> Iterator[Check]:
    """Decoded boxes and scores of an input, and the boxes that the network answers.

    Args:
        name: of the input.
        head: decodes.
        raw: the head's level maps.
        answer: the network's own output.
        spec: the case's description of this input.
        stored: all arrays.
        deviation: float32 against float64 of this input.
        image_size: (height, width) [px].
    """
    ours = decoded(head, raw)
    bounds = [TOLERANCE_FACTOR * deviation[f"decoded_{part}_max_abs"] for part in ("boxes_px", "scores")]
    strides = spec.get("decoded_strides", {"boxes": 1, "scores": 1})
    whole = stored.get(f"{name}/decoded")
    for part, rows, tolerance in zip(("boxes", "scores"), (slice(0, 4), slice(4, None)), bounds, strict=True):
        sample = stored[f"{name}/decoded_{part}"] if whole is None else whole[:, rows].reshape(-1)
        shape = {"shape": list(ours[:, rows].shape), "stride": strides[part]}
        yield sample_check(f"{name} decoded {part}", ours[:, rows], sample, shape, tolerance)
    size = np.array(image_size[::-1] * 2, np.float32)
    error = np.abs(answer["pred_boxes"].numpy() * size - ours[:, :4].transpose(0, 2, 1)).max()
    yield Check(f"{name} pred_boxes", float(error), bounds[0])
    best = ours[:, 4:].max(1).sum(dtype=np.float64)
    yield Check(f"{name} best scores", abs(best - spec["best_score_sum_float64"]), bounds[1] * ours.shape[2])


def check_suppression(name: str, spec: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Iterator[Check]:
    """Suppression of the stored boxes against the stored answers."""
    for entry in spec.get("nms", []):
        values, options = stored[f"{name}/decoded"][0].T, entry["args"]
        centre, half = values[:, :2], values[:, 2:4] / 2
        ours = non_maximum_suppression(
            np.concatenate([centre - half, centre + half], 1),
            values[:, 4:],
            score_threshold=options["conf_thres"],
            iou_threshold=options["iou_thres"],
            max_detections=options["max_det"],
            multi_label=options.get("multi_label", False),
            class_agnostic=options.get("agnostic", False),
            cluster_sigma=options["sigma"] if options.get("cluster") else None,
        )
        expected = stored[entry["key"]]
        same = ours.shape == expected.shape
        # A weighted mean sums up to thousands of boxes in another order than the stored one.
        tolerance = 1e-3 if options.get("cluster") else 0.0
        error = float(np.abs(ours - expected).max(initial=0.0)) if same else math.inf
        yield Check(entry["key"], error, tolerance, f"{len(ours)} of {len(expected)} boxes")
