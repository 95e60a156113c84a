"""Published DEIMv2 weights: reading the files, filling a network, saying exactly what does not fit.

Files are read without running code from them: ``.pth`` with torch's restricted unpickler, ``.safetensors`` directly.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from carpus.models.deimv2.backbone_checkpoint import is_transformer_only, load_transformer
from carpus.models.deimv2.model import DEIMv2
from carpus.models.torch_file import load_plain
from carpus.runtime.errors import DataError

__all__ = ["LoadReport", "load_into", "load_state", "read_state"]

logger = logging.getLogger(__name__)

_PER_CLASS = re.compile(r"decoder\.(enc_score_head|dec_score_head\.\d+|denoising_class_embed)\.(weight|bias)")
_OF_INPUT_SIZE = re.compile(r"decoder\.(anchors|valid_mask)")
_OPTIONAL = re.compile(r".*\.num_batches_tracked")
_CONSTANT = re.compile(r"decoder\.(decoder\.)?(up|reg_scale)")

_SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class LoadReport:
    """What loading a state did.

    Attributes:
        loaded: entries copied.
        reinitialised: per-class entries left as they were because the number of classes differs.
    """

    loaded: int
    reinitialised: tuple[str, ...]


def read_state(path: Path) -> dict[str, Tensor]:
    """The weights in a published file, by official names; the averaged ones where a file holds both.

    Args:
        path: ``.safetensors``, or a file of ``torch.save`` holding the weights under ``ema.module``, ``model``,
            ``state_dict`` or at the top.

    Raises:
        DataError: missing, unreadable (see `load_plain`), or without weights.
    """
    path = Path(path)
    if path.suffix == ".safetensors" and path.is_file():
        return _plain_names(_read_safetensors(path))
    content = load_plain(path)
    for keys in (("ema", "module"), ("model",), ("state_dict",), ()):
        found = content
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, dict) and found and all(isinstance(value, Tensor) for value in found.values()):
            return _plain_names(found)
    raise DataError(
        f"checkpoint {path} holds no weights; expected tensors by name under 'ema.module', 'model' or 'state_dict', or "
        "at the top"
    )


def load_state(model: DEIMv2, state: Mapping[str, Tensor], source: str, *, other_classes: bool = False) -> LoadReport:
    """Fill a network from weights with the official names.

    Names that share a tensor (one box head for all layers) may be given once. Anchors follow from the network's input
    size and are never taken from the file.

    Args:
        model: network to fill; untouched when an error is raised.
        state: weights by name.
        source: named in errors.
        other_classes: accept another number of classes; score heads and class embedding keep what they have.

    Raises:
        DataError: names missing or unknown, other shapes, or other constants; all kinds are listed.
    """
    own = model.state_dict(keep_vars=True)
    sharing: dict[int, list[str]] = {}
    for name, tensor in own.items():
        sharing.setdefault(id(tensor), []).append(name)

    found: dict[str, Tensor] = {}
    missing: list[str] = []
    for name, tensor in own.items():
        if _OF_INPUT_SIZE.fullmatch(name):
            continue
        given = next((state[alias] for alias in (name, *sharing[id(tensor)]) if alias in state), None)
        if given is not None:
            found[name] = given
        elif not _OPTIONAL.fullmatch(name):
            missing.append(name)
    unknown = [name for name in state if name not in own]

    shapes, constants, reinitialised = [], [], []
    for name, given in list(found.items()):
        target = own[name]
        if _CONSTANT.fullmatch(name):
            if given.numel() != 1 or not math.isclose(float(given), float(target), rel_tol=1e-6):
                constants.append(f"{name} is {given.flatten()[:4].tolist()}, expected {float(target)}")
            del found[name]
        elif given.shape != target.shape:
            if other_classes and _PER_CLASS.fullmatch(name) and given.shape[1:] == target.shape[1:]:
                reinitialised.append(name)
                del found[name]
            else:
                shapes.append(f"{name} is {tuple(given.shape)}, expected {tuple(target.shape)}")
    problems = [
        f"{len(items)} {label}: {_some(items)}"
        for label, items in (
            ("missing", missing),
            ("unknown", unknown),
            ("of another shape", shapes),
            ("constants that differ", constants),
        )
        if items
    ]
    if problems:
        raise DataError(
            f"{source} does not fit DEIMv2 {model.config.variant} with {model.config.num_classes} classes: "
            f"{'; '.join(problems)}. Choose the variant and the number of classes that it was trained with."
        )
    with torch.no_grad():
        for name, given in found.items():
            own[name].copy_(given)
    if reinitialised:
        logger.info("%s: another number of classes; %d class entries start anew", source, len(reinitialised))
    return LoadReport(len(found), tuple(reinitialised))


def load_into(model: DEIMv2, path: Path) -> str:
    """Start a network from a published file; score heads start anew when the number of classes differs.

    A file with a transformer alone (a distilled backbone, or DINOv3's own) fills the backbone's transformer.

    Returns:
        One line that says what was taken.

    Raises:
        DataError: see ``read_state`` and ``load_state``.
    """
    state = read_state(path)
    if is_transformer_only(state):
        return load_transformer(model, state, f"checkpoint {path}").describe(path)
    report = load_state(model, state, f"checkpoint {path}", other_classes=True)
    heads = "all heads" if not report.reinitialised else "score heads start anew for the other classes"
    return f"starting from {path} (published weights, {report.loaded} entries, {heads})"


def _plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without the prefix that data-parallel training adds."""
    prefix = "module."
    if all(name.startswith(prefix) for name in state):
        return {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return dict(state)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file: eight bytes of header length, a JSON header, the data.

    Raises:
        DataError: a header that is none, or entries that do not fit the data.
    """
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise DataError(f"checkpoint {path} is cut off or no safetensors file: {len(data)} bytes, header of {length}")
    try:
        header = json.loads(data[8 : 8 + length])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        specs: list[tuple[str, str, list[int], int, int]] = [
            (
                name,
                str(entry["dtype"]),
                [int(n) for n in entry["shape"]],
                int(entry["data_offsets"][0]),
                int(entry["data_offsets"][1]),
            )
            for name, entry in entries.items()
        ]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(f"checkpoint {path} has a damaged safetensors header: {error!r}") from error
    body = memoryview(data)[8 + length :]
    tensors = {}
    for name, kind, shape, start, end in specs:
        dtype = _SAFETENSORS_TYPES.get(kind)
        if dtype is None:
            raise DataError(f"checkpoint {path}: {name} has type {kind!r}; known: {', '.join(_SAFETENSORS_TYPES)}")
        size = math.prod(shape) * dtype.itemsize
        if not 0 <= start <= end <= len(body) or end - start != size:
            raise DataError(f"checkpoint {path}: {name} needs {size} bytes, its place is {start} to {end}")
        buffer = bytearray(body[start:end])
        tensors[name] = (
            torch.frombuffer(buffer, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        )
    return tensors


def _some(items: Sequence[str], count: int = 4) -> str:
    return ", ".join(items[:count]) + (", ..." if len(items) > count else "")
