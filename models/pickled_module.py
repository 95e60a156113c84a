"""Weights out of pickled modules, without importing their classes or running a line of their code.

Detectors of the YOLO line are published as whole modules: ``torch.save(model)``. torch's own reader either executes
what the file says or refuses it. Here every class that a file names, but for tensors and plain containers, becomes an
inert record that keeps its attributes; the module tree is then walked as ``state_dict()`` walks it.

The file is a zip archive of ``data.pkl`` and one entry for each storage (torch 1.6 and newer).
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carpus.models.torch_file import check_torch_file
from carpus.runtime.errors import DataError

__all__ = ["Record", "Records", "module_state", "read_records"]

_MOST_BYTES = 8 << 30
_MOST_CHARACTERS = 1 << 23
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _RecordType(type):
    """Notes what a file asks to be called: making an object the usual way of pickling calls nothing."""

    path = ""
    calls: dict[str, None]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.calls[cls.path] = None
        return super().__call__(*args, **kwargs)


class Record(metaclass=_RecordType):
    """What stands for an object of a class that is not read: its class's name and the attributes that were pickled.

    Attributes:
        path: "module.Class" of the original.
        attributes: the pickled ``__dict__``, or what stood for it under "state".
    """

    path = ""
    calls: dict[str, None] = {}  # noqa: RUF012 - each reader's classes have their own

    def __new__(cls, *_: Any, **__: Any) -> Record:
        made = super().__new__(cls)
        made.attributes = {}
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        self.attributes: dict[str, Any]

    def __setstate__(self, state: Any) -> None:
        self.attributes.update(state if isinstance(state, dict) else {"state": state})

    def __call__(self, *_: Any, **__: Any) -> Record:
        self.calls[f"{self.path}()"] = None
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items of dict subclasses are of no use here."""

    def append(self, item: Any) -> None:
        """Items of list subclasses are of no use here."""

    def extend(self, items: Any) -> None:
        """Items of list subclasses are of no use here."""

    add = append

    def __repr__(self) -> str:
        return f"<{self.path}>"


@dataclass(frozen=True)
class Records:
    """What a file holds, and what reading it the usual way would have taken.

    Attributes:
        content: tensors, plain values, and a `Record` for everything else.
        classes: "module.name" of everything that the file names beside tensors and plain containers.
        calls: those of them that reading the usual way would have called as functions; with "()" behind the name when
            what they return would have been called, and a colon between a module and a name that has dots.
    """

    content: Any
    classes: tuple[str, ...]
    calls: tuple[str, ...]


def read_records(path: Path) -> Records:
    """The content of a file of ``torch.save``.

    Args:
        path: the file, in the zip format of torch 1.6 and newer.

    Raises:
        DataError: missing, of another format, damaged, or larger than is believable.
    """
    path = Path(path)
    check_torch_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _MOST_BYTES:
                raise DataError(f"Checkpoint {path} unpacks to more than {_MOST_BYTES >> 30} GiB; it is no detector.")
            name = next((item for item in archive.namelist() if item.endswith("/data.pkl")), None)
            if name is None:
                raise DataError(f"Checkpoint {path} has no data.pkl; expected a file that torch.save wrote.")
            order = name.removesuffix("data.pkl") + "byteorder"
            if order in archive.namelist() and archive.read(order) != b"little":
                raise DataError(f"Checkpoint {path} was written on a big-endian machine, which is not read.")
            reader = _Reader(archive, name)
            return Records(reader.load(), tuple(reader.records), tuple(reader.calls))
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, OSError, KeyError, ValueError, TypeError) as error:
        raise DataError(
            f"Checkpoint {path} cannot be read: it is no file that torch.save wrote, or is damaged "
            f"({type(error).__name__}: {error})."
        ) from error
    except (AttributeError, LookupError, ArithmeticError, MemoryError, RuntimeError, SyntaxError) as error:
        raise DataError(f"Checkpoint {path} is damaged ({type(error).__name__}: {error}).") from error


def module_state(module: Record) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a pickled module, under the names that ``state_dict()`` gives them.

    Raises:
        DataError: the record is no module.
    """
    if not isinstance(module.attributes.get("_modules"), dict):
        raise DataError(f"{module!r} is no pickled module: it has no submodules, parameters and buffers.")
    try:
        return dict(_walk(module, "", _Budget()))
    except (RecursionError, AttributeError, TypeError) as error:
        raise DataError(f"{module!r} is damaged: its tree of submodules is none ({type(error).__name__}).") from error


class _Budget:
    """How many characters all names together may have: a module inside two others has the names of both."""

    def __init__(self) -> None:
        self._left = _MOST_CHARACTERS

    def spend(self, name: str) -> str:
        self._left -= len(name) + 1
        if self._left < 0:
            raise DataError("The pickled module is damaged: its submodules stand in each other again and again.")
        return name


def _walk(module: Record, prefix: str, budget: _Budget) -> Iterator[tuple[str, Tensor]]:
    attributes = module.attributes
    skipped = attributes.get("_non_persistent_buffers_set") or ()
    for kind in ("_parameters", "_buffers"):
        for name, value in (attributes.get(kind) or {}).items():
            if isinstance(value, Tensor) and not (kind == "_buffers" and name in skipped):
                yield budget.spend(prefix + name), value
    for name, child in (attributes.get("_modules") or {}).items():
        if isinstance(child, Record):
            yield from _walk(child, budget.spend(f"{prefix}{name}."), budget)


def _rebuild_tensor(storage: Tensor, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    if math.prod(size) > len(storage):
        raise pickle.UnpicklingError(f"a tensor of {tuple(size)} over {len(storage)} numbers")
    return torch.as_strided(storage, tuple(size), tuple(stride), offset)


def _device(kind: Any, index: Any = None) -> str:
    """A device's name, of which nothing is made: texts of whatever else a file puts there may be endless."""
    if not isinstance(kind, str) or not (index is None or isinstance(index, int)):
        raise pickle.UnpicklingError(f"a device that is named by a {type(kind).__name__}")
    return kind if index is None else f"{kind}:{index}"


def _rebuild_parameter(data: Tensor, *_: Any) -> Tensor:
    return data


def _rebuild_with_type(rebuild: Callable[..., Any], kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """A tensor that has attributes, or is of a class of its own: the plain tensor."""
    return rebuild(*arguments)


# What is called while reading; nothing else is. None of it does more than make a container or a view.
_SAFE: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    # torch writes protocol 2, which names the built-in module as Python 2 did and bytes as encoded text.
    **{(module, made.__name__): made for module in ("__builtin__", "builtins") for made in (set, frozenset, slice)},
    ("_codecs", "encode"): lambda text, encoding: text.encode(encoding),
    ("torch", "Size"): tuple,
    ("torch", "device"): _device,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,  # with attributes, such as marks for decay
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_with_type,
}


def _check_operations(data: bytes) -> None:
    """Refuse what no pickler of Python 3 writes, before anything of it is done.

    An object with a higher number than a file of this length has: room for all below would be made for it. And the two
    instructions by which Python 2 called classes, since they call functions as well.
    """
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in ("INST", "OBJ"):
            raise pickle.UnpicklingError(f"it would run code by the instruction {operation.name}")
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise pickle.UnpicklingError(f"object number {argument} in {len(data)} bytes")


class _Reader(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, name: str) -> None:
        data = archive.read(name)
        _check_operations(data)
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._archive = archive
        self._folder = name.removesuffix("data.pkl")
        self._storages: dict[str, Tensor] = {}
        self.records: dict[str, type[Record]] = {}
        self.calls: dict[str, None] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Never imports anything."""
        found = _SAFE.get((module, name))
        if found is not None:
            return found
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        path = f"{module}:{name}" if "." in name else f"{module}.{name}"
        if path not in self.records:
            attributes = {"path": path, "calls": self.calls}
            self.records[path] = type(name.rpartition(".")[2], (Record,), attributes)
        return self.records[path]

    def persistent_load(self, identity: Any) -> Tensor:
        """A storage as a flat tensor."""
        kind, dtype, key, _, count = identity
        if not (
            isinstance(kind, str) and kind == "storage" and isinstance(key, str) and isinstance(dtype, torch.dtype)
        ):
            raise pickle.UnpicklingError("an unknown kind of storage")
        if key not in self._storages:
            data = self._archive.read(f"{self._folder}data/{key}")
            if len(data) % dtype.itemsize:
                raise pickle.UnpicklingError(f"storage {key} has {len(data)} bytes, which are no numbers of {dtype}")
            values = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
            if len(values) < count:
                raise pickle.UnpicklingError(f"storage {key} holds {len(values)} of {count} numbers")
            self._storages[key] = values[:count]
        return self._storages[key]
