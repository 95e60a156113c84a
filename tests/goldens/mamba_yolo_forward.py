"""Mamba-YOLO: state dict and parameter counts (schema.json), eval forward and suppression (case.json, io.npz)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from carpus.models.mamba_yolo.config import get_config
from carpus.models.mamba_yolo.model import MambaYOLO
from carpus.models.yolo.nms import non_maximum_suppression
from carpus.runtime.errors import CarpusError
from tests.goldens.case import Case, Check, UnusableFolder
from tests.goldens.deimv2_forward import TOLERANCE_FACTOR
from tests.goldens.yolo_common import Recorder, fill_yolo, image_input, sample_check

__all__ = ["check_forward", "check_schema", "filled_model", "plain_formulas"]

FLOAT32_EPS = float(np.finfo(np.float32).eps)


def plain_formulas(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with override formulas cut before the remark on their indices."""
    overrides = [{**rule, "formula": rule["formula"].split(" for ")[0]} for rule in schema.get("overrides", [])]
    return {**schema, "overrides": overrides}


def filled_model(case: Case) -> tuple[MambaYOLO, list[Check]]:
    """The case's model with the recipe's weights, and the checks made on the way.

    Raises:
        UnusableFolder: a variant that does not exist here.
    """
    try:
        config = get_config(case.variant, int(case.schema.get("nc", 80)))
    except CarpusError as error:
        raise UnusableFolder(f"{case.folder}: {error}") from error
    model = MambaYOLO(config).eval()
    return model, list(fill_yolo(model, plain_formulas(case.schema)))


def check_schema(case: Case) -> Iterator[Check]:
    """Names, shapes, kept values, parameter counts of the whole and of every layer."""
    model, checks = filled_model(case)
    yield from checks
    total = sum(p.numel() for p in model.parameters())
    yield Check("parameters", abs(total - case.schema["params_total"]), 0, str(total))
    for layer in case.schema.get("layers", []):
        ours = sum(p.numel() for p in model.model[layer["i"]].parameters())
        yield Check(f"parameters layer {layer['i']} {layer['type']}", abs(ours - layer["params"]), 0, str(ours))


def check_forward(case: Case) -> Iterator[Check]:
    """Every stored tensor of every input, and the suppression."""
    description, stored = case.json("case.json"), case.arrays("io.npz")
    model, _ = filled_model(case)
    for name, spec in description["cases"].items():
        yield from _check_input(model, name, spec, stored, description["fp64_deviation"][name])
        yield from _check_suppression(name, spec, stored)


def _check_input(
    model: MambaYOLO, name: str, spec: Mapping[str, Any], stored: Mapping[str, np.ndarray], deviation: Mapping[str, Any]
) -> Iterator[Check]:
    images = image_input(spec["seed"], spec["input_shape"], spec["input_check"]["sum_float64"])
    parts = spec.get("submodules", {"entries": []})
    head = f"model.{len(model.model) - 1}"
    wanted = [f"model.{layer['i']}" for layer in spec["layers"]] + [entry["name"] for entry in parts["entries"]]
    recorder = Recorder(model, [*wanted, head])
    with torch.inference_mode():
        answer = model(torch.from_numpy(images))
    recorder.close()
    yield Check(f"{name} modules", len(recorder.missing), 0, ", ".join(recorder.missing[:4]))

    tolerances = {int(i): TOLERANCE_FACTOR * value for i, value in deviation["layer_max_abs"].items()}
    for layer in spec["layers"]:
        ours = recorder.outputs[f"model.{layer['i']}"].numpy()
        label, tolerance = f"{name} layer {layer['i']} {layer['type']}", tolerances[layer["i"]]
        if "key" in layer:
            yield sample_check(label, ours, stored[layer["key"]], _sample(layer), tolerance)
        yield _figures(f"{label} figures", ours, layer, tolerance)
    for entry in parts["entries"]:
        if entry["name"] in recorder.missing:
            continue
        sample = stored[parts["key"]][entry["offset"] : entry["offset"] + entry["count"]]
        ours = recorder.outputs[entry["name"]].numpy()
        if entry["name"].endswith("out_norm"):
            ours = ours.reshape(entry["shape"])
        # Values inside a block can be much larger than its output, whose deviation is the only one stated.
        layer_index = int(entry["name"].split(".")[1])
        largest = float(np.abs(recorder.outputs[f"model.{layer_index}"].numpy()).max())
        scale = max(1.0, float(np.abs(ours).max()) / largest)
        yield sample_check(f"{name} {entry['name']}", ours, sample, _sample(entry), tolerances[layer_index] * scale)

    raw = recorder.outputs[head]
    for level, (entry, value) in enumerate(zip(spec["raw"], deviation["raw_max_abs"], strict=True)):
        tolerance = TOLERANCE_FACTOR * value
        yield sample_check(f"{name} raw {level}", raw[level].numpy(), stored[entry["key"]], _sample(entry), tolerance)

    ours = _decoded(model, raw)
    bounds = [TOLERANCE_FACTOR * deviation[f"decoded_{part}_max_abs"] for part in ("boxes_px", "scores")]
    strides = spec.get("decoded_strides", {"boxes": 1, "scores": 1})
    whole = stored.get(f"{name}/decoded")
    for part, rows, tolerance in zip(("boxes", "scores"), (slice(0, 4), slice(4, None)), bounds, strict=True):
        sample = stored[f"{name}/decoded_{part}"] if whole is None else whole[:, rows].reshape(-1)
        shape = {"shape": list(ours[:, rows].shape), "stride": strides[part]}
        yield sample_check(f"{name} decoded {part}", ours[:, rows], sample, shape, tolerance)
    size = np.array([images.shape[3], images.shape[2]] * 2, np.float32)
    error = np.abs(answer["pred_boxes"].numpy() * size - ours[:, :4].transpose(0, 2, 1)).max()
    yield Check(f"{name} pred_boxes", float(error), bounds[0])
    best = ours[:, 4:].max(1).sum(dtype=np.float64)
    yield Check(f"{name} best scores", abs(best - spec["best_score_sum_float64"]), bounds[1] * ours.shape[2])


def _sample(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry[key] for key in ("shape", "stride")}


def _figures(label: str, ours: np.ndarray, entry: Mapping[str, Any], tolerance: float) -> Check:
    figures = {"mean": ours.mean(dtype=np.float64), "std": ours.std(dtype=np.float64)}
    figures |= {"min": ours.min(), "max": ours.max()}
    error = max(abs(float(value) - entry[key]) for key, value in figures.items())
    return Check(label, error, max(tolerance, 2.0 * FLOAT32_EPS * float(np.abs(ours).max())))


def _decoded(model: MambaYOLO, raw: list[torch.Tensor]) -> np.ndarray:
    """(B, 4 + C, A): cx, cy, w, h [px] and scores, as the reference data stores them."""
    boxes, logits = model.head.decode(raw)
    near, far = boxes.chunk(2, -1)
    return torch.cat([(near + far) / 2, far - near, logits.sigmoid()], -1).transpose(1, 2).numpy()


def _check_suppression(name: str, spec: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Iterator[Check]:
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
        )
        expected = stored[entry["key"]]
        error = float(np.abs(ours - expected).max(initial=0.0)) if ours.shape == expected.shape else math.inf
        yield Check(entry["key"], error, 0.0, f"{len(ours)} of {len(expected)} boxes")
