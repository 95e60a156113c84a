"""Mamba-YOLO: state dict and parameter counts (schema.json), eval forward and suppression (case.json, io.npz)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from carpus.models.mamba_yolo.config import get_config
from carpus.models.mamba_yolo.model import MambaYOLO
from carpus.runtime.errors import CarpusError
from tests.goldens.case import Case, Check, UnusableFolder
from tests.goldens.deimv2_forward import TOLERANCE_FACTOR
from tests.goldens.recorder import Recorder, by_path
from tests.goldens.yolo_common import (
    check_decoded,
    check_suppression,
    figures_check,
    fill_yolo,
    image_input,
    sample_check,
)

__all__ = ["check_forward", "check_schema", "filled_model", "plain_formulas"]


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
        yield from check_suppression(name, spec, stored)


def _check_input(
    model: MambaYOLO, name: str, spec: Mapping[str, Any], stored: Mapping[str, np.ndarray], deviation: Mapping[str, Any]
) -> Iterator[Check]:
    images = image_input(spec["seed"], spec["input_shape"], spec["input_check"]["sum_float64"])
    parts = spec.get("submodules", {"entries": []})
    head = f"model.{len(model.model) - 1}"
    wanted = [f"model.{layer['i']}" for layer in spec["layers"]] + [entry["name"] for entry in parts["entries"]]
    recorder = Recorder(model, by_path([*wanted, head]))
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
        yield figures_check(f"{label} figures", ours, layer, tolerance)
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

    size = (images.shape[2], images.shape[3])
    yield from check_decoded(name, model.head, raw, answer, spec, stored, deviation, size)


def _sample(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry[key] for key in ("shape", "stride")}
