"""State-space operators and mixers (folder without a schema: index.json and an .npz file for each operator)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carpus.models.mamba_yolo.ss2d import cross_selective_scan
from carpus.models.ssm.cross_scan import cross_merge, cross_scan
from carpus.models.ssm.mamba2 import ssd
from carpus.models.ssm.scan import selective_scan, selective_scan_reference
from tests.goldens.case import Case, Check, Kind
from tests.goldens.ssm_arrays import Arrays, compare
from tests.goldens.ssm_mamba3 import check_core, check_mixer

__all__ = ["KINDS"]


def _check_scan(name: str, entry: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Iterator[Check]:
    for spec in entry["cases"]:
        get = Arrays(stored, spec["name"])
        # The states' own deviation is that of the stored float32 state
        state_deviation = float((get["last_state"].double() - get["last_state64"]).abs().max())
        for label, scan in (("", selective_scan), (" reference", selective_scan_reference)):
            y, last = scan(
                *(get[key] for key in ("u", "delta", "A", "B", "C")),
                get.optional("D"),
                delta_bias=get.optional("delta_bias"),
                delta_softplus=spec["delta_softplus"],
                z=get.optional("z"),
            )
            deviation = spec["max_abs_y_minus_y64"]
            yield compare(f"{name}{label} {spec['name']} y", y, get["y64"], deviation)
            yield compare(f"{name}{label} {spec['name']} state", last, get["last_state64"], state_deviation)
            same = y.dtype == get["y"].dtype
            yield Check(f"{name}{label} {spec['name']} type", float(not same), 0, str(y.dtype))


def _check_cross_scan(name: str, entry: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Iterator[Check]:
    for size in entry["sizes"]:
        get = Arrays(stored, size)
        height, width = (int(side) for side in size.split("x"))
        sequences = cross_scan(get["x"])
        yield _exact(f"{name} {size} sequences", sequences, get["xs"])
        yield _exact(f"{name} {size} merged", cross_merge(get["ys"], height, width), get["merged"])
        positions = torch.arange(height * width).reshape(1, 1, height, width)
        yield _exact(f"{name} {size} order", cross_scan(positions)[0, :, 0], get["scan_index"])


def _exact(name: str, ours: Tensor, goal: Tensor) -> Check:
    if ours.shape != goal.shape:
        return Check(name, math.inf, 0, f"shape {tuple(ours.shape)}, expected {tuple(goal.shape)}")
    return Check(name, float((ours != goal).sum()), 0, "different elements")


def _check_cross_selective(name: str, entry: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Iterator[Check]:
    keys = ("x", "x_proj_weight", "dt_projs_weight", "dt_projs_bias", "A_logs", "Ds")
    for spec in entry["cases"]:
        get = Arrays(stored, spec["name"])
        arguments = [get[key] for key in keys]
        exact = cross_selective_scan(*(value.double() for value in arguments))
        shape = get["merged_nhwc"].shape
        goal = exact.transpose(1, 2).reshape(shape)
        deviation = float((get["merged_nhwc"].double() - goal).abs().max())
        merged = cross_selective_scan(*arguments).transpose(1, 2).reshape(shape)
        yield compare(f"{name} {spec['name']} merged", merged, get["merged_nhwc"], deviation)
        out = torch.nn.functional.layer_norm(merged, shape[-1:], get["ln_weight"], get["ln_bias"], 1e-5)
        spread = float(1.0 / goal.var(-1, unbiased=False).add(1e-5).sqrt().min() * get["ln_weight"].abs().max())
        yield compare(f"{name} {spec['name']} out", out, get["out_nhwc"], deviation * max(1.0, spread))


def _check_ssd(name: str, entry: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Iterator[Check]:
    for spec in entry["cases"]:
        get = Arrays(stored, spec["name"])
        state_deviation = float((get["final_state"].double() - get["final_state64"]).abs().max())
        for chunk in (spec["chunk"], 7):
            y, state = ssd(
                *(get[key] for key in ("x", "dt", "A", "B", "C")),
                get.optional("D"),
                z=get.optional("z"),
                dt_bias=get.optional("dt_bias"),
                dt_softplus=spec["dt_softplus_and_bias"],
                chunk_size=chunk,
            )
            label = f"{name} {spec['name']} chunks of {chunk}"
            yield compare(f"{label} y", y, get["y64"], spec["max_abs_chunked_minus_64"])
            yield compare(f"{label} state", state, get["final_state64"], state_deviation)


_CHECKS: Mapping[str, Callable[[str, Mapping[str, Any], Mapping[str, np.ndarray]], Iterator[Check]]] = {
    "selective_scan": _check_scan,
    "cross_scan": _check_cross_scan,
    "cross_selective_scan": _check_cross_selective,
    "mamba2_ssd": _check_ssd,
    "mamba3_siso": check_core,
    "mamba3_mimo": check_core,
    "mamba3_module": check_mixer,
}


def _kind(operator: str) -> Kind:
    """The checks of one operator, where its arrays are there."""

    def run(case: Case) -> Iterator[Check]:
        entry = case.json("index.json")["files"][operator]
        yield from _CHECKS[operator](operator, entry, case.arrays(f"{operator}.npz"))

    return Kind("operators", "ssm_ops", ("index.json", f"{operator}.npz"), run, optional=True)


KINDS = tuple(_kind(operator) for operator in _CHECKS)
"""One kind an operator."""
