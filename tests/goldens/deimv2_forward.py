"""DEIMv2: state dict and parameter counts (schema.json) and the eval forward (case.json, io.npz)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from carpus.models.deimv2.config import get_config
from carpus.models.deimv2.deploy import deploy
from carpus.models.deimv2.model import DEIMv2
from carpus.models.deimv2.rope import RotaryEmbedding
from carpus.runtime.errors import CarpusError
from tests.goldens.case import Case, Check, UnusableFolder, compare_stored, input_array
from tests.goldens.recorder import Recorder
from tests.goldens.weights import fill_model

__all__ = [
    "ALTERNATIVE",
    "TOLERANCE_FACTOR",
    "check_alternative",
    "check_forward",
    "check_schema",
    "filled_model",
    "reorder",
    "row_order",
]

TOLERANCE_FACTOR = 4.0
"""A tensor passes within this many times the case's own float32-against-float64 deviation."""

ALTERNATIVE = "io_alt_interaction_5_8_11"
ALTERNATIVE_BLOCKS = (5, 8, 11)
"""A further case of S and M: its files' stem, and the transformer blocks (from 0) it takes."""

_MODULES = (
    (re.compile(r"decoder\.layers\.(\d+)\.ffn"), r"decoder.decoder.layers.\1.swish_ffn"),
    (re.compile(r"decoder\.layers\.(\d+)\.out"), r"decoder.decoder.layers.\1"),
    (re.compile(r"decoder\.layers\.(\d+)\.(self_attn|cross_attn)"), r"decoder.decoder.layers.\1.\2"),
    (re.compile(r"encoder\.aifi\.(\d+)"), r"encoder.encoder.\1"),
    (re.compile(r"(backbone|encoder)\.out\.(\d+)"), r"\1"),
    (re.compile(r"vit\.(patch_embed|blocks\.\d+)"), r"backbone.dinov3.\1"),
    (re.compile(r"vit\.rope_(sin|cos)"), r"backbone.dinov3.rope_embed"),
    (re.compile(r"sta\.stem"), r"backbone.sta.stem"),
    (re.compile(r"sta\.c(\d)"), r"backbone.sta.conv\1"),
)

_ROPE_OUTPUTS = {"vit.rope_sin": 0, "vit.rope_cos": 1}


def _paths(model: DEIMv2, names: Iterable[str]) -> dict[str, str]:
    """Modules by the names of the reference data; names of what the model records itself lead to none."""
    modules = dict(model.named_modules())
    paths = {}
    for name in names:
        path = next((pattern.sub(path, name) for pattern, path in _MODULES if pattern.fullmatch(name)), name)
        nested = path.replace("backbone.dinov3.", "backbone.dinov3._model.")
        paths[name] = nested if nested in modules else path
    return paths


def _pick(name: str, module: torch.nn.Module, output: Any) -> Any:
    """Of several outputs the one the name means; of rotation tables the part the reference data stores."""
    index = int(name.rsplit(".", 1)[1]) if ".out." in name else _ROPE_OUTPUTS.get(name)
    if index is not None:
        output = output[index]
    # the stored tables leave out the tokens ahead of the patches
    return output[module.prefix_tokens :] if isinstance(module, RotaryEmbedding) else output


def filled_model(
    case: Case, input_size: tuple[int, int] | None = None, take_blocks: tuple[int, int, int] | None = None
) -> tuple[DEIMv2, list[Check]]:
    """The case's model with the recipe's weights, and the checks made on the way.

    Args:
        case: names the variant, and its hyperparameters.
        input_size: (height, width) [px] other than the case's.
        take_blocks: transformer blocks other than the variant's.

    Raises:
        UnusableFolder: a variant that does not exist here.
    """
    try:
        config = get_config(case.variant)
    except CarpusError as error:
        raise UnusableFolder(f"{case.folder}: {error}") from error
    hyper = case.schema.get("hyperparameters", {})
    config = config.with_num_classes(int(hyper.get("num_classes", 80)))
    if input_size is None and "input_size_hw" in hyper:
        config = config.with_input_size(*hyper["input_size_hw"])
    if take_blocks is not None:
        config = config.with_take_blocks(take_blocks)
    model = DEIMv2(config).eval()
    return model, list(fill_model(model, case.schema))


def check_schema(case: Case) -> Iterator[Check]:
    """Names, shapes, weights' hashes, parameter counts, kept values."""
    model, checks = filled_model(case)
    yield from checks
    expected = case.schema["parameters"]
    trainable = [p for p in model.parameters() if p.requires_grad]
    total = sum(p.numel() for p in trainable)
    yield Check("parameters trainable", abs(total - expected["trainable_total"]), 0, str(total))
    for name, count in expected.get("trainable_per_top_module", {}).items():
        ours = sum(p.numel() for p in model.get_submodule(name).parameters() if p.requires_grad)
        yield Check(f"parameters {name}", abs(ours - count), 0, str(ours))
    official = sum(p.numel() for p in deploy(model, fuse="official").parameters())
    yield Check("parameters deploy form", abs(official - expected["deploy_form_all"]), 0, str(official))
    state = model.state_dict()
    for name, values in case.schema.get("kept_values", {}).items():
        if isinstance(values, list):
            error = np.abs(state[name].numpy().astype(np.float64) - np.asarray(values)).max()
            yield Check(f"kept {name}", float(error), 0)


def check_forward(case: Case) -> Iterator[Check]:
    """Every stored intermediate and final tensor of the eval forward."""
    description = case.json("case.json")
    model, _ = filled_model(case)
    images = input_array(description["input"])
    deviations = description["float64_check"]["max_abs_difference_float32_vs_float64"]
    yield from _compare_forward(case, "io.npz", model, images, description["arrays"], deviations)


def check_alternative(case: Case) -> Iterator[Check]:
    """The eval forward with the tokens of other transformer blocks, which ``ALTERNATIVE_BLOCKS`` names."""
    description = case.json(f"{ALTERNATIVE}.json")
    model, _ = filled_model(case, take_blocks=ALTERNATIVE_BLOCKS)
    images = input_array({"seed": description["input_seed"], "shape": [1, 3, *model.config.input_size]})
    # The case states no deviation of its own; the like tensors of the main case hold the same operations.
    deviations = {"pred_logits": 2.5e-4, "pred_boxes": 2.5e-5}
    if case.has("case.json"):
        deviations = case.json("case.json")["float64_check"]["max_abs_difference_float32_vs_float64"]
    yield from _compare_forward(case, f"{ALTERNATIVE}.npz", model, images, description["arrays"], deviations)


def _compare_forward(
    case: Case,
    arrays: str,
    model: DEIMv2,
    images: np.ndarray,
    specs: Mapping[str, Any],
    deviations: Mapping[str, float],
) -> Iterator[Check]:
    """Run a model and compare what ``specs`` describes with the arrays of a file."""
    stored = case.arrays(arrays)
    recorder = Recorder(model, _paths(model, specs), _pick)
    with torch.inference_mode():
        outputs = model(torch.from_numpy(images), record=recorder)
    recorder.close()
    recorded = {**recorder.outputs, **outputs}
    tensors = {name: value.numpy() for name, value in recorded.items() if isinstance(value, torch.Tensor)}

    order = row_order(tensors["decoder.topk_index"], stored.get("decoder.topk_index"))
    queries = tensors["decoder.topk_index"].shape[1]
    for name, spec in specs.items():
        if name not in stored:
            raise UnusableFolder(f"{case.folder / arrays}: has no array {name!r}, which its description names")
        if name not in tensors:
            yield Check(name, math.inf, 0, "this model records no such tensor")
            continue
        ours = tensors[name]
        if order is not None and _is_per_query(name) and ours.ndim >= 2 and ours.shape[1] == queries:
            ours = reorder(ours, order)
        if spec["dtype"].startswith("float"):
            # Rounding of the stored value itself, where a tensor happens to deviate by nothing
            floor = 2.0 * float(np.finfo(np.float32).eps) * float(spec.get("absmax", 1.0))
            tolerance = max(TOLERANCE_FACTOR * float(deviations.get(name, 0.0)), floor)
        else:
            tolerance = 0.0
        yield compare_stored(name, ours, stored[name], spec, tolerance)


def _is_per_query(name: str) -> bool:
    return name.startswith("pred_") or (
        name.startswith("decoder.") and name not in ("decoder.enc_scores_all", "decoder.memory_masked")
    )


def row_order(ours: np.ndarray, stored: np.ndarray | None) -> np.ndarray | None:
    """Order (B, Q) that brings our queries into the stored one; None unless the same positions were selected."""
    if stored is None or ours.shape != stored.shape or (np.sort(ours, 1) != np.sort(stored, 1)).any():
        return None
    return np.stack([np.argsort(a)[np.argsort(np.argsort(b))] for a, b in zip(ours, stored, strict=True)])


def reorder(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Rows (B, Q, ...) in the order that ``row_order`` found."""
    return values[np.arange(len(order))[:, None], order]
