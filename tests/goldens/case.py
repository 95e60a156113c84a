"""What a kind of case is given (the folder) and what it answers (checks)."""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Case", "Check", "Kind", "UnusableFolder", "compare_stored", "input_array"]


class UnusableFolder(Exception):
    """A folder that cannot be checked at all: files missing, unreadable or of an unknown family."""


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: tensor or quantity.
        error: largest absolute difference (relative where ``note`` says so); nan and inf fail.
        tolerance: largest error that passes.
        note: shown behind the verdict.
    """

    name: str
    error: float
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return math.isfinite(self.error) and self.error <= self.tolerance


@dataclass(frozen=True)
class Case:
    """A folder with reference data.

    Attributes:
        folder: where the files of the case lie.
        schema: content of schema.json (which may lie in the folder above).
        stem: file name of the case without its ending, where a kind has several.
    """

    folder: Path
    schema: Mapping[str, Any]
    stem: str = ""
    _cache: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def family(self) -> str:
        """Model family as the schema names it."""
        return str(self.schema["family"])

    @property
    def variant(self) -> str:
        """Variant as the schema names it."""
        return str(self.schema["variant"])

    def has(self, *names: str) -> bool:
        """Whether all these files are there."""
        return all((self.folder / name).is_file() for name in names)

    def json(self, name: str) -> dict[str, Any]:
        """Content of a JSON file.

        Raises:
            UnusableFolder: missing or no JSON object.
        """
        path = self.folder / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UnusableFolder(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(content, dict):
            raise UnusableFolder(f"{path}: expected a JSON object, found {type(content).__name__}")
        return content

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """All arrays of an .npz file.

        Raises:
            UnusableFolder: missing or no .npz file.
        """
        if name not in self._cache:
            path = self.folder / name
            try:
                with np.load(path, allow_pickle=False) as data:
                    self._cache[name] = {key: data[key] for key in data.files}
            except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                raise UnusableFolder(f"{path}: cannot be read as an .npz file: {error}") from error
        return self._cache[name]


@dataclass(frozen=True)
class Kind:
    """A kind of case: which files it needs and how it is checked.

    Attributes:
        name: printed before its checks.
        family: model family it belongs to.
        files: files that must be in the folder; with none of them there the kind does not apply.
        run: yields the checks.
        optional: a partial set of ``files`` means "does not apply" instead of an unusable folder.
    """

    name: str
    family: str
    files: tuple[str, ...]
    run: Callable[[Case], Iterator[Check]]
    optional: bool = False

    def applies(self, case: Case) -> bool:
        """Whether the case holds this kind.

        Raises:
            UnusableFolder: some of its files are there and others are missing.
        """
        present = [name for name in self.files if case.has(name)]
        if not present or (self.optional and len(present) < len(self.files)):
            return False
        missing = sorted(set(self.files) - set(present))
        if missing:
            raise UnusableFolder(f"{case.folder}: {', '.join(present)} needs {', '.join(missing)}, which is missing")
        return True


def input_array(spec: Mapping[str, Any]) -> np.ndarray:
    """The input that a case describes by seed and shape, float32.

    Raises:
        UnusableFolder: an input kind other than "standard_normal" and "random".
    """
    rng = np.random.Generator(np.random.PCG64(int(spec["seed"])))
    kind, shape = spec.get("kind", "standard_normal"), tuple(spec["shape"])
    if kind == "standard_normal":
        return rng.standard_normal(shape).astype(np.float32)
    if kind in ("random", "uniform"):
        return rng.random(shape).astype(np.float32)
    raise UnusableFolder(f'input kind {kind!r} is not known (known: "standard_normal", "random")')


def _difference(ours: np.ndarray, stored: np.ndarray) -> float:
    """Largest absolute difference; equal infinities differ by nothing, other non-finite pairs by infinity."""
    if ours.size == 0:
        return 0.0
    a, b = ours.astype(np.float64), stored.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where(a == b, 0.0, np.abs(a - b))
    return float(np.where(np.isnan(difference), math.inf, difference).max())


def compare_stored(
    name: str, ours: np.ndarray, stored: np.ndarray, spec: Mapping[str, Any], tolerance: float, note: str = ""
) -> Check:
    """Compare a whole tensor with what is stored of it: every element or a stride, and its summary figures.

    Args:
        name: name for the report.
        ours: the tensor computed here, in full.
        stored: stored values.
        spec: entry of "arrays": shape, storage, stride, mean, std, absmax.
        tolerance: largest absolute difference that passes.
        note: shown in the report.
    """
    shape = tuple(spec["shape"])
    if tuple(ours.shape) != shape:
        return Check(name, math.inf, tolerance, f"shape {tuple(ours.shape)}, expected {shape}")
    values = ours.reshape(-1)[:: int(spec["stride"])] if spec.get("storage") == "strided" else ours
    if values.shape != stored.shape:
        return Check(name, math.inf, tolerance, f"stored shape {stored.shape} does not fit its description")
    errors = [_difference(values, stored)]
    if ours.dtype.kind == "f" and "mean" in spec:
        finite = ours[np.isfinite(ours)].astype(np.float64)
        if finite.size:
            figures = {"mean": finite.mean(), "std": finite.std(), "absmax": np.abs(finite).max()}
            errors += [abs(float(value) - float(spec[key])) for key, value in figures.items() if key in spec]
    return Check(name, max(errors), tolerance, note)
