"""What the reference data of the YOLO families share: their schema, inputs and samples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.goldens.case import Check, UnusableFolder, compare_stored
from tests.goldens.weights import fill_model

__all__ = ["Recorder", "fill_yolo", "image_input", "sample_check", "weights_schema"]

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
    floor = 2.0 * float(np.finfo(np.float32).eps) * largest
    return compare_stored(name, ours, stored, {**spec, "storage": "strided"}, max(tolerance, floor))


class Recorder:
    """Collects the outputs of named modules; of a tuple, the whole of it.

    Args:
        model: the model that will run.
        names: modules that are wanted.
    """

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.outputs: dict[str, Any] = {}
        modules = dict(model.named_modules())
        self.missing = [name for name in names if name not in modules]
        self._handles = [modules[name].register_forward_hook(self._hook(name)) for name in names if name in modules]

    def _hook(self, name: str):  # type: ignore[no-untyped-def]
        def hook(module: nn.Module, args: object, output: Any) -> None:
            self.outputs[name] = output.detach().clone() if isinstance(output, torch.Tensor) else output

        return hook

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
