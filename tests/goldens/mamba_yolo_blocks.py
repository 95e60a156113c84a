"""Single blocks of Mamba-YOLO (folder without a schema: blocks.json, blocks.npz)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from carpus.models.mamba_yolo.blocks import (
    LayerNorm2d,
    LSBlock,
    RGBlock,
    SimpleStem,
    VisionClueMerge,
    VSSBlock,
    XSSBlock,
)
from carpus.models.mamba_yolo.config import ScanConfig
from carpus.models.mamba_yolo.ss2d import SS2D
from carpus.models.yolo.blocks import SPPF, Conv
from tests.goldens.case import Case, Check, UnusableFolder, input_array
from tests.goldens.deimv2_forward import TOLERANCE_FACTOR
from tests.goldens.mamba_yolo_forward import plain_formulas
from tests.goldens.recorder import Recorder, by_path
from tests.goldens.yolo_common import FLOAT32_EPS, fill_yolo

__all__ = ["check_blocks"]

_SHARED_ACTIVATION = {("sppf", "cv1.act"): "the block's output"}
"""In the official code all plain convolutions share one activation, whose last call was recorded."""


def check_blocks(case: Case) -> Iterator[Check]:
    """Names and shapes, output, and outputs inside of every block."""
    description, stored = case.json("blocks.json"), case.arrays("blocks.npz")
    for spec in description["cases"]:
        name = spec["name"]
        block = _block(spec).eval()
        state_dict = [(key, shape, dtype.replace("float64", "float32")) for key, shape, dtype in spec["state_dict"]]
        schema = plain_formulas({"state_dict": state_dict, "overrides": description["overrides"], "keep": []})
        for check in fill_yolo(block, schema):
            yield Check(f"{name} {check.name}", check.error, check.tolerance, check.note)
        count = sum(p.numel() for p in block.parameters())
        yield Check(f"{name} parameters", abs(count - spec["params"]), 0, str(count))
        prefix = f"{name}/sub/"
        inner = [key.removeprefix(prefix) for key in stored if key.startswith(prefix)]
        recorder = Recorder(block, by_path(inner))
        with torch.inference_mode():
            y = block(torch.from_numpy(input_array(spec["input"])))
        recorder.close()
        yield Check(f"{name} modules", len(recorder.missing), 0, ", ".join(recorder.missing[:4]))
        deviation = TOLERANCE_FACTOR * spec["max_abs_float32_minus_float64"]
        yield _compare(f"{name} y", y.numpy(), stored[f"{name}/y"], deviation)
        for part in inner:
            if part in recorder.outputs:
                source = _SHARED_ACTIVATION.get((name, part), part)
                ours = recorder.outputs.get(source, y).numpy()
                yield _compare(f"{name} {part}", ours, stored[prefix + part], deviation)


def _compare(name: str, ours: np.ndarray, goal: np.ndarray, deviation: float) -> Check:
    """Values inside a block round by their own size, of which the deviation of the output says nothing."""
    tolerance = max(deviation, 4.0 * FLOAT32_EPS * float(np.abs(goal).max()))
    if ours.shape != goal.shape:
        return Check(name, math.inf, tolerance, f"shape {ours.shape}, expected {goal.shape}")
    return Check(name, float(np.abs(ours.astype(np.float64) - goal).max()), tolerance)


def _block(spec: Mapping[str, Any]) -> nn.Module:
    """The block that a case's note describes, its sizes from input and output.

    Raises:
        UnusableFolder: a block that does not exist here.
    """
    name, scan = spec["name"], ScanConfig()
    inputs, outputs = spec["input"]["shape"][1], spec["output_shape"][1]
    shapes = {key: shape for key, shape, _ in spec["state_dict"]}
    if name.startswith("simple_stem"):
        return SimpleStem(inputs, outputs)
    if name.startswith("vision_clue_merge"):
        return VisionClueMerge(inputs, outputs)
    if name.startswith("ls_block"):
        return LSBlock(inputs)
    if name.startswith("rg_block"):
        return RGBlock(inputs, 4 * inputs)
    if name.startswith("layer_norm_2d"):
        return LayerNorm2d(inputs)
    if name.startswith("ss2d"):
        return SS2D(inputs, scan)
    if name.startswith("vss_block"):
        return VSSBlock(inputs, outputs, scan)
    if name.startswith("xss_block"):
        chain = {match[1] for key in shapes if (match := re.match(r"ss2d\.(\d+)\.", key))}
        return XSSBlock(inputs, outputs, len(chain), scan)
    if name.startswith("sppf"):
        return SPPF(inputs, outputs)
    if name.startswith("conv"):
        stride = round(spec["input"]["shape"][2] / spec["output_shape"][2])
        return Conv(inputs, outputs, shapes["conv.weight"][-1], stride)
    raise UnusableFolder(f"blocks.json: no block is known for the case {name!r}")
