"""Files in the layouts of the published ones, with the names and shapes of the reference data."""

from __future__ import annotations

import argparse
import json
import re
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.goldens.mamba_yolo_forward import plain_formulas
from tests.goldens.weights import named_values
from tests.goldens.yolo_common import weights_schema

__all__ = ["deimv2_training", "lw_detr_training", "official_state", "pickled_detector", "schema_folder"]

GOLDENS = Path(__file__).resolve().parent / "data" / "goldens"
_BINS = "dfl.conv.weight"


def schema_folder(family: str, variant: str) -> Path:
    """Folder of a variant's schema.json."""
    return GOLDENS / family / variant


def official_state(schema: Path) -> dict[str, Tensor]:
    """A state dict with the names, shapes and types of a schema, and the values that it gives them.

    Args:
        schema: folder with schema.json.
    """
    content = json.loads((schema / "schema.json").read_text(encoding="utf-8"))
    rules = content if "kept_values" in content or "aliases" in content else weights_schema(plain_formulas(content))
    formulas = [(entry["match"], entry["formula"]) for entry in rules.get("overrides", [])]
    kept = content.get("kept_values", {})
    aliases = content.get("aliases", {})
    state: dict[str, Tensor] = {}
    for name, shape, kind in content["state_dict"]:
        dtype = getattr(torch, kind)
        source = aliases.get(name, name)
        last = name.rsplit(".", 1)[-1]
        if source in state:
            state[name] = state[source]
        elif isinstance(kept.get(source), list):
            state[name] = torch.tensor(kept[source], dtype=dtype).reshape(shape)
        elif name.endswith(_BINS):
            state[name] = torch.arange(shape[1], dtype=dtype).reshape(shape)
        elif last == "num_points_scale":
            state[name] = _points_scale(content["hyperparameters"], shape)
        elif dtype.is_floating_point:
            formula = next((text for pattern, text in formulas if re.fullmatch(pattern, source)), None)
            state[name] = torch.from_numpy(np.ascontiguousarray(named_values(source, tuple(shape), formula)))
        else:
            state[name] = torch.zeros(shape, dtype=dtype)
    return state


def _points_scale(hyperparameters: Mapping[str, Any], shape: list[int]) -> Tensor:
    points = next(
        value
        for key, value in _walk(hyperparameters)
        if key == "num_points" and isinstance(value, list) and sum(value) == shape[0]
    )
    return torch.tensor([1.0 / n for n in points for _ in range(n)])


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from _walk(item)


def deimv2_training(state: dict[str, Tensor], trained: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """What DEIMv2's training solver saves: averaged and trained weights, optimiser and counters."""
    return {
        "date": "2025-09-25T10:00:00.000000",
        "last_epoch": 499,
        "model": trained or {name: value * 0 for name, value in state.items()},
        "ema": {"module": state, "updates": 1000, "warmups": 0},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "lr_scheduler": {"base_lrs": [1e-3]},
    }


def lw_detr_training(state: dict[str, Tensor], averaged: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """What LW-DETR's training saves; without averaged weights as its evaluation reads it."""
    content: dict[str, Any] = {
        "model": state,
        "optimizer": {"state": {}, "param_groups": []},
        "lr_scheduler": {"step_size": 60},
        "epoch": 59,
        "args": argparse.Namespace(lr=1e-4, dataset_file="coco", output_dir="output"),
    }
    return content if averaged is None else {**content, "ema_model": averaged}


@contextmanager
def pickled_detector(
    state: Mapping[str, Tensor], names: Mapping[int, str] | None = None, *, half: bool = True
) -> Iterator[nn.Module]:
    """A module of classes that exist while a file is written, and not when it is read.

    Args:
        state: its parameters and buffers by name.
        names: names of its classes.
        half: hold 16-bit numbers, as the published files do.
    """
    package = types.ModuleType("foreign_detector")

    class Block(nn.Module):
        """Any block: only what is registered on it counts."""

    class DetectionModel(nn.Module):
        """The whole detector."""

    for made in (Block, DetectionModel):
        made.__module__, made.__qualname__ = package.__name__, made.__name__
        setattr(package, made.__name__, made)
    sys.modules[package.__name__] = package
    try:
        model = DetectionModel()
        for name, value in state.items():
            *path, last = name.split(".")
            node: nn.Module = model
            for part in path:
                if part not in node._modules:
                    node.add_module(part, Block())
                node = node._modules[part]  # type: ignore[assignment]
            if last in ("running_mean", "running_var", "num_batches_tracked"):
                node.register_buffer(last, value.clone())
            else:
                node.register_parameter(last, nn.Parameter(value.clone(), requires_grad=_BINS not in name))
        first = model._modules["model"]
        assert first is not None
        first.register_buffer("last_loss", torch.zeros(1), persistent=False)
        model.names = dict(names or {})  # type: ignore[assignment]
        model.yaml = {"nc": len(names or {}), "scale": "n", "yaml_file": "detector-n.yaml"}  # type: ignore[assignment]
        model.args = types.SimpleNamespace(task="detect", imgsz=640)  # type: ignore[assignment]
        model.stride = torch.tensor([8.0, 16.0, 32.0])
        yield model.half() if half else model
    finally:
        del sys.modules[package.__name__]
