"""What files of weights may ask to be called when they are read the usual way; here nothing of it is called at all."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from carpus.runtime.errors import DataError

__all__ = ["refuse_programs"]

_VALUES = {
    "_codecs": "encode",
    "argparse": "Namespace",
    "array": "array _array_reconstructor",
    "builtins": "bytearray bytes complex dict frozenset getattr list object range set slice tuple type",
    "collections": "ChainMap Counter OrderedDict defaultdict deque",
    "copyreg": "_reconstructor",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "partial",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "re": "_compile",
    "types": "SimpleNamespace",
    "uuid": "UUID",
}
_VALUES |= {
    "__builtin__": _VALUES["builtins"],
    "numpy._core.multiarray": _VALUES["numpy.core.multiarray"],
    "numpy._core.numeric": _VALUES["numpy.core.numeric"],
    "pathlib._local": _VALUES["pathlib"],
}
_KNOWN = frozenset(f"{module}.{name}" for module, names in _VALUES.items() for name in names.split())
_PROGRAMS = sys.stdlib_module_names | {"__builtin__", "numpy", "torch"}


def refuse_programs(path: Path, calls: Iterable[str]) -> None:
    """Refuse a file whose reading would call anything that makes no plain value.

    Settings and enumerations of the authors' own are made by calling their class, which is told by its capital letter.

    Args:
        path: the file, named in errors.
        calls: what it asks for, see `carpus.models.pickled_module.Records`.

    Raises:
        DataError: it asks for something else; all of it is named.
    """
    wrong = [call for call in calls if not _makes_a_value(call)]
    if wrong:
        raise DataError(
            f"Checkpoint {path} would run code when it is read the usual way: it calls {', '.join(wrong)}. Nothing "
            "of it was run. Do not open it with torch.load; get the weights (a state_dict, or .safetensors) from their "
            "authors."
        )


def _makes_a_value(call: str) -> bool:
    if not all(part.isidentifier() for part in call.split(".")):  # what another call returned, or a name with dots
        return False
    module, _, name = call.rpartition(".")
    if call in _KNOWN or (module == "torch._utils" and name.startswith("_rebuild_")):
        return True
    return module.split(".")[0] not in _PROGRAMS and name.lstrip("_")[:1].isupper()
