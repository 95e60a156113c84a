"""Mamba-3: the recurrence alone, and whole mixers, as sequences and step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carpus.models.ssm.mamba3 import Mamba3Inputs, Mamba3State, Ranks, mamba3, mamba3_step
from carpus.models.ssm.mamba3_mixer import Mamba3
from tests.goldens.case import Check
from tests.goldens.ssm_arrays import Arrays, compare

__all__ = ["check_core", "check_mixer"]

ANGLE_DEVIATION = 1e-6
"""[rad] of accumulated angles, and relative of rotated keys: float32 sums of up to 64 terms, for which no own deviation
is stated."""


def check_core(name: str, entry: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Iterator[Check]:
    """Outputs and final states of the recurrence, with long chunks, short chunks, and single steps."""
    for spec in entry["cases"]:
        get = Arrays(stored, spec["name"])
        inputs, options, state = _arguments(get, spec)
        stated = spec.get("max_abs_error_vs_float64") or {
            key: spec[key] for key in ("max_abs_step_minus_64", "max_abs_full_minus_64")
        }
        deviation = max(stated.values())
        for chunk in (64, 4):
            y, final = mamba3(inputs, **options, state=state, chunk_size=chunk)
            yield from _check_run(f"{name} {spec['name']} chunks of {chunk}", y, final, get, deviation)
        final = state if state is not None else _zero_state(get, spec)
        steps = []
        for t in range(inputs.v.shape[1]):
            now = Mamba3Inputs(*(None if value is None else value[:, t] for value in inputs))  # type: ignore[arg-type]
            y_t, final = mamba3_step(now, **options, state=final)
            steps.append(y_t)
        yield from _check_run(f"{name} {spec['name']} steps", torch.stack(steps, 1), final, get, deviation)


def _arguments(get: Arrays, spec: Mapping[str, Any]) -> tuple[Mamba3Inputs, dict[str, Any], Mamba3State | None]:
    mimo = "rank" in spec
    q, k, q_bias, k_bias = (get[key] for key in ("Q", "K", "Q_bias", "K_bias"))
    if not mimo:
        q, k, q_bias, k_bias = q.unsqueeze(2), k.unsqueeze(2), q_bias.unsqueeze(1), k_bias.unsqueeze(1)
    per_head = [get[key].transpose(1, 2) for key in ("ADT", "DT", "Trap")]
    inputs = Mamba3Inputs(q, k, get["V"], *per_head, get["Angles"], get.optional("Z"))
    options = {
        "q_bias": q_bias,
        "k_bias": k_bias,
        "D": get.optional("D"),
        "ranks": Ranks(get["MIMO_V"], get.optional("MIMO_Z"), get["MIMO_O"]) if mimo else None,
        "norm_weight": get.optional("norm_weight"),
        "halves": spec.get("rotation_pairing") == "halves",
    }
    state = None
    if get.optional("init_ssm") is not None:
        keys = get["init_k"] if mimo else get["init_k"].unsqueeze(2)
        state = Mamba3State(get["init_angle"], get["init_ssm"], keys, get["init_v"])
    return inputs, options, state


def _zero_state(get: Arrays, spec: Mapping[str, Any]) -> Mamba3State:
    batch, heads, rank = spec["batch"], spec["heads"], spec.get("rank", 1)
    return Mamba3State(
        torch.zeros(batch, heads, spec["angles"]),
        torch.zeros(batch, heads, spec["headdim"], spec["d_state"]),
        torch.zeros(batch, heads, rank, spec["d_state"]),
        torch.zeros(batch, heads, spec["headdim"]),
    )


def _check_run(label: str, y: Tensor, final: Mamba3State, get: Arrays, deviation: float) -> Iterator[Check]:
    yield compare(f"{label} y", y, get["y64"], deviation)
    yield compare(f"{label} state", final.ssm, get["final_ssm64"], deviation)
    yield compare(f"{label} angle", final.angle, get["final_angle64"], ANGLE_DEVIATION, period=2 * math.pi)
    key = get["final_k64"]
    goal = key if key.ndim == final.k.ndim else key.unsqueeze(2)
    yield compare(f"{label} key", final.k, goal, ANGLE_DEVIATION * max(1.0, float(goal.abs().max())))


def check_mixer(name: str, entry: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Iterator[Check]:
    """Whole mixers: parameter names, outputs of a sequence and of single steps, the state after the last."""
    # Two official forms in float32, so either deviates from exact values by about what they differ by
    deviation = max(spec["max_abs_forward_minus_step"] or 0.0 for spec in entry["cases"])
    for spec in entry["cases"]:
        get, label = Arrays(stored, spec["name"]), f"{name} {spec['name']}"
        mixer = _mixer(spec["args"])
        names = [[key, list(value.shape)] for key, value in mixer.named_parameters()]
        yield Check(f"{label} parameters", float(names != [row[:2] for row in spec["params"]]), 0, f"{len(names)}")
        mixer.load_state_dict({key: get[f"w/{key}"] for key in mixer.state_dict()})
        x = get["x"]
        scale = max(1.0, float(get["y_forward"].abs().max()))
        with torch.inference_mode():
            y, final = mixer(x)
            state, steps = mixer.initial_state(len(x)), []
            for t in range(x.shape[1]):
                y_t, state = mixer.step(x[:, t], state)
                steps.append(y_t)
        for form, ours, end in (("sequence", y, final), ("steps", torch.stack(steps, 1), state)):
            yield compare(f"{label} {form} y", ours, get["y_forward"], deviation * scale)
            if get.optional("final_ssm") is None:
                continue
            yield compare(f"{label} {form} against steps", ours, get["y_step"], deviation * scale)
            yield compare(f"{label} {form} state", end.ssm, get["final_ssm"], deviation)
            yield compare(f"{label} {form} angle", end.angle, get["final_angle"], ANGLE_DEVIATION, period=2 * math.pi)
            yield compare(f"{label} {form} key", end.k.transpose(1, 2), get["final_k"], deviation)
            yield compare(f"{label} {form} value", end.v, get["final_v"], deviation)


def _mixer(arguments: Mapping[str, Any]) -> Mamba3:
    return Mamba3(
        arguments["d_model"],
        d_state=arguments["d_state"],
        headdim=arguments["headdim"],
        ngroups=arguments["ngroups"],
        rope_fraction=arguments["rope_fraction"],
        mimo_rank=arguments["mimo_rank"] if arguments.get("is_mimo") else None,
        output_norm=arguments.get("is_outproj_norm", False),
        chunk_size=arguments["chunk_size"],
    )
