"""Training checkpoints: everything that resuming needs, and the weights that leave training.

Two files lie in a training folder. ``last.pt`` resumes training bit-exact on the same machine; ``best.pt`` holds the
averaged weights that scored best, and is what export and fine-tuning read. Both are written to a temporary name and
renamed, and are loaded without executing code (``weights_only``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carpus.models.data.coco import CategoryMap
from carpus.models.torch_file import load_plain
from carpus.runtime.errors import DataError

__all__ = [
    "FORMAT",
    "TrainedWeights",
    "is_training_checkpoint",
    "load_checkpoint",
    "load_trained_weights",
    "save_atomic",
]

FORMAT = "carpus.training"
VERSION = 1


@dataclass(frozen=True)
class TrainedWeights:
    """Weights that came out of training, and what they are.

    Attributes:
        family, variant: architecture.
        input_size: (height, width) [px] that it was trained for.
        categories: classes, in the order of the class logits.
        state_dict: the averaged weights.
        epoch: epochs trained.
        metrics: validation metrics of these weights; empty when there was no validation.
        recipe: the recipe's values.
        seed: seed of the training.
    """

    family: str
    variant: str
    input_size: tuple[int, int]
    categories: CategoryMap
    state_dict: dict[str, Tensor]
    epoch: int
    metrics: dict[str, Any]
    recipe: dict[str, Any]
    seed: int


def save_atomic(content: Mapping[str, Any], path: Path) -> None:
    """Writes a checkpoint so that the name holds either the old one or the new one, never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save({"format": FORMAT, "version": VERSION, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a file that `save_atomic` wrote, onto the CPU.

    Raises:
        DataError: missing, unreadable, no Carpus checkpoint, or of another version.
    """
    content = load_plain(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path} is not a Carpus training checkpoint (no format entry {FORMAT!r}).")
    if content.get("version") != VERSION:
        raise DataError(
            f"{path} is a checkpoint of version {content.get('version')!r}; this Carpus reads version {VERSION}."
        )
    return content


def is_training_checkpoint(path: Path) -> bool:
    """Whether a file is a Carpus training checkpoint of any version."""
    try:
        content = load_plain(path)
    except DataError:
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def load_trained_weights(path: Path) -> TrainedWeights:
    """Reads the averaged weights of ``best.pt`` or ``last.pt``.

    Raises:
        DataError: see `load_checkpoint`; or a field is missing.
    """
    content = load_checkpoint(path)
    try:
        classes = content["classes"]
        height, width = content["input_size"]
        return TrainedWeights(
            family=content["family"],
            variant=content["variant"],
            input_size=(int(height), int(width)),
            categories=CategoryMap(tuple(classes["names"]), tuple(classes["dataset_ids"])),
            state_dict=content["ema"]["module"],
            epoch=content["progress"]["epoch"],
            metrics=content["metrics"],
            recipe=content["recipe"],
            seed=content["seed"],
        )
    except KeyError as error:
        raise DataError(f"{path} lacks the field {error.args[0]!r}; it was not written by this training.") from None
