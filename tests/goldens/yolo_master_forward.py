"""YOLO-Master: state dict and parameters (schema.json), eval forward, routing, suppression (case.json, io.npz)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from carpus.models.yolo_master.config import get_config
from carpus.models.yolo_master.model import YOLOMaster
from carpus.models.yolo_master.moe import EfficientSparseMoE, ModularRouterExpertMoE
from carpus.models.yolo_master.routing import Routing, SpatialRouter
from carpus.runtime.errors import CarpusError
from tests.goldens.case import Case, Check, UnusableFolder
from tests.goldens.deimv2_forward import TOLERANCE_FACTOR
from tests.goldens.recorder import Recorder, by_path
from tests.goldens.yolo_common import (
    check_decoded,
    check_suppression,
    decoded,
    figures_check,
    fill_yolo,
    image_input,
    sample_check,
)

__all__ = ["check_forward", "check_schema", "filled_model", "moe_layers"]


def filled_model(case: Case) -> tuple[YOLOMaster, list[Check]]:
    """The case's model with the recipe's weights, and the checks made on the way.

    Raises:
        UnusableFolder: a variant that does not exist here.
    """
    try:
        config = get_config(case.variant, int(case.schema.get("nc", 80)))
    except CarpusError as error:
        raise UnusableFolder(f"{case.folder}: {error}") from error
    model = YOLOMaster(config).eval()
    return model, list(fill_yolo(model, case.schema))


def check_schema(case: Case) -> Iterator[Check]:
    """Names, shapes, kept values, parameter counts of the whole and of every layer."""
    model, checks = filled_model(case)
    yield from checks
    total = sum(p.numel() for p in model.parameters())
    yield Check("parameters", abs(total - case.schema["params_total"]), 0, str(total))
    for layer in case.schema.get("layers", []):
        ours = sum(p.numel() for p in model.model[layer["i"]].parameters())
        yield Check(f"parameters layer {layer['i']}", abs(ours - layer["params"]), 0, str(ours))


def moe_layers(model: YOLOMaster) -> dict[str, EfficientSparseMoE | ModularRouterExpertMoE]:
    """Mixture-of-experts layers by name."""
    kinds = EfficientSparseMoE | ModularRouterExpertMoE
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def check_forward(case: Case) -> Iterator[Check]:
    """Every stored tensor of every input, the routing in both modes, and the suppression."""
    description, stored = case.json("case.json"), case.arrays("io.npz")
    model, _ = filled_model(case)
    for name, spec in description["cases"].items():
        yield from _check_input(model, name, spec, stored, description["fp64_deviation"][name])
        yield from check_suppression(name, spec, stored)
    if "training_mode_routing" in description:
        deviation = description["fp64_deviation"]["r192x256"]
        yield from _check_training_routing(model, description["training_mode_routing"], stored, deviation)


def _check_input(
    model: YOLOMaster,
    name: str,
    spec: Mapping[str, Any],
    stored: Mapping[str, np.ndarray],
    deviation: Mapping[str, Any],
) -> Iterator[Check]:
    images = image_input(spec["seed"], spec["input_shape"], spec["input_check"]["sum_float64"])
    parts = spec.get("submodules", {"entries": []})
    wanted = [f"model.{layer['i']}" for layer in spec["layers"]] + [e["name"] for e in parts["entries"]]
    recorder = Recorder(model, by_path([*wanted, *spec["routing"], f"model.{len(model.model) - 1}"]))
    with torch.inference_mode():
        answer = model(torch.from_numpy(images))
    recorder.close()
    yield Check(f"{name} modules", len(recorder.missing), 0, ", ".join(recorder.missing[:4]))

    layer_deviation = {int(i): TOLERANCE_FACTOR * v for i, v in deviation["layer_max_abs"].items()}
    for layer in spec["layers"]:
        ours = _tensor(recorder.outputs[f"model.{layer['i']}"])
        label, tolerance = f"{name} layer {layer['i']} {layer['type']}", layer_deviation[layer["i"]]
        if "key" in layer:
            yield sample_check(label, ours, stored[layer["key"]], layer, tolerance)
        yield figures_check(f"{label} figures", ours, layer, tolerance)

    for entry in parts["entries"]:
        sample = stored[parts["key"]][entry["offset"] : entry["offset"] + entry["count"]]
        output = recorder.outputs.get(entry["name"])
        index = int(entry["name"].split(".")[1])
        if output is None:
            yield Check(f"{name} {entry['name']}", math.inf, 0, "did not run")
            continue
        ours = _tensor(output)
        if isinstance(output, Routing):
            ours = np.broadcast_to(ours[:, :, None, None], entry["shape"])
        # Inner values can be much larger than the layer's output, whose deviation is the only one stated.
        outer = float(np.abs(_tensor(recorder.outputs[f"model.{index}"])).max())
        scale = max(1.0, float(np.abs(ours).max()) / outer)
        shape = {key: entry[key] for key in ("shape", "stride")}
        yield sample_check(f"{name} {entry['name']}", ours, sample, shape, layer_deviation[index] * scale)

    raw = recorder.outputs[f"model.{len(model.model) - 1}"]
    for level, (entry, value) in enumerate(zip(spec["raw"], deviation["raw_max_abs"], strict=True)):
        shape = {key: entry[key] for key in ("shape", "stride")}
        tolerance = TOLERANCE_FACTOR * value
        yield sample_check(f"{name} raw {level}", raw[level].numpy(), stored[entry["key"]], shape, tolerance)

    size = (images.shape[2], images.shape[3])
    yield from check_decoded(name, model.head, raw, answer, spec, stored, deviation, size)

    for module, expected in spec["routing"].items():
        layer = int(module.split(".")[1])
        yield from _check_routing(f"{name} {module}", recorder.outputs[module], expected, layer_deviation[layer - 1])


def _check_routing(name: str, routing: Routing, expected: Mapping[str, Any], tolerance: float) -> Iterator[Check]:
    """Logits, weights and choices of one router; ``tolerance`` is that of the map it reads."""
    logits = np.asarray(expected.get("noisy_logits", expected.get("logits", expected.get("mean_logits"))))
    floor = 1e-6 * float(np.abs(logits).max())
    yield Check(f"{name} logits", float(np.abs(routing.logits.numpy() - logits).max()), max(tolerance, floor))
    weights = routing.weights
    if routing.chosen is None:
        order = routing.logits.argsort(1, descending=True)
        chosen, stored = order.numpy(), np.asarray(expected["experts_sorted_by_logit"])
        goal = np.asarray(expected["weights"])
    else:
        chosen, stored = routing.chosen.numpy(), np.asarray(expected["topk_ids"])
        weights, goal = weights.gather(1, routing.chosen), np.asarray(expected["topk_weights"])
    yield Check(f"{name} choice", float((chosen != stored).sum()), 0)
    yield Check(f"{name} weights", float(np.abs(weights.numpy() - goal).max()), max(tolerance, floor))


def _check_training_routing(
    model: YOLOMaster, spec: Mapping[str, Any], stored: Mapping[str, np.ndarray], deviation: Mapping[str, Any]
) -> Iterator[Check]:
    """Routing and auxiliary losses with the mixture layers alone in training mode."""
    images = image_input(spec["input"]["seed"], spec["input"]["shape"])
    images[1] *= np.float32(0.25)
    layers, head = moe_layers(model), f"model.{len(model.model) - 1}"
    box_tolerance = TOLERANCE_FACTOR * deviation["decoded_boxes_px_max_abs"]
    for run, expected in {"eval": {"routing": {}}, **spec["runs"]}.items():
        noise = np.random.Generator(np.random.PCG64(777)) if "noise" in expected else None
        for layer in layers.values():
            layer.training = layer.routing.training = run != "eval"
            if isinstance(layer.routing, SpatialRouter):
                layer.routing.noise = _noise(noise)  # type: ignore[method-assign]
        recorder = Recorder(model, by_path([head, *layers, *expected["routing"]]))
        with torch.inference_mode():
            model(torch.from_numpy(images))
        recorder.close()
        label = f"b2 {run}"
        for module, values in expected["routing"].items():
            tolerance = TOLERANCE_FACTOR * deviation["layer_max_abs"][str(int(module.split(".")[1]) - 1)]
            yield from _check_routing(f"{label} {module}", recorder.outputs[module], values, tolerance)
        goals = expected.get("aux_loss_per_layer", spec.get("aux_loss_eval", {}))
        for module, value in goals.items():
            error = abs(float(recorder.outputs[module][1]) - value) / abs(value)
            yield Check(f"{label} auxiliary {module}", error, 1e-5, "relative")
        ours = decoded(model.head, recorder.outputs[head])
        if "decoded_sum_float64" in expected:
            goal = expected["decoded_sum_float64"]
            error = abs(ours.sum(dtype=np.float64) - goal) / abs(goal)
            yield Check(f"{label} decoded sum", error, 1e-6, "relative")
        sample = spec.get({"eval": "decoded_eval", "train_noise_injected": "decoded_noise_injected"}.get(run, ""))
        if sample:
            yield sample_check(f"{label} decoded", ours, stored[sample["key"]], sample, box_tolerance)
    for layer in layers.values():
        layer.eval()


def _noise(generator: np.random.Generator | None):  # type: ignore[no-untyped-def]
    """Noise of a router: drawn from the case's generator, or none."""

    def draw(logits: torch.Tensor) -> torch.Tensor:
        if generator is None:
            return torch.zeros_like(logits)
        return torch.from_numpy(generator.standard_normal(tuple(logits.shape)).astype(np.float32))

    return draw


def _tensor(output: Any) -> np.ndarray:
    """The tensor that the reference data stores of a module's output."""
    if isinstance(output, Routing):
        return output.weights.numpy()
    return (output[0] if isinstance(output, tuple) else output).numpy()
