"""Bringing published weights in: read, recognise, hold against the network, and refuse whatever does not match."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from carpus.models.build import FAMILIES, build_model, find_family
from carpus.models.data.coco import CategoryMap
from carpus.models.deimv2.backbone_checkpoint import (
    compare_transformer,
    find_transformer,
    is_transformer_only,
    load_transformer,
)
from carpus.models.engine_checkpoint import FORMAT as TRAINING_FORMAT
from carpus.models.lw_detr.resnet import is_resnet_only
from carpus.models.published.classes import name_classes
from carpus.models.published.fit import Fit, compare, fill, listing, spaced
from carpus.models.published.folder import ImportedWeights, Part, find_config
from carpus.models.published.identify import Candidate, fits_instead, identify, suggestion
from carpus.models.published.reader import Choice, PublishedWeights, read_published
from carpus.models.published.report import make_report
from carpus.models.published.rules import Rules
from carpus.models.torch_file import file_sha256
from carpus.runtime.errors import DataError
from carpus.runtime.names import lookup

__all__ = ["UnmatchedError", "import_weights"]


class UnmatchedError(DataError):
    """Weights do not match the network.

    Attributes:
        report: see `carpus.models.published.report.make_report`.
    """

    def __init__(self, message: str, report: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.report = report


def import_weights(
    path: Path,
    *,
    family: str | None = None,
    variant: str | None = None,
    choice: Choice | None = None,
    classes: CategoryMap | None = None,
    licence: str | None = None,
    input_size: tuple[int, int] | None = None,
) -> tuple[ImportedWeights, dict[str, Any]]:
    """Read a published file into a network's weights.

    Args:
        path: the file.
        family: architecture family; None recognises it.
        variant: member of the family; None recognises it.
        choice: of averaged and trained weights; None prefers the averaged ones.
        classes: class names and data-set ids; None takes the file's, or COCO's by their number.
        licence: SPDX expression of the weights; None takes what the file says, if anything.
        input_size: (height, width) [px] other than the variant's own.

    Returns:
        The weights as the network holds them, and the report.

    Raises:
        UnmatchedError: keys missing, left over or of another shape, or values that cannot be.
        DataError: an unreadable file, or names that are not known.
    """
    path = Path(path)
    if find_config(path) is not None:
        raise DataError(f"{path} is an import already; `carpus export` and `carpus train --init` read it as it is.")
    if variant is not None and family is None:
        raise DataError(f"--variant {variant} needs --family, one of: {', '.join(FAMILIES)}; or leave both out.")
    if family is not None:
        lookup("model family", family, FAMILIES)
    weights = read_published(path, choice)
    if weights.facts.get("format") == TRAINING_FORMAT:
        raise DataError(
            f"{path} is a Carpus training checkpoint; `carpus export` and `carpus train --init` read it as it is."
        )
    if family is None or variant is None:
        family, variant = _recognise(weights, family)
    entry = find_family(family, variant)
    part: Part = "transformer" if family == "deimv2" and is_transformer_only(weights.state) else "detector"
    count = entry.published.count_classes(weights.state)
    categories, named = CategoryMap((), ()), ""
    if part == "detector" and count is not None:
        categories, named = name_classes(path, count, classes, weights.class_names)
    with torch.random.fork_rng(devices=[]):
        model = build_model(family, variant, count or 1, input_size)
    size: tuple[int, int] = cast(Any, model).config.input_size
    network = {
        "family": family,
        "variant": variant,
        "part": part,
        "num_classes": len(categories),
        "class_names_from": named,
        "input_size": list(size),
    }
    source = _source(weights)
    fit, state = _fill(model, weights, entry.published, part, f"checkpoint {path}")
    fitting = [] if fit.complete else fits_instead(weights.state, family, variant)
    report = make_report(weights, fit, network, source, fitting)
    if not fit.complete:
        otherwise = suggestion(fitting) or f" No other variant fits it.{spaced(entry.published.hint)}"
        raise UnmatchedError(
            f"{path} does not match {family} {variant}: {listing(fit.problems(), 2)}.{otherwise} Nothing was written.",
            report,
        )
    return ImportedWeights(family, variant, part, size, categories, licence or weights.licence, source, state), report


def _recognise(weights: PublishedWeights, family: str | None) -> tuple[str, str]:
    """The one variant that weights fit."""
    candidates = identify(weights.state, None if family is None else (family,))
    fitting = [candidate for candidate in candidates if candidate.fit.complete]
    if len(fitting) == 1:
        return fitting[0].family, fitting[0].variant
    if fitting:
        raise DataError(
            f"{weights.path} fits {', '.join(map(str, fitting))} alike; say which with --family and --variant."
        )
    raise DataError(_unrecognised(weights, family, candidates))


def _unrecognised(weights: PublishedWeights, family: str | None, candidates: list[Candidate]) -> str:
    where = f"any variant of {family}" if family else "any variant of any family"
    elsewhere = "" if family is None else suggestion(fits_instead(weights.state, family, ""))
    if not candidates:
        if is_resnet_only(weights.state):
            return f"{weights.path} holds a ResNet alone, which `carpus train --family lw_detr --init` takes as it is."
        names = ", ".join(list(weights.state)[:3])
        return f"{weights.path} does not fit {where}, not even in part; its first names are {names}.{elsewhere}"
    best = candidates[0]
    text = f"{weights.path} does not fit {where}; nearest is {best}: {listing(best.fit.problems(), 2)}."
    return text + (elsewhere or f" Say --family {best.family} --variant {best.variant} to see every key.")


def _fill(
    model: nn.Module, weights: PublishedWeights, rules: Rules, part: Part, source: str
) -> tuple[Fit, dict[str, Tensor]]:
    """How the weights fit, and the weights as the network holds them; its own where they do not."""
    if part == "transformer":
        fit = compare_transformer(model, weights.state, source).fit
        if fit.complete:
            load_transformer(model, weights.state, source)
        return fit, find_transformer(model, source).state_dict()
    rules.adapt(model, weights.state)
    fit = compare(model.state_dict(keep_vars=True), weights.state, rules)
    if fit.complete:
        fill(model, weights.state, rules, source)
    return fit, model.state_dict()


def _source(weights: PublishedWeights) -> dict[str, Any]:
    """What the configuration and the report say of the file."""
    return {
        "file": weights.path.name,
        "sha256": file_sha256(weights.path),
        "bytes": weights.path.stat().st_size,
        "layout": weights.layout,
        "averaged": weights.choice == "ema",
        "other_weights": list(weights.others),
        "prefix_removed": weights.prefix,
        "objects_not_made": list(weights.not_made),
        "says": dict(weights.facts),
    }
