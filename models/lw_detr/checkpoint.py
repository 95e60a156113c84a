"""Published LW-DETR weights: reading the files, filling a network, saying exactly what does not fit."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from carpus.models.deimv2.checkpoint import LoadReport, read_state
from carpus.models.lw_detr.model import LWDETR
from carpus.models.torch_file import load_plain
from carpus.runtime.errors import DataError

__all__ = ["load_into", "load_state", "read_official"]

logger = logging.getLogger(__name__)

_PER_CLASS = re.compile(r"(class_embed|transformer\.enc_out_class_embed\.\d+)\.(weight|bias)")
_OPTIONAL = re.compile(r".*\.num_batches_tracked")


def read_official(path: Path, *, averaged: bool = False) -> dict[str, Tensor]:
    """The weights in a published file, by official names.

    Files of training also hold settings as an ``argparse.Namespace``, which is plain values; nothing else than it,
    tensors and plain values is read, and no code is run.

    Args:
        path: ``.safetensors``, or a file of ``torch.save`` that holds the weights under "model", as the official
            evaluation reads them.
        averaged: read "ema_model", which files of training also hold, instead.

    Raises:
        DataError: missing, unreadable, or without such weights.
    """
    with torch.serialization.safe_globals([argparse.Namespace]):
        if not averaged:
            return read_state(path)
        content = load_plain(path)
    found = content.get("ema_model") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise DataError(f"checkpoint {path} holds no averaged weights under 'ema_model'; read its 'model' instead")
    return {name.removeprefix("module."): tensor for name, tensor in found.items()}


def load_state(model: LWDETR, state: Mapping[str, Tensor], source: str, *, other_classes: bool = False) -> LoadReport:
    """Fill a network from weights with the official names.

    Args:
        model: network to fill; untouched when an error is raised.
        state: weights by name.
        source: named in errors.
        other_classes: accept another number of classes; the classification rows keep what they have.

    Raises:
        DataError: names missing or unknown, or other shapes; all kinds are listed.
    """
    own = model.state_dict()
    found = {name: state[name] for name in own if name in state}
    missing = [name for name in own if name not in state and not _OPTIONAL.fullmatch(name)]
    unknown = [name for name in state if name not in own]
    shapes, reinitialised = [], []
    for name, given in list(found.items()):
        if given.shape == own[name].shape:
            continue
        if other_classes and _PER_CLASS.fullmatch(name) and given.shape[1:] == own[name].shape[1:]:
            reinitialised.append(name)
            del found[name]
        else:
            shapes.append(f"{name} is {tuple(given.shape)}, expected {tuple(own[name].shape)}")
    kinds = (("missing", missing), ("unknown", unknown), ("of another shape", shapes))
    problems = [f"{len(items)} {label}: {_some(items)}" for label, items in kinds if items]
    if problems:
        raise DataError(
            f"{source} does not fit LW-DETR {model.config.variant} with {model.config.num_classes} classes and "
            f"{model.config.decoder.num_groups} query groups: {'; '.join(problems)}. Choose the variant and the number "
            "of classes that it was trained with (91 for COCO, whose category ids are the classes)."
        )
    with torch.no_grad():
        for name, given in found.items():
            own[name].copy_(given)
    if reinitialised:
        logger.info("%s: another number of classes; %d class entries start anew", source, len(reinitialised))
    return LoadReport(len(found), tuple(reinitialised))


def load_into(model: LWDETR, path: Path) -> str:
    """Start a network from a published file; class heads start anew when the number of classes differs.

    Returns:
        One line that says what was taken.

    Raises:
        DataError: see ``read_official`` and ``load_state``.
    """
    report = load_state(model, read_official(path), f"checkpoint {path}", other_classes=True)
    heads = "all heads" if not report.reinitialised else "class heads start anew for the other classes"
    return f"starting from {path} (published weights, {report.loaded} entries, {heads})"


def _some(items: Sequence[str], count: int = 4) -> str:
    return ", ".join(items[:count]) + (", ..." if len(items) > count else "")
