"""The layouts of published files, and the weights in them; no code of a file is run.

==================== ========================================================================================
under                published by
==================== ========================================================================================
``ema.module``       DEIMv2: averaged weights of the training solver
``ema``              the YOLO families: averaged weights, a pickled module or a state dict
``ema_model``        LW-DETR: averaged weights in files of training
``model``            all: the weights that are trained; the YOLO families as a pickled module
``state_dict``       many training frameworks
the top              weights or a module alone
==================== ========================================================================================

Files of the name ``.safetensors`` hold weights alone.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
from torch import Tensor

from carpus.models.pickled_module import Record, module_state, read_records
from carpus.models.published.calls import refuse_programs
from carpus.models.torch_file import load_plain
from carpus.runtime.errors import DataError

__all__ = ["NO_LICENCE", "Choice", "PublishedWeights", "read_published"]

NO_LICENCE = "NOASSERTION"
"""SPDX's word for a licence that nobody has stated."""

Choice = Literal["ema", "model"]
"""Of two sets of weights in a file: the averaged ones, or those that are trained."""

_PLACES: tuple[tuple[tuple[str, ...], Choice], ...] = (
    (("ema", "module"), "ema"),
    (("ema",), "ema"),
    (("ema_model",), "ema"),
    (("model",), "model"),
    (("state_dict",), "model"),
    ((), "model"),
)
_WRAPPERS = (("module.", "module."), ("_orig_mod.", "_orig_mod."), ("model.model.", "model."))
"""(Start of all names, what is taken away): data-parallel training, compiled modules, a module inside a wrapper."""

_FACTS = ("format", "epoch", "last_epoch", "date", "version", "license")


@dataclass(frozen=True)
class PublishedWeights:
    """Weights out of a published file.

    Attributes:
        path: the file.
        state: the weights by official names, as they are stored.
        layout: where they stood, such as "ema.module", and in which form.
        choice: "ema" when they stood where averaged weights stand.
        others: where further weights stand that were not taken.
        class_names: names of the classes, if the file gives them.
        prefix: what stood ahead of every name and was taken away.
        not_made: classes of which the file holds objects that were read as inert records.
        facts: what else the file says of itself.
    """

    path: Path
    state: dict[str, Tensor]
    layout: str
    choice: Choice
    others: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None
    prefix: str = ""
    not_made: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def licence(self) -> str:
        """The licence that the file states, which such files give as "AGPL-3.0 License (https://...)"."""
        stated = str(self.facts.get("license", "")).split()
        return stated[0] if stated else NO_LICENCE


def read_published(path: Path, choice: Choice | None = None) -> PublishedWeights:
    """The weights in a published file.

    Args:
        path: ``.safetensors``, or a file of ``torch.save`` in one of the module's layouts.
        choice: which weights; None prefers the averaged ones.

    Raises:
        DataError: missing, unreadable, without weights, or with content that only running code could read.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        if choice == "ema":
            raise DataError(
                f"Checkpoint {path} is a .safetensors file, which holds one set of weights; leave 'ema' out."
            )
        state, prefix = _plain_names(_read_safetensors(path))
        return PublishedWeights(path, state, "safetensors", "model", prefix=prefix)
    if zipfile.is_zipfile(path):
        records = read_records(path)
        refuse_programs(path, records.calls)
        content, classes = records.content, records.classes
    else:
        content, classes = load_plain(path), ()
    found = {place: value for place, value in _dig(content) if _is_weights(value)}
    chosen = next((item for item in _PLACES if item[0] in found and choice in (None, item[1])), None)
    if chosen is None:
        raise DataError(_nothing_found(path, content, tuple(found), choice))
    place, kind = chosen
    value = found[place]
    module = value if isinstance(value, Record) else None
    state, prefix = _plain_names(dict(value) if module is None else module_state(module))
    if not state:
        raise DataError(f"Checkpoint {path} holds a module without a single weight under {_name(place)}.")
    return PublishedWeights(
        path=path,
        state=state,
        layout=f"{_name(place)}, {'state dict' if module is None else f'pickled module {module.path}'}",
        choice=kind,
        others=tuple(_name(other) for other in found if other != place),
        class_names=_class_names(module),
        prefix=prefix,
        not_made=classes,
        facts=_facts(content, module),
    )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise DataError(f"Checkpoint {path} {'is a directory' if path.is_dir() else 'does not exist'}.")
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"Checkpoint {path} is cut off or no safetensors file ({error}); copy it again.") from error


def _dig(content: Any) -> list[tuple[tuple[str, ...], Any]]:
    """What stands at each place."""
    values = []
    for place, _ in _PLACES:
        value = content
        for key in place:
            value = value.get(key) if isinstance(value, dict) else None
        values.append((place, value))
    return values


def _is_weights(value: Any) -> bool:
    if isinstance(value, Record):
        return isinstance(value.attributes.get("_modules"), dict)
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(name, str) and isinstance(item, Tensor) for name, item in value.items())
    )


def _plain_names(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Names without what wrappers put ahead of all of them, and what that was."""
    removed = ""
    while True:
        prefix = next((p for start, p in _WRAPPERS if state and all(name.startswith(start) for name in state)), None)
        if prefix is None:
            return state, removed
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        removed += prefix


def _nothing_found(path: Path, content: Any, found: tuple[tuple[str, ...], ...], choice: Choice | None) -> str:
    if found:
        there = ", ".join(map(_name, found))
        wanted = "averaged weights ('ema')" if choice == "ema" else "trained weights beside the averaged ones ('model')"
        return f"Checkpoint {path} holds no {wanted}; it has weights under {there}. Leave the choice out."
    objects = [(_name(place), value.path) for place, value in _dig(content) if isinstance(value, Record)]
    if objects:
        place, name = objects[0]
        return (
            f"Checkpoint {path} holds an object of {name} under {place}, which is no module; only running code of the "
            "file could make weights of it, and that is not done. Where the file comes from, load it and save "
            "model.state_dict() with torch.save, then import that."
        )
    mixed = [
        f"{name!r} under {_name(place)} is a {type(item).__name__}"
        if isinstance(name, str)
        else f"a name under {_name(place)} is a {type(name).__name__}"
        for place, value in _dig(content)
        if isinstance(value, dict) and any(isinstance(item, Tensor) for item in value.values())
        for name, item in value.items()
        if not (isinstance(name, str) and isinstance(item, Tensor))
    ]
    return (
        f"Checkpoint {path} holds no weights; expected tensors by name under 'ema.module', 'ema_model', 'model' or "
        f"'state_dict', or at the top, or a pickled module{f' ({mixed[0]})' if mixed else ''}."
    )


def _name(place: tuple[str, ...]) -> str:
    return f"'{'.'.join(place)}'" if place else "the top"


def _class_names(module: Record | None) -> tuple[str, ...] | None:
    """Class names that a module of the YOLO families carries."""
    names = None if module is None else module.attributes.get("names")
    if isinstance(names, dict) and sorted(map(str, names)) == sorted(map(str, range(len(names)))):
        names = [names[key] for key in sorted(names, key=int)]
    if isinstance(names, (list, tuple)) and names and all(isinstance(name, str) for name in names):
        return tuple(names)
    return None


def _facts(content: Any, module: Record | None) -> dict[str, Any]:
    """Plain values by which people recognise a file."""
    facts: dict[str, Any] = {}
    if isinstance(content, dict):
        facts = {key: content[key] for key in _FACTS if isinstance(content.get(key), (str, int, float))}
    described = None if module is None else module.attributes.get("yaml")
    if isinstance(described, dict):
        facts |= {
            key: described[key] for key in ("yaml_file", "scale", "nc") if isinstance(described.get(key), (str, int))
        }
    return facts
