"""Starting weights from a checkpoint: this project's or an official one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from carpus.models.build import FAMILIES
from carpus.models.data.coco import CategoryMap
from carpus.models.engine_checkpoint import is_training_checkpoint, load_trained_weights
from carpus.runtime.errors import DataError

__all__ = ["fill_from", "initialise"]

_CLASS_ROWS = re.compile(r"score_head|class_embed")  # first dimension: a row a class (and one for padding)
_OF_INPUT_SIZE = re.compile(r"(^|\.)(anchors|valid_mask)$")  # follow from the input size, never copied


def initialise(model: nn.Module, family: str, path: Path, categories: CategoryMap) -> str:
    """Fills a model from a checkpoint; what belongs to a class is kept for classes of the same name.

    Args:
        model: to be filled.
        family: its family.
        path: a Carpus training checkpoint, or an official one.
        categories: the model's classes.

    Returns:
        One line that says what was taken.

    Raises:
        DataError: unreadable, or of another architecture.
    """
    if not path.is_file():
        raise DataError(f"Checkpoint {path} to start from does not exist.")
    if not is_training_checkpoint(path):
        return FAMILIES[family].start_from(model, path)
    weights = load_trained_weights(path)
    shared = fill_from(model, weights.state_dict, weights.categories.names, categories.names, path)
    kept = f"{len(shared)} of {len(categories)} classes known to it"
    return f"starting from {path} ({weights.family}-{weights.variant}, epoch {weights.epoch}, {kept})"


@torch.no_grad()
def fill_from(
    model: nn.Module, state: Mapping[str, Tensor], source_names: tuple[str, ...], names: tuple[str, ...], path: Path
) -> list[str]:
    """Copies a state into a model that may have other classes.

    Args:
        model: to be filled; rows of classes that the state does not know keep what they have.
        state: the weights.
        source_names: their classes.
        names: the model's classes.
        path: named in errors.

    Returns:
        The classes known to both.

    Raises:
        DataError: entries missing or of another shape.
    """
    shared = [name for name in names if name in source_names]
    rows = torch.tensor([names.index(name) for name in shared], dtype=torch.int64)
    source_rows = torch.tensor([source_names.index(name) for name in shared], dtype=torch.int64)
    problems = []
    for name, target in model.state_dict().items():
        if _OF_INPUT_SIZE.search(name):
            continue
        source = state.get(name)
        if source is None:
            problems.append(f"{name} is missing")
        elif _CLASS_ROWS.search(name) and source.shape[1:] == target.shape[1:] and _fits(source, source_names):
            target[rows] = source[source_rows].to(target)
            if len(target) > len(names):
                target[len(names) :] = source[len(source_names) :].to(target)
        elif source.shape == target.shape:
            target.copy_(source)
        else:
            problems.append(f"{name} has shape {tuple(source.shape)} instead of {tuple(target.shape)}")
    if problems:
        listing = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise DataError(f"{path} does not fit the model: {listing}. Choose the variant that it was trained as.")
    return shared


def _fits(source: Tensor, names: tuple[str, ...]) -> bool:
    return len(source) - len(names) in (0, 1)
