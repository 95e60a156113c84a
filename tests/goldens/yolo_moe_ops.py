"""Single mixture-of-experts and attention modules (folder without a schema)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from carpus.models.yolo.blocks import C3k2
from carpus.models.yolo_master.attention import A2C2f, AreaAttention
from carpus.models.yolo_master.config import MoEConfig
from carpus.models.yolo_master.moe import EfficientSparseMoE, ModularRouterExpertMoE
from carpus.models.yolo_master.routing import importance_usage_loss
from tests.goldens.case import Case, Check, UnusableFolder, input_array
from tests.goldens.deimv2_forward import TOLERANCE_FACTOR
from tests.goldens.yolo_common import fill_yolo

__all__ = ["check_operators"]

TOLERANCE = 1e-5
"""Relative to the largest value, where the case states no deviation of its own."""


def check_operators(case: Case) -> Iterator[Check]:
    """Every mixture layer in every mode, the routing loss, and the blocks."""
    description, stored = case.json("moe.json"), case.arrays("moe.npz")
    for spec in description["cases"]:
        own = {key.split("/", 1)[1]: value for key, value in stored.items() if key.startswith(spec["name"] + "/")}
        check = _check_es_moe if spec["class"] == "ES_MOE" else _check_modular
        yield from check(spec, own, description)
    yield from _check_routing_loss(description["moe_loss_values"], stored)
    for spec in description["blocks"]:
        yield from _check_block(spec, stored[f"{spec['name']}/y"], description)


def _relative(name: str, ours: torch.Tensor | np.ndarray, goal: np.ndarray, tolerance: float = TOLERANCE) -> Check:
    values = ours.detach().numpy() if isinstance(ours, torch.Tensor) else ours
    error = float(np.abs(values - goal).max() / max(float(np.abs(goal).max()), 1e-12))
    return Check(name, error, tolerance, "relative to the largest")


def _scalar(name: str, ours: torch.Tensor, goal: float) -> Check:
    return Check(name, abs(float(ours.detach()) - goal) / max(abs(goal), 1e-12), TOLERANCE, "relative")


def _input(spec: Mapping[str, Any]) -> torch.Tensor:
    """Noise with an offset for each image and channel, so that images are routed differently."""
    batch, channels = spec["shape"][:2]
    image = input_array({"seed": spec["seed"], "shape": spec["shape"]})
    offset = input_array({"seed": spec["seed"] + 1, "shape": [batch, channels, 1, 1]})
    return torch.from_numpy(image + offset)


def _fill(module: nn.Module, spec: Mapping[str, Any], description: Mapping[str, Any]) -> list[Check]:
    state_dict = [(name, shape, dtype.replace("float64", "float32")) for name, shape, dtype in spec["state_dict"]]
    schema = {"state_dict": state_dict, "overrides": description["overrides"], "keep": []}
    return [Check(f"{spec['name']} {c.name}", c.error, c.tolerance, c.note) for c in fill_yolo(module, schema)]


def _gradients(loss: torch.Tensor, module: nn.Module, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    parameters = dict(module.named_parameters())
    values = torch.autograd.grad(loss, [parameters[name] for name in names.values()], retain_graph=True)
    return dict(zip(names, values, strict=True))


def _check_es_moe(
    spec: Mapping[str, Any], stored: Mapping[str, np.ndarray], description: Mapping[str, Any]
) -> Iterator[Check]:
    name, x = spec["name"], _input(spec["input"])
    config = MoEConfig("es_moe", (spec["num_experts"],), spec["top_k"], threshold=0.4)
    module = EfficientSparseMoE(spec["channels"], spec["num_experts"], config).eval()
    yield from _fill(module, spec, description)
    logits = module.routing(x).logits
    yield _relative(f"{name} logits", logits, stored["router_logits"])
    yield _relative(f"{name} softmax", logits.softmax(1), stored["softmax_all"])
    if "topk_ids" in stored:
        chosen = module.routing(x).chosen
        wrong = 0 if chosen is None else int((chosen.numpy() != stored["topk_ids"]).sum())
        yield Check(f"{name} choice", wrong, 0)
    for run, expected in spec["runs"].items():
        module.eval()
        module.threshold = 0.0 if run == "eval_no_threshold" else config.threshold
        module.sparse = run != "eval_dense"
        if run == "train_full":
            module.train()
        module.training = module.routing.training = run.startswith("train")
        with torch.set_grad_enabled(run == "train_full"):
            y, loss = module(x)
        yield _relative(f"{name} {run} y", y, stored[f"{run}/y"])
        yield _scalar(f"{name} {run} auxiliary", loss, expected["aux_loss"])
        if f"{run}/weights" in stored:
            yield _relative(f"{name} {run} weights", module.routing(x).weights, stored[f"{run}/weights"])
    g = input_array({"seed": spec["input"]["seed"] + 2, "shape": list(y.shape)})
    of_loss = {
        "d_aux_d_router0_weight": "routing.routing_network.0.weight",
        "d_aux_d_router2_weight": "routing.routing_network.2.weight",
        "d_aux_d_router2_bias": "routing.routing_network.2.bias",
    }
    of_output = {
        "d_out_d_router2_weight": "routing.routing_network.2.weight",
        "d_out_d_expert0_depthwise": "experts.0.conv.depthwise.weight",
        "d_out_d_norm_weight": "norm.0.weight",
    }
    answers = _gradients(loss, module, of_loss)
    answers |= _gradients((y * torch.from_numpy(g)).sum(), module, of_output)
    for key, value in answers.items():
        # One chosen weight, p / (p + 1e-6), is all but constant: its gradient is what cancellation leaves over.
        cancelled = spec["top_k"] == 1 and "router" in key
        tolerance = 0.1 if cancelled else 10 * TOLERANCE
        yield _relative(f"{name} {key}", value, stored[f"train_full/{key}"], tolerance)


def _check_modular(
    spec: Mapping[str, Any], stored: Mapping[str, np.ndarray], description: Mapping[str, Any]
) -> Iterator[Check]:
    name, x = spec["name"], _input(spec["input"])
    config = MoEConfig(
        "modular", (spec["num_experts"],), spec["top_k"], noise_std=1.0, balance_weight=0.01, z_weight=0.001
    )
    module = ModularRouterExpertMoE(spec["channels"], spec["num_experts"], config).eval()
    yield from _fill(module, spec, description)
    yield _relative(f"{name} shared", module.shared_expert(x), stored["eval/shared"])
    for run, expected in spec["runs"].items():
        module.eval()
        key = run.removesuffix("_noise0") if run.startswith("train_full") else run
        if key == "train_full":
            module.train()
        module.training = module.routing.training = run.startswith("train")
        seed = expected.get("noise_seed")
        noise = torch.zeros(x.shape[0], spec["num_experts"])
        if seed is not None:
            noise = torch.from_numpy(input_array({"seed": seed, "shape": list(noise.shape)}))
        module.routing.noise = lambda logits, noise=noise: noise  # type: ignore[method-assign, misc]
        y, loss = module(x)
        yield _relative(f"{name} {run} y", y, stored[f"{key}/y"])
        if "aux_loss" in expected:
            yield _scalar(f"{name} {run} auxiliary", loss, expected["aux_loss"])
        if key == "train_full":
            answers = _gradients(
                loss,
                module,
                {
                    "d_aux_d_router3_weight": "routing.router.3.weight",
                    "d_aux_d_router0_weight": "routing.router.0.weight",
                },
            )
            for gradient, value in answers.items():
                yield _relative(f"{name} {gradient}", value, stored[f"{key}/{gradient}"], 10 * TOLERANCE)
            continue
        routing = module.routing(x)
        yield Check(f"{name} {run} choice", int((routing.chosen.numpy() != stored[f"{run}/topk_ids"]).sum()), 0)
        yield _relative(
            f"{name} {run} weights", routing.weights.gather(1, routing.chosen), stored[f"{run}/topk_weights"]
        )
        yield _relative(f"{name} {run} logits", routing.logits - noise, stored[f"{run}/mean_logits"])
        if f"{run}/router_probs" in stored:
            yield _relative(f"{name} {run} probabilities", routing.logits.softmax(1), stored[f"{run}/router_probs"])


def _check_routing_loss(values: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Iterator[Check]:
    logits = torch.from_numpy(stored["moe_loss/logits"])
    chosen = torch.from_numpy(stored["moe_loss/topk_ids"]).long()
    plain, entropy = values["default_hard"], values["entropy"]
    weights = {"balance_weight": 0.01, "z_weight": 0.001}
    yield _scalar("moe_loss", importance_usage_loss(logits, chosen, **weights), plain["loss"])
    only = importance_usage_loss(logits, chosen, balance_weight=1.0, z_weight=0.0)
    yield _scalar("moe_loss balance", only, plain["balance_loss"])
    only = importance_usage_loss(logits, chosen, balance_weight=0.0, z_weight=1.0)
    yield _scalar("moe_loss z", only, plain["z_loss"])
    factor = round((entropy["loss"] - plain["loss"]) / entropy["entropy_loss"], 6)
    both = importance_usage_loss(logits, chosen, **weights, entropy_weight=factor)
    yield _scalar("moe_loss entropy", both, entropy["loss"])


def _block(spec: Mapping[str, Any], out_channels: int) -> nn.Module:
    """The block that a case's name and shapes describe."""
    name, in_channels = spec["name"], spec["input"]["shape"][1]
    shapes = {key: shape for key, shape, _ in spec["state_dict"]}
    area = re.search(r"area(\d+)", name)
    if name.startswith("aattn"):
        return AreaAttention(in_channels, int(area[1]) if area else 1)
    blocks = len({key.split(".")[1] for key in shapes if key.startswith("m.")})
    if name.startswith("a2c2f"):
        hidden = out_channels // 2
        attention = "m.0.0.attn.qkv.conv.weight" in shapes
        ratio = shapes["m.0.0.mlp.0.conv.weight"][0] / hidden if attention else 2.0
        return A2C2f(
            in_channels,
            out_channels,
            blocks,
            attention=attention,
            area=int(area[1]) if area else 1,
            residual="gamma" in shapes,
            mlp_ratio=ratio,
        )
    if name.startswith("c3k2"):
        expansion = shapes["cv1.conv.weight"][0] / 2 / out_channels
        return C3k2(in_channels, out_channels, blocks, c3k="m.0.cv3.conv.weight" in shapes, expansion=expansion)
    raise UnusableFolder(f"no block is known for case {name!r}")


def _check_block(spec: Mapping[str, Any], goal: np.ndarray, description: Mapping[str, Any]) -> Iterator[Check]:
    module = _block(spec, goal.shape[1]).eval()
    yield from _fill(module, spec, description)
    with torch.inference_mode():
        ours = module(torch.from_numpy(input_array(spec["input"]))).numpy()
    # The stored answer is the float32 one, which itself deviates from float64 by the stated amount.
    tolerance = TOLERANCE_FACTOR * spec["max_abs_float32_minus_float64"]
    yield Check(f"{spec['name']} y", float(np.abs(ours - goal).max()), tolerance)
