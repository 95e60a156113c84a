"""Weights from tensor names: the "named-weights v1" recipe with a schema's aliases, kept tensors and overrides."""

from __future__ import annotations

import ast
import hashlib
import math
import operator
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.goldens.case import Check, UnusableFolder

__all__ = ["evaluate_formula", "fill_model", "named_values"]


def named_values(name: str, shape: tuple[int, ...], formula: str | None = None) -> np.ndarray:
    """Values of a floating tensor, float32, from its name and shape alone.

    Args:
        name: name in the state dict.
        shape: its shape.
        formula: an override in ``n`` and ``shape`` instead of the recipe.
    """
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode("utf-8"))))
    n = np.asarray(rng.standard_normal(shape))
    last = name.rsplit(".", 1)[-1]
    if formula is not None:
        value = evaluate_formula(formula, n, shape)
    elif last == "running_var":
        value = 0.5 + np.abs(n)
    elif last == "running_mean":
        value = 0.1 * n
    elif len(shape) == 0 or (len(shape) == 1 and last == "weight"):
        value = 1.0 + 0.1 * n
    elif len(shape) == 1:
        value = 0.1 * n
    else:
        value = n * math.sqrt(2.0 / math.prod(shape[1:]))
    return np.asarray(value).astype(np.float32).reshape(shape)


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": np.sqrt,
    "abs": np.abs,
    "exp": np.exp,
    "log": np.log,
    "prod": math.prod,
    "ones": np.ones,
    "zeros": np.zeros,
    "concatenate": np.concatenate,
}


def evaluate_formula(formula: str, n: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Value of an override formula: arithmetic, a few numpy functions, the names ``n``, ``shape``, ``j`` (last index).

    Raises:
        UnusableFolder: anything else in the formula.
    """
    names: dict[str, Any] = {"n": n, "shape": shape, "j": np.arange(shape[-1] if shape else 1)}

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.Name) and node.id in names:
            return names[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.operand))
        if isinstance(node, ast.List | ast.Tuple):
            return [value(item) for item in node.elts]
        if isinstance(node, ast.Subscript):
            return value(node.value)[value(node.slice)]
        if isinstance(node, ast.Slice):
            return slice(*(None if part is None else value(part) for part in (node.lower, node.upper, node.step)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute) and not node.keywords:
            function = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if function in _FUNCTIONS:
                return _FUNCTIONS[function](*(value(argument) for argument in node.args))
        raise UnusableFolder(f"override formula {formula!r} uses {ast.dump(node)[:60]}, which is not understood")

    try:
        tree = ast.parse(formula, mode="eval")
    except SyntaxError as error:
        raise UnusableFolder(f"override formula {formula!r} cannot be parsed: {error}") from error
    return np.asarray(value(tree), dtype=np.float64)


def fill_model(model: nn.Module, schema: Mapping[str, Any]) -> Iterator[Check]:
    """Fill a model's state in place, yielding checks of names, shapes and hashes.

    Args:
        model: model whose state dict must have the names and shapes of the schema.
        schema: content of schema.json.
    """
    expected = {name: (tuple(shape), dtype) for name, shape, dtype in schema["state_dict"]}
    state = model.state_dict()
    found = {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in state.items()}
    wrong = [name for name in expected if found.get(name) != expected[name]] + [n for n in found if n not in expected]
    yield Check("state_dict names, shapes, types", len(wrong), 0, f"{len(expected)} entries{_listed(wrong)}")
    if wrong:
        return

    aliases = schema.get("aliases", {})
    keep = [re.compile(entry["match"]) for entry in schema.get("keep", [])]
    overrides = [(re.compile(entry["match"]), entry["formula"]) for entry in schema.get("overrides", [])]
    kept: set[str] = set()
    for name, tensor in state.items():
        source = aliases.get(name, name)
        if any(pattern.fullmatch(source) for pattern in keep) or not tensor.is_floating_point():
            kept.add(name)
            continue
        formula = next((formula for pattern, formula in overrides if pattern.fullmatch(source)), None)
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(named_values(source, tuple(tensor.shape), formula)))

    for key, skip in (("weights_sha256_without_kept", True), ("weights_sha256", False)):
        if key in schema:
            digest = _digest(state, expected, kept if skip else set(), keep if skip else [])
            yield Check(key, float(digest != schema[key]), 0, digest[:12])


def _digest(
    state: Mapping[str, torch.Tensor], order: Mapping[str, Any], kept: set[str], keep: list[re.Pattern[str]]
) -> str:
    """sha256 over names and bytes in the schema's order, without kept entries that a pattern names."""
    digest = hashlib.sha256()
    for name in order:
        if name in kept and any(pattern.fullmatch(name) for pattern in keep):
            continue
        digest.update(name.encode("utf-8"))
        digest.update(np.ascontiguousarray(state[name].detach().cpu().numpy()).tobytes())
    return digest.hexdigest()


def _listed(names: list[str]) -> str:
    return f"; wrong: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}" if names else ""
