"""What an import leaves: safetensors, a config.json that says what they are, and the report of the import.

In a folder the files are ``model.safetensors``, ``config.json`` and ``report.json``; for ``NAME.safetensors`` they are
``NAME.config.json`` and ``NAME.report.json`` beside it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from torch import Tensor

from carpus.models.data.coco import CategoryMap
from carpus.models.torch_file import file_sha256
from carpus.runtime.errors import DataError
from carpus.runtime.results import write_json

__all__ = ["FORMAT", "ImportedWeights", "Part", "find_config", "read_imported", "write_imported"]

FORMAT = "carpus.weights"
VERSION = 1
Part = Literal["detector", "transformer"]


@dataclass(frozen=True)
class ImportedWeights:
    """Weights that were imported, and what they are.

    Attributes:
        family, variant: architecture.
        part: whether they are a whole detector or the transformer of its backbone.
        input_size: (height, width) [px].
        categories: classes in the order of the class logits; none for a transformer.
        licence: SPDX expression of the weights.
        source: where they came from: file, sha256, layout and more.
        state_dict: the weights.
        file: name of the file that holds them; chosen when they are written.
    """

    family: str
    variant: str
    part: Part
    input_size: tuple[int, int]
    categories: CategoryMap
    licence: str
    source: dict[str, Any]
    state_dict: dict[str, Tensor]
    file: str = ""


def write_imported(weights: ImportedWeights, report: Mapping[str, Any], out: Path) -> list[Path]:
    """Write weights, configuration and report; an earlier import at the same place is replaced.

    Args:
        weights: what to write; tensors may share memory.
        report: what the import found.
        out: a folder, or a file ``NAME.safetensors``.

    Returns:
        The three files.

    Raises:
        DataError: something else is there.
    """
    alone = out.suffix == ".safetensors"
    stem = f"{out.stem}." if alone else ""
    names = [out.name if alone else "model.safetensors", f"{stem}config.json", f"{stem}report.json"]
    if not alone and out.exists() and not (out.is_dir() and (find_config(out) or not any(out.iterdir()))):
        raise DataError(f"{out} exists and is no import of weights; name another place with --out.")
    if alone and out.is_dir():
        raise DataError(f"{out} is a directory; name a file with --out, or a folder that does not end in .safetensors.")
    folder = out.parent if alone else out
    there = [name for name in names if (folder / name).exists()]
    if alone and there and find_config(out) != folder / names[1]:
        raise DataError(
            f"{folder / there[0]} exists and belongs to no import of weights of that name; name another file with "
            "--out."
        )
    folder.mkdir(parents=True, exist_ok=True)
    # The same memory under two names is not for safetensors: names of one tensor each get their own.
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in weights.state_dict.items()}
    with tempfile.TemporaryDirectory(prefix=".import-", dir=folder) as scratch:
        files = [Path(scratch) / name for name in names]
        safetensors.torch.save_file(tensors, files[0], metadata={"format": "pt"})
        config = {
            "format": FORMAT,
            "version": VERSION,
            "family": weights.family,
            "variant": weights.variant,
            "part": weights.part,
            "input_size": list(weights.input_size),
            "num_classes": len(weights.categories),
            "classes": {"names": list(weights.categories.names), "dataset_ids": list(weights.categories.dataset_ids)},
            "licence": weights.licence,
            "weights": {"file": names[0], "sha256": file_sha256(files[0])},
            "source": weights.source,
            "report": {"file": names[2], "counts": report["counts"]},
        }
        write_json(files[1], config)
        write_json(files[2], report)
        files[0].chmod(0o666 & ~_umask())  # safetensors makes its file for the user alone
        for file in (files[0], files[2], files[1]):
            os.replace(file, folder / file.name)
    return [folder / name for name in names]


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def find_config(path: Path) -> Path | None:
    """The configuration of an import at a path: its folder, its weights, or its configuration; None if it is none."""
    if path.is_dir():
        candidates = [path / "config.json"]
    elif path.suffix == ".safetensors":
        candidates = [path.with_name(f"{path.stem}.config.json"), path.with_name("config.json")]
    elif path.name == "config.json" or path.name.endswith(".config.json"):
        candidates = [path]
    else:
        return None
    for candidate in candidates:
        config = _config(candidate)
        weights = None if config is None else config.get("weights")
        named = weights.get("file") if isinstance(weights, dict) else None
        if config is not None and (path.suffix != ".safetensors" or named == path.name):
            return candidate
    return None


def read_imported(path: Path) -> ImportedWeights:
    """Read what `write_imported` wrote.

    Args:
        path: anything that `find_config` knows.

    Raises:
        DataError: no import, altered, or of another version.
    """
    place = find_config(Path(path))
    config = None if place is None else _config(place)
    if place is None or config is None:
        raise DataError(f"{path} is no import of weights (no config.json with format {FORMAT!r}).")
    if config.get("version") != VERSION:
        raise DataError(f"{place} is of version {config.get('version')!r}; this Carpus reads version {VERSION}.")
    try:
        file = place.with_name(Path(config["weights"]["file"]).name)
        height, width = map(int, config["input_size"])
        classes = config["classes"]
        part: Part = "transformer" if config["part"] == "transformer" else "detector"
        categories = CategoryMap(tuple(map(str, classes["names"])), tuple(map(int, classes["dataset_ids"])))
        stated = config["weights"]["sha256"]
        text = {key: str(config[key]) for key in ("family", "variant", "licence")}
        source = dict(config["source"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{place} is damaged ({type(error).__name__}: {error}); import the weights again.") from error
    if not file.is_file():
        raise DataError(f"{place} belongs to {file.name}, which is not beside it; import the weights again.")
    if file_sha256(file) != stated:
        raise DataError(f"{file} was altered: {place.name} states another sha256; import the weights again.")
    return ImportedWeights(
        part=part,
        input_size=(height, width),
        categories=categories,
        source=source,
        state_dict=safetensors.torch.load_file(file),
        file=file.name,
        **text,
    )


def _config(path: Path) -> dict[str, Any] | None:
    """The content of a configuration that is one of ours."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None
