"""Checkpoint files to an `ExportSource`: Carpus training checkpoints and published weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from carpus.export.families import get_family
from carpus.export.pipeline import ExportSource
from carpus.models.build import build_model, find_family
from carpus.models.data.coco import CategoryMap
from carpus.models.engine_checkpoint import is_training_checkpoint, load_trained_weights
from carpus.models.published.classes import name_classes
from carpus.models.published.fit import fill
from carpus.models.published.reader import read_published
from carpus.models.torch_file import file_sha256
from carpus.runtime.errors import DataError
from carpus.runtime.spec import ClassInfo

__all__ = ["load_source", "read_class_names"]


def load_source(
    checkpoint: Path,
    *,
    family: str | None = None,
    variant: str | None = None,
    classes: CategoryMap | None = None,
    name: str | None = None,
    licence: str = "Apache-2.0",
    description: str = "",
) -> ExportSource:
    """Read a checkpoint and build its network.

    A Carpus training checkpoint says itself what it is; for other files family and variant must be given, and the
    classes unless they are COCO's 80 or its category ids 0..90.

    Args:
        checkpoint: a Carpus training checkpoint (``best.pt``), or published weights (.pth, .safetensors).
        family: architecture family.
        variant: member of the family.
        classes: class names and data-set ids in the order of the class logits.
        name: short name for people; None takes the family and variant.
        licence: SPDX expression of the weights.
        description: one paragraph for people.

    Raises:
        DataError: the file is missing, is no checkpoint, lacks weights, or is of another architecture or variant.
    """
    checkpoint = Path(checkpoint)
    if not checkpoint.is_file():
        found = "is a directory" if checkpoint.is_dir() else "does not exist"
        raise DataError(f"Checkpoint {checkpoint} {found}; give a file such as runs/NAME/best.pt.")
    if is_training_checkpoint(checkpoint):
        source = _from_training(checkpoint, family, variant, classes)
    else:
        source = _from_published(checkpoint, family, variant, classes)
    module, family, variant, input_size, categories, recipe = source
    return ExportSource(
        module=module.eval(),
        family=family,
        variant=variant,
        input_size=input_size,
        classes=tuple(map(ClassInfo, categories.names, categories.dataset_ids)),
        name=name or f"{family}-{variant}",
        licence=licence,
        description=description,
        checkpoint_sha256=file_sha256(checkpoint),
        recipe=tuple(recipe.items()),
    )


def read_class_names(path: Path) -> CategoryMap:
    """Class names from a text file, one a line; data-set ids count from 0.

    Raises:
        DataError: no such file, no text, or the same name twice.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"class names {str(path)!r}: cannot be read as a text file ({error})") from None
    names = tuple(line.strip() for line in lines if line.strip())
    if not names:
        raise DataError(f"class names {str(path)!r}: expected one name a line, the file is empty")
    return CategoryMap(names, tuple(range(len(names))))


_Loaded = tuple[nn.Module, str, str, tuple[int, int], CategoryMap, dict[str, str]]


def _from_training(path: Path, family: str | None, variant: str | None, classes: CategoryMap | None) -> _Loaded:
    trained = load_trained_weights(path)
    for what, given, stated in (("family", family, trained.family), ("variant", variant, trained.variant)):
        if given is not None and given != stated:
            raise DataError(f"Checkpoint {path} holds {what} {stated!r}, not {given!r}; leave --{what} out.")
    if classes is not None and len(classes) != len(trained.categories):
        raise DataError(
            f"Checkpoint {path} has {len(trained.categories)} classes, {len(classes)} were given; leave them out to "
            "take the checkpoint's own."
        )
    module = build_model(trained.family, trained.variant, len(trained.categories), trained.input_size)
    get_family(trained.family).load(module, trained.state_dict, f"checkpoint {path}")
    recipe = {
        "epochs": str(trained.epoch),
        "seed": str(trained.seed),
        **{f"recipe.{key}": json.dumps(value) for key, value in trained.recipe.items()},
        **{f"metrics.{key}": json.dumps(value) for key, value in trained.metrics.items() if _is_plain(value)},
    }
    return module, trained.family, trained.variant, trained.input_size, classes or trained.categories, recipe


def _from_published(path: Path, family: str | None, variant: str | None, classes: CategoryMap | None) -> _Loaded:
    weights = read_published(path)
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
    fill(module, weights.state, rules, f"checkpoint {path}")
    return module, family, variant, get_family(family).input_size(module), categories, {}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
