"""Checkpoint files to an `ExportSource`: Carpus training checkpoints, imported and published weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from carpus.export.families import get_family
from carpus.export.pipeline import ExportSource
from carpus.models.build import build_model, find_family
from carpus.models.data.coco import CategoryMap
from carpus.models.engine_checkpoint import (
    TrainedWeights,
    is_training_checkpoint,
    load_checkpoint,
    load_trained_weights,
)
from carpus.models.published.classes import name_classes
from carpus.models.published.fit import UnfitError, fill
from carpus.models.published.folder import ImportedWeights, find_config, read_imported
from carpus.models.published.identify import fits_instead, suggestion
from carpus.models.published.reader import NO_LICENCE, PublishedWeights, read_published
from carpus.models.torch_file import file_sha256
from carpus.runtime.errors import DataError
from carpus.runtime.spec import ClassInfo

__all__ = ["load_source"]


def load_source(
    checkpoint: Path,
    *,
    family: str | None = None,
    variant: str | None = None,
    classes: CategoryMap | None = None,
    name: str | None = None,
    licence: str | None = None,
    description: str = "",
) -> ExportSource:
    """Read a checkpoint and build its network.

    A Carpus training checkpoint and imported weights say themselves what they are; for other files family and variant
    must be given, and the classes unless they are COCO's 80 or its category ids 0..90.

    Args:
        checkpoint: a Carpus training checkpoint (``best.pt``), imported weights (their folder or .safetensors), or
            published weights (.pth, .pt, .safetensors).
        family: architecture family.
        variant: member of the family.
        classes: class names and data-set ids in the order of the class logits.
        name: short name for people; None takes the family and variant.
        licence: SPDX expression of the weights; None takes what imported weights or the published file state, and
            Apache-2.0 for a training that is known to have started from random weights, else ``NOASSERTION``.
        description: one paragraph for people.

    Raises:
        DataError: the file is missing, is no checkpoint, lacks weights, or is of another architecture or variant.
    """
    checkpoint = Path(checkpoint)
    imported = find_config(checkpoint)
    if imported is None and not checkpoint.is_file():
        found = "is a directory" if checkpoint.is_dir() else "does not exist"
        raise DataError(
            f"Checkpoint {checkpoint} {found}; give a file such as runs/NAME/best.pt, or what `carpus import` wrote."
        )
    if imported is not None:
        weights = read_imported(checkpoint)
        stated, checkpoint = weights.licence, imported.with_name(weights.file)
        source = _from_imported(checkpoint, weights, family, variant, classes)
    elif is_training_checkpoint(checkpoint):
        source, stated = _from_training(checkpoint, family, variant, classes), _training_licence(checkpoint)
    else:
        published = read_published(checkpoint)
        source, stated = _from_published(published, family, variant, classes), published.licence
    module, family, variant, input_size, categories, recipe = source
    return ExportSource(
        module=module.eval(),
        family=family,
        variant=variant,
        input_size=input_size,
        classes=tuple(map(ClassInfo, categories.names, categories.dataset_ids)),
        name=name or f"{family}-{variant}",
        licence=licence or stated,
        description=description,
        checkpoint_sha256=file_sha256(checkpoint),
        recipe=tuple(recipe.items()),
    )


_Loaded = tuple[nn.Module, str, str, tuple[int, int], CategoryMap, dict[str, str]]


def _from_training(path: Path, family: str | None, variant: str | None, classes: CategoryMap | None) -> _Loaded:
    trained = load_trained_weights(path)
    _check_stated(path, trained, family, variant, classes)
    module = build_model(trained.family, trained.variant, len(trained.categories), trained.input_size)
    fill(module, trained.state_dict, find_family(trained.family, trained.variant).published, f"checkpoint {path}")
    recipe = {
        "epochs": str(trained.epoch),
        "seed": str(trained.seed),
        **{f"recipe.{key}": json.dumps(value) for key, value in trained.recipe.items()},
        **{f"metrics.{key}": json.dumps(value) for key, value in trained.metrics.items() if _is_plain(value)},
    }
    return module, trained.family, trained.variant, trained.input_size, classes or trained.categories, recipe


def _training_licence(path: Path) -> str:
    """This project's for what began with random numbers; nobody but the user knows that of other beginnings."""
    content = load_checkpoint(path)
    started = content if "init" in content else content.get("identity", {})
    return "Apache-2.0" if started.get("init", "") is None else NO_LICENCE


def _from_imported(
    path: Path, weights: ImportedWeights, family: str | None, variant: str | None, classes: CategoryMap | None
) -> _Loaded:
    if weights.part != "detector":
        raise DataError(
            f"{path} holds the transformer of a {weights.family} {weights.variant} alone, which detects nothing; train "
            "from it with `carpus train --init`."
        )
    _check_stated(path, weights, family, variant, classes)
    module = build_model(weights.family, weights.variant, len(weights.categories), weights.input_size)
    fill(module, weights.state_dict, find_family(weights.family, weights.variant).published, f"imported {path}")
    recipe = {f"source.{key}": str(weights.source.get(key)) for key in ("file", "sha256", "layout")}
    return module, weights.family, weights.variant, weights.input_size, classes or weights.categories, recipe


def _check_stated(
    path: Path,
    weights: TrainedWeights | ImportedWeights,
    family: str | None,
    variant: str | None,
    classes: CategoryMap | None,
) -> None:
    """Refuse what the user says when the weights say otherwise."""
    for what, given, stated in (("family", family, weights.family), ("variant", variant, weights.variant)):
        if given is not None and given != stated:
            raise DataError(f"Checkpoint {path} holds {what} {stated!r}, not {given!r}; leave --{what} out.")
    if classes is not None and len(classes) != len(weights.categories):
        raise DataError(
            f"Checkpoint {path} has {len(weights.categories)} classes, {len(classes)} were given; leave them out to "
            "take the checkpoint's own."
        )


def _from_published(
    weights: PublishedWeights, family: str | None, variant: str | None, classes: CategoryMap | None
) -> _Loaded:
    path = weights.path
    if family is None or variant is None:
        raise DataError(
            f"Checkpoint {path} is not a Carpus training checkpoint, so it does not say what it is; give --family and "
            "--variant, or bring it in with `carpus import`."
        )
    rules = find_family(family, variant).published
    count = rules.count_classes(weights.state)
    if count is None:
        raise DataError(
            f"Checkpoint {path} has no head of classes, so it is not a {family} {variant}; its first names are "
            f"{', '.join(list(weights.state)[:3])}."
        )
    categories, _ = name_classes(path, count, classes, weights.class_names)
    module = build_model(family, variant, count)
    try:
        fill(module, weights.state, rules, f"checkpoint {path}")
    except UnfitError as error:
        raise DataError(f"{error}{suggestion(fits_instead(weights.state, family, variant))}") from None
    return module, family, variant, get_family(family).input_size(module), categories, {}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
