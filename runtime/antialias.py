"""Antialiased bilinear resize, equal to Pillow's within one grey level and several times faster for camera sizes.

Pillow's BILINEAR weighs source pixel ``k`` for the output pixel with centre ``c = (o + 1/2) p / q`` (``p / q`` the
reduced ratio of the sizes) by ``max(0, 1 - |k + 1/2 - c| / s)``, ``s = max(p / q, 1)``, and divides by the sum over
the pixels that exist. Times ``2 q s`` these weights are whole numbers that repeat every ``q`` outputs, so the sums
are taken over whole planes, one (phase, tap) at a time, in 16-bit integers that numpy adds a vector at a time.
Outputs whose window leaves the image are redone one by one.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import cv2
import numpy as np

__all__ = ["PolyphaseResizer", "pillow_resize"]

_MOST_COLUMN_STEP = 4  # above, taking columns apart costs as much as Pillow's whole resize
_MOST_ROW_PHASES = 48  # above, and below the least size, the number of numpy calls outweighs their work
_MOST_ROW_STEP = 8
_LEAST_SIZE = 160


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


def _add_group(
    weight: int, sources: list[np.ndarray], total: np.ndarray, term: np.ndarray, *, first: bool = False
) -> None:
    """``total += weight * sum(sources)``, or ``=`` for the first group; ``term`` is scratch."""
    if weight == 1 and len(sources) == 1 and not first:
        np.add(total, sources[0], out=total)
        return
    into = total if first else term
    if len(sources) == 1:
        np.multiply(sources[0], weight, out=into, dtype=into.dtype)
    else:
        np.add(sources[0], sources[1], out=into, dtype=into.dtype)
        for source in sources[2:]:
            np.add(into, source, out=into)
        if weight != 1:
            np.multiply(into, weight, out=into, dtype=into.dtype)
    if not first:
        np.add(total, term, out=total)


class PolyphaseResizer:
    """Resizes and scales images of one size, keeping its scratch buffers.

    Use :meth:`plan`, which answers None for the sizes that this method is not good at.
    """

    def __init__(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        self._rows, self._columns = _axis(source[0], target[0]), _axis(source[1], target[1])
        height, width = source
        step = self._columns.step
        self._column_total = self._columns.phases[0].total
        self._column_groups = _group(self._columns.phases[0], step)
        # Rows are reached by stride, never by a shifted part, so only equal weights matter: a step beyond any tap.
        self._row_groups = [_group(window, 1 << 30) for window in self._rows.phases]
        self._shifts = [self._rows.inner(phase) for phase in range(len(self._rows.phases))]
        row_total = max(window.total for window in self._rows.phases)
        dtype = np.uint16 if 255 * self._column_total * row_total < 1 << 16 else np.float32
        self._planes = np.empty((3, height, width), np.uint8)
        self._parts = np.empty((step, 3 * height * width // step), np.uint8)
        self._narrow = np.empty(3 * height * target[1], np.uint16)
        self._term = np.empty_like(self._narrow)
        self._sum = np.empty((3, max(map(len, self._shifts)), target[1]), dtype)
        self._row_term = np.empty_like(self._sum)

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
        cv2.split(image, list(self._planes))
        narrow = self._sum_columns()
        count = len(self._rows.phases)
        for phase, (window, shifts) in enumerate(zip(self._rows.phases, self._shifts, strict=True)):
            if shifts:
                total = self._sum_rows(narrow, phase, shifts)
                target = out[:, shifts.start * count + phase :: count][:, : len(shifts)]
                factors = scale / np.float32(self._column_total * window.total)
                for channel in range(3):
                    np.multiply(total[channel], factors[channel], out=target[channel], dtype=np.float32)
        for output, window in self._rows.edges.items():
            weights = np.array(window.weights, np.float32) / np.float32(window.total * self._column_total)
            rows = narrow[:, window.first : window.first + len(weights)]
            out[:, output] = np.einsum("k,ckw->cw", weights, rows) * scale[:, None]
        for output, window in self._columns.edges.items():
            out[:, :, output] *= np.float32(self._column_total / window.total)

    def _sum_columns(self) -> np.ndarray:
        """Weighted sums over columns, (3, h, W); not yet divided by the weights' total."""
        step = self._columns.step
        if step == 1:
            return self._planes
        height = self._planes.shape[1]
        cv2.split(self._planes.reshape(3 * height, -1, step), [part.reshape(3 * height, -1) for part in self._parts])
        total, term = self._narrow, self._term
        # Rows follow each other in these flat arrays, so a shift past a row's end takes the neighbour row's pixel; only
        # the outputs at the edges see it, and those are redone below.
        for number, (weight, taps) in enumerate(self._column_groups):
            shift = taps[0] // step
            fed = slice(max(-shift, 0), len(total) - max(shift, 0))
            read = slice(max(shift, 0), len(total) + min(shift, 0))
            sources = [self._parts[k % step][read] for k in taps]
            _add_group(weight, sources, total[fed], term[fed], first=number == 0)
        narrow = total.reshape(3, height, -1)
        for output, (first, weights) in self._columns.edges.items():
            column = np.zeros(narrow.shape[:2], np.uint16)
            for k, weight in enumerate(weights, first):
                column += np.multiply(self._planes[:, :, k], weight, dtype=np.uint16)  # numpy 1 would stay in 8 bits
            narrow[:, :, output] = column
        return narrow

    def _sum_rows(self, narrow: np.ndarray, phase: int, shifts: range) -> np.ndarray:
        """Weighted sums over rows for one phase, (3, len(shifts), W); not yet divided by the weights' total."""
        step, groups = self._rows.step, self._row_groups[phase]
        total, term = self._sum[:, : len(shifts)], self._row_term[:, : len(shifts)]
        for number, (weight, taps) in enumerate(groups):
            sources = [narrow[:, shifts.start * step + k :: step][:, : len(shifts)] for k in taps]
            if weight == 1 and len(groups) == len(taps) == 1:
                return sources[0]
            _add_group(weight, sources, total, term, first=number == 0)
        return total
