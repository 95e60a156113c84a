"""Starting weights from a checkpoint: this project's, an imported or an official one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carpus.models.build import FAMILIES
from carpus.models.data.coco import CategoryMap
from carpus.models.deimv2.backbone_checkpoint import load_transformer
from carpus.models.engine_checkpoint import TrainedWeights, is_training_checkpoint, load_trained_weights
from carpus.models.published.fit import UnfitError
from carpus.models.published.folder import ImportedWeights, find_config, read_imported
from carpus.models.published.identify import fits_instead, suggestion
from carpus.models.published.reader import read_published
from carpus.models.published.rules import Rules
from carpus.runtime.errors import DataError

__all__ = ["adapt_to", "fill_from", "initialise"]


def adapt_to(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Gives a model what its configuration does not say and the weights that it is about to get do."""
    _rules(model).adapt(model, state)


def initialise(model: nn.Module, family: str, path: Path, categories: CategoryMap) -> str:
    """Fills a model from a checkpoint; what belongs to a class is kept for classes of the same name.

    Args:
        model: to be filled.
        family: its family.
        path: a Carpus training checkpoint, imported weights, or an official file.
        categories: the model's classes.

    Returns:
        One line that says what was taken.

    Raises:
        DataError: unreadable, or of another architecture.
    """
    weights: ImportedWeights | TrainedWeights
    if find_config(path) is not None:
        weights = read_imported(path)
        _same_family(weights, family, path)
        if weights.part == "transformer":
            return load_transformer(model, weights.state_dict, f"imported {path}").describe(path)
        origin = f"imported from {weights.source.get('file')}"
    elif not path.is_file():
        raise DataError(f"Checkpoint {path} to start from does not exist.")
    elif is_training_checkpoint(path):
        weights = load_trained_weights(path)
        _same_family(weights, family, path)
        origin = f"epoch {weights.epoch}"
    else:
        return _from_published(model, family, path)
    shared = fill_from(model, weights.state_dict, weights.categories.names, categories.names, path)
    kept = f"{len(shared)} of {len(categories)} classes known to it, the rows of others start anew"
    return f"starting from {path} ({weights.family}-{weights.variant}, {origin}, {kept})"


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
    rules = _rules(model)
    rules.adapt(model, state)
    own = model.state_dict()
    shared = [name for name in names if name in source_names]
    rows = torch.tensor([names.index(name) for name in shared], dtype=torch.int64)
    source_rows = torch.tensor([source_names.index(name) for name in shared], dtype=torch.int64)
    problems = []
    for name, target in own.items():
        source = state.get(name)
        known = rules.find(name)
        if known is not None and known.treatment == "derived":
            continue
        if source is None:
            problems.append(f"{name} is missing")
        elif re.fullmatch(rules.class_rows, name) and _fits(source, target, source_names):
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


def _rules(model: nn.Module) -> Rules:
    """The rules of the model's family, which its classification head tells."""
    own = model.state_dict()
    return next(entry.published for entry in FAMILIES.values() if entry.published.count_classes(own) is not None)


def _fits(source: Tensor, target: Tensor, names: tuple[str, ...]) -> bool:
    """Whether entries hold a row for each of the names, and perhaps one for padding."""
    return source.shape[1:] == target.shape[1:] and len(source) - len(names) in (0, 1)


def _same_family(weights: ImportedWeights | TrainedWeights, family: str, path: Path) -> None:
    if weights.family != family:
        raise DataError(
            f"{path} holds {weights.family} {weights.variant}; train that family, or start from {family} weights."
        )


def _from_published(model: Any, family: str, path: Path) -> str:
    """Starts from a published file; one of another variant is named."""
    try:
        return FAMILIES[family].start_from(model, path)
    except UnfitError as error:
        there = suggestion(fits_instead(read_published(path).state, family, model.config.variant))
        raise DataError(f"{error}{there}") from None
