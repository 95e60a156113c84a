"""Antialiased bilinear resize, equal to Pillow's within one grey level and several times faster for camera sizes.

Pillow's BILINEAR weighs source pixel ``k`` for the output pixel with centre ``c = (o + 1/2) p / q`` (``p / q`` the
reduced ratio of the sizes) by ``max(0, 1 - |k + 1/2 - c| / s)``, ``s = max(p / q, 1)``, and divides by the sum over
the pixels that exist. Times ``2 q s`` these weights are whole numbers that repeat every ``q`` outputs, so the sums
are taken over whole planes, one (phase, tap) at a time, in 16-bit integers that numpy adds a vector at a time.
Outputs whose window leaves the image are redone one by one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import cv2
import numpy as np

__all__ = ["PolyphaseResizer", "pillow_resize"]

_MOST_COLUMN_STEP = 4  # above, taking columns apart costs as much as Pillow's whole resize
_MOST_ROW_PHASES = 48  # above, and below the least size, the number of numpy calls outweighs their work
_MOST_ROW_STEP = 8
_LEAST_SIZE = 160
_STRIP_PIXELS = 76_800  # their scratch buffers take a few hundred kilobytes
_MOST_STRIP_PHASES = 4  # above, so many calls a strip cost more than the cache saves


def pillow_resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Pillow's own antialiased bilinear resize of (h, w, 3) uint8 to ``size`` (height, width)."""
    from PIL import Image

    resized = Image.fromarray(np.ascontiguousarray(image)).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(resized)


class _Window(NamedTuple):
    """Whole-number weights of consecutive source pixels, the first of them ``first``."""

    first: int
    weights: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.weights)


class _Axis(NamedTuple):
    """One axis: output ``t * q + o`` is ``phases[o]`` shifted by ``t * p``, save for the outputs in ``edges``."""

    step: int
    phases: tuple[_Window, ...]
    edges: dict[int, _Window]
    length: int

    def inner(self, phase: int) -> range:
        """The shifts ``t`` whose window lies within the image."""
        count = self.length // len(self.phases)
        inside = [t for t in range(count) if t * len(self.phases) + phase not in self.edges]
        return range(inside[0], inside[-1] + 1) if inside else range(0)


@lru_cache(maxsize=64)
def _axis(source: int, target: int) -> _Axis:
    divisor = math.gcd(source, target)
    p, q = source // divisor, target // divisor
    reach = 2 * max(p, q)

    def window(output: int) -> _Window:
        centre = (2 * output + 1) * p
        low = (centre - reach - q) // (2 * q) + 1
        high = -((q - centre - reach) // (2 * q))
        weights = tuple(reach - abs(2 * q * k + q - centre) for k in range(low, high))
        return _Window(low, weights)

    windows = [window(output) for output in range(q)]
    common = math.gcd(*(weight for item in windows for weight in item.weights))
    phases = tuple(_Window(item.first, tuple(weight // common for weight in item.weights)) for item in windows)
    edges = {}
    for output in range(target):
        first, weights = phases[output % q]
        first += output // q * p
        kept = [(k, w) for k, w in enumerate(weights, first) if 0 <= k < source]
        if len(kept) < len(weights):
            edges[output] = _Window(kept[0][0], tuple(w for _, w in kept))
    return _Axis(p, phases, edges, target)


def _group(window: _Window, step: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Taps of equal weight and equal shift (``k // step``) together, as (weight, taps); a group of shift 0 first."""
    groups: dict[tuple[int, int], list[int]] = {}
    for k, weight in enumerate(window.weights, window.first):
        groups.setdefault((k // step, weight), []).append(k)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0] != 0, -len(item[1])))
    return tuple((weight, tuple(taps)) for (_, weight), taps in ordered)


_Operation = tuple[Callable[..., object], np.ndarray, np.ndarray, np.ndarray]
"""A numpy function, its two operands, where the result goes; the arrays are views of scratch buffers."""


def _widen(source: np.ndarray, _: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, source)


def _weighted_sum(
    groups: tuple[tuple[int, list[np.ndarray]], ...], total: np.ndarray, term: np.ndarray
) -> list[_Operation]:
    """Operations for ``total = sum of weight * sum(sources)`` over the groups, ``term`` being scratch.

    In floating point every source is weighted by itself: a sum of two might not fit their own type.
    """
    if total.dtype != np.uint16:
        groups = tuple((weight, [source]) for weight, sources in groups for source in sources)
    operations: list[_Operation] = []
    for number, (weight, sources) in enumerate(groups):
        into = term if number else total
        factor = np.array(weight, total.dtype)
        if len(sources) == 1:
            if weight == 1 and number:
                operations.append((np.add, total, sources[0], total))
                continue
            operations.append((np.multiply, sources[0], factor, into))
        else:
            operations.append((np.add, sources[0], sources[1], into))
            operations += [(np.add, into, source, into) for source in sources[2:]]
            if weight != 1:
                operations.append((np.multiply, into, factor, into))
        if number:
            operations.append((np.add, total, term, total))
    return operations


class _Phase(NamedTuple):
    """Output rows that are summed alike: how, where the sums are, where they go and what divides them."""

    operations: list[_Operation]
    total: np.ndarray
    rows: slice
    divisor: int


class _Strip:
    """A strip of the image: which source rows it reads, and the prepared operations that make its output rows.

    Shapes never change between images, so every view is made once and a call only runs through the list.

    Args:
        rows, columns: the axes.
        shifts: which repetitions of the row phases.
        source: (height, width) of the image.
        memory: hands out scratch buffers, which the strips share.
    """

    def __init__(self, rows: _Axis, columns: _Axis, shifts: range, source: tuple[int, int], memory: _Memory) -> None:
        first = min(window.first for window in rows.phases) + shifts.start * rows.step
        end = max(window.first + len(window.weights) for window in rows.phases) + (shifts.stop - 1) * rows.step
        self.rows = slice(max(first, 0), min(end, source[0]))
        height, width, step = self.rows.stop - self.rows.start, columns.length, columns.step
        planes = memory.take("planes", (3, height, source[1]), np.uint8)
        self._planes = list(planes)
        self._split: tuple[np.ndarray, list[np.ndarray]] | None = None
        parts = memory.take("parts", (step, 3 * height, width), np.uint16)
        narrow = parts[0]
        self._operations: list[_Operation] = []
        if step == 2 and sys.byteorder == "little":
            pairs = planes.view(np.uint16).reshape(3 * height, width)
            self._operations.append((np.bitwise_and, pairs, np.array(255, np.uint16), parts[0]))
            self._operations.append((np.right_shift, pairs, np.array(8, np.uint16), parts[1]))
        elif step > 1:
            split = memory.take("split", (step, 3 * height, width), np.uint8)
            self._split = planes.reshape(3 * height, width, step), list(split)
            self._operations.append((_widen, split, split, parts))
        else:
            self._operations.append((_widen, planes.reshape(3 * height, width), planes, parts[0]))
        if step > 1:
            narrow = memory.take("narrow", (3 * height, width), np.uint16)
            self._operations += _column_sums(columns, parts, narrow, memory.take("term", narrow.shape, np.uint16))
        narrow = narrow.reshape(3, height, width)
        self._sums = _RowSums(narrow, memory, rows, self.rows.start, columns.phases[0].total)
        count = len(rows.phases)
        for phase, window in enumerate(rows.phases):
            inner = rows.inner(phase)
            inside = range(max(inner.start, shifts.start), min(inner.stop, shifts.stop))
            if inside:
                outputs = slice(inside.start * count + phase, (inside.stop - 1) * count + phase + 1, count)
                self._sums.add(window, inside.start * rows.step, outputs)
        for output, window in rows.edges.items():
            if output // count in shifts:
                self._sums.add(window, 0, slice(output, output + 1))
        self._outputs = slice(shifts.start * count, shifts.stop * count)

    def run(self, image: np.ndarray, out: np.ndarray, scale: np.ndarray) -> None:
        """See :meth:`PolyphaseResizer.__call__`; only this strip's rows of ``out`` are filled."""
        cv2.split(image[self.rows], self._planes)
        if self._split is not None:
            cv2.split(*self._split)
        for operation, first, second, into in self._operations:
            operation(first, second, into)
        for phase in self._sums.phases:
            for operation, first, second, into in phase.operations:
                operation(first, second, into)
            np.copyto(out[:, phase.rows], phase.total)
        # Almost all rows have one divisor, so that one pass over memory that lies together scales them.
        rows, divisor = out[:, self._outputs], self._sums.divisor
        np.multiply(rows, scale / np.float32(divisor), rows)
        for phase in self._sums.phases:
            if phase.divisor != divisor:
                rows = out[:, phase.rows]
                np.multiply(rows, np.float32(divisor / phase.divisor), rows)


class _RowSums:
    """Collects the phases of a strip.

    Args:
        narrow: (3, h, W) sums over columns.
        memory: hands out scratch buffers.
        rows: the axis.
        first_row: the source row that is row 0 of ``narrow``.
        column_total: what divides ``narrow``.
    """

    def __init__(self, narrow: np.ndarray, memory: _Memory, rows: _Axis, first_row: int, column_total: int) -> None:
        self._narrow, self._memory, self._step, self._first_row = narrow, memory, rows.step, first_row
        self._column_total = column_total
        greatest = 255 * column_total * max(window.total for window in rows.phases)
        self._dtype = np.uint16 if greatest < 1 << 16 else np.float32
        self.phases: list[_Phase] = []
        self.divisor = column_total * rows.phases[0].total

    def add(self, window: _Window, shift: int, outputs: slice) -> None:
        """The rows ``outputs``: the window moved on by ``shift`` source rows, and then by the axis's step a row."""
        count = len(range(outputs.start, outputs.stop, outputs.step or 1))
        first = shift - self._first_row
        # Rows are reached by stride, never by a shifted part, so only equal weights matter: a step beyond any tap.
        groups = tuple(
            (weight, [self._narrow[:, first + k :: self._step][:, :count] for k in taps])
            for weight, taps in _group(window, 1 << 30)
        )
        shape = (2, 3, count, self._narrow.shape[2])
        total, term = self._memory.take(f"sums {self._dtype.__name__}", shape, self._dtype)
        operations = _weighted_sum(groups, total, term)
        self.phases.append(_Phase(operations, total, outputs, self._column_total * window.total))


class _Memory:
    """Scratch buffers by name; asking again gives the same memory, in another shape."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """A buffer of the shape; asked for a larger one than before, it is new memory."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = np.zeros(size, dtype)
        return self._buffers[name][:size].reshape(shape)


def _column_sums(columns: _Axis, parts: np.ndarray, narrow: np.ndarray, term: np.ndarray) -> list[_Operation]:
    """Operations for the weighted sums over columns.

    Rows follow each other in the flat arrays, so a window past a row's end takes pixels of the neighbour row; these are
    taken off again afterwards, a tap at a time.

    Args:
        columns: the axis.
        parts: (step, rows, W) uint16, the columns ``step * x + k`` in ``parts[k]``.
        narrow: (rows, W) uint16 for the sums, not yet divided by the weights' total.
        term: scratch, like ``narrow``.
    """
    step, window = columns.step, columns.phases[0]
    flat, total, scratch = parts.reshape(step, -1), narrow.reshape(-1), term.reshape(-1)
    operations: list[_Operation] = []
    for weight, taps in _group(window, step):
        shift = taps[0] // step
        fed = slice(max(-shift, 0), len(total) - max(shift, 0))
        read = slice(max(shift, 0), len(total) + min(shift, 0))
        groups: tuple[tuple[int, list[np.ndarray]], ...] = ((weight, [flat[k % step, read] for k in taps]),)
        if operations:
            groups = ((1, [total[fed]]), *groups)
        operations += _weighted_sum(groups, total[fed], scratch[fed])[1 if operations else 0 :]
    for k, weight in enumerate(window.weights, window.first):
        shift, part = k // step, parts[k % step]
        for output in range(max(-shift, 0)):
            wrong = part[:-1, output + shift]
            operations += _taken_off(narrow[1:, output], wrong, weight, term[1:, 0])
        for output in range(narrow.shape[1] - max(shift, 0), narrow.shape[1]):
            wrong = part[1:, output + shift - narrow.shape[1]]
            operations += _taken_off(narrow[:-1, output], wrong, weight, term[1:, 0])
    return operations


def _taken_off(total: np.ndarray, wrong: np.ndarray, weight: int, term: np.ndarray) -> list[_Operation]:
    if weight == 1:
        return [(np.subtract, total, wrong, total)]
    return [(np.multiply, wrong, np.array(weight, np.uint16), term), (np.subtract, total, term, total)]


class PolyphaseResizer:
    """Resizes and scales images of one size, keeping its scratch buffers.

    The image is taken in strips of rows, so that what one pass leaves is still in the cache when the next reads it.

    Use :meth:`plan`, which answers None for the sizes that this method is not good at.
    """

    def __init__(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        rows, columns = _axis(source[0], target[0]), _axis(source[1], target[1])
        memory = _Memory()
        count = rows.length // len(rows.phases)
        wanted = max(1, round(source[0] * source[1] / _STRIP_PIXELS)) if len(rows.phases) <= _MOST_STRIP_PHASES else 1
        height = -(-count // wanted)
        shifts = [range(start, min(start + height, count)) for start in range(0, count, height)]
        shifts.sort(key=lambda item: len(item) * 2 - (item.start == 0) - (item.stop == count), reverse=True)
        self._strips = [_Strip(rows, columns, item, source, memory) for item in shifts]
        self._edges = [
            (output, np.float32(columns.phases[0].total / window.total)) for output, window in columns.edges.items()
        ]

    @classmethod
    def plan(cls, source: tuple[int, int], target: tuple[int, int]) -> PolyphaseResizer | None:
        """A resizer from ``source`` (height, width) to ``target``, or None where Pillow should do it.

        The source's width must be a small multiple of the target's, and the heights in a simple ratio.
        """
        phases = target[0] // math.gcd(source[0], target[0])
        good = (
            source[1] % target[1] == 0
            and source[1] <= _MOST_COLUMN_STEP * target[1]
            and source[0] <= _MOST_ROW_STEP * target[0]
            and phases <= _MOST_ROW_PHASES
            and min(*source, *target) >= _LEAST_SIZE
        )
        return cls(source, target) if good else None

    def __call__(self, image: np.ndarray, out: np.ndarray, scale: np.ndarray) -> None:
        """Resize, scale and take channels apart.

        Args:
            image: (h, w, 3) uint8.
            out: (3, H, W) float32, rows contiguous, filled with ``scale[c] * resized[..., c]``.
            scale: (3,) float32.
        """
        factors = scale[:, None, None]
        for strip in self._strips:
            strip.run(image, out, factors)
        for output, factor in self._edges:
            out[:, :, output] *= factor
