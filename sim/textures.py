"""Procedural textures.

A texture is drawn from a family (a function of a generator) and never read from a file. The families a model may train
on and those kept for held-out scenes are disjoint tables, so that "unseen textures" holds by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from carpus.runtime.errors import DataError

__all__ = ["HELDOUT_FAMILIES", "LABEL_FAMILIES", "SITE_FAMILIES", "TRAIN_FAMILIES", "colour", "draw_texture"]

Texture = NDArray[np.uint8]
_Field = NDArray[np.float32]


def colour(
    rng: np.random.Generator,
    hue: tuple[float, float] = (0.0, 360.0),
    saturation: tuple[float, float] = (0.0, 1.0),
    value: tuple[float, float] = (0.2, 1.0),
) -> NDArray[np.float32]:
    """Draw a colour ``(3,) float32`` RGB 0..1, uniform in the given HSV ranges (hue in degrees, may exceed 360)."""
    h = rng.uniform(*hue) % 360.0
    s, v = rng.uniform(*saturation), rng.uniform(*value)
    k = (np.array([5.0, 3.0, 1.0]) + h / 60.0) % 6.0
    return (v - v * s * np.clip(np.minimum(k, 4.0 - k), 0.0, 1.0)).astype(np.float32)


def _noise(rng: np.random.Generator, size: int, cells: int, stretch: int = 1) -> _Field:
    """Smooth noise 0..1: random values on a coarse lattice, enlarged; ``stretch`` lengthens it along x."""
    lattice = rng.random((max(2, cells), max(2, cells // stretch)), dtype=np.float32)
    return np.clip(cv2.resize(lattice, (size, size), interpolation=cv2.INTER_CUBIC), 0.0, 1.0)


def _fractal(rng: np.random.Generator, size: int, cells: int, octaves: int = 4) -> _Field:
    field = np.zeros((size, size), np.float32)
    weight, total = 1.0, 0.0
    for _ in range(octaves):
        field += weight * _noise(rng, size, min(cells, size))
        total += weight
        weight *= 0.55
        cells *= 2
    return field / total


def _coordinates(size: int) -> tuple[_Field, _Field]:
    axis = np.arange(size, dtype=np.float32) / size
    return np.meshgrid(axis, axis)


def _blend(field: NDArray[Any], low: NDArray[Any], high: NDArray[Any]) -> _Field:
    weight = np.clip(field, 0.0, 1.0).astype(np.float32)[..., None]
    return low + (high - low) * weight


def _pair(rng: np.random.Generator, contrast: tuple[float, float] = (0.1, 0.5)) -> tuple[NDArray[Any], NDArray[Any]]:
    """A base colour and a darker or shifted companion."""
    base = colour(rng, saturation=(0.0, 0.6), value=(0.35, 1.0))
    other = colour(rng, saturation=(0.0, 0.6), value=(0.15, 0.9))
    mix = rng.uniform(*contrast)
    return base, base * (1 - mix) + other * mix


def _wood(rng: np.random.Generator, size: int) -> _Field:
    x, y = _coordinates(size)
    planks = int(rng.integers(2, 7))
    board = np.floor(y * planks)
    offset = rng.random(planks + 1, dtype=np.float32)[board.astype(int)]
    grain = _noise(rng, size, size // 3, stretch=24)
    rings = 0.5 + 0.5 * np.sin(
        2 * np.pi * (rng.uniform(2, 6) * (y + 0.12 * _noise(rng, size, 6)) + offset * 5 + x * 0.5)
    )
    low = colour(rng, (15, 42), (0.3, 0.7), (0.2, 0.6))
    high = colour(rng, (22, 45), (0.2, 0.6), (0.5, 0.95))
    field = _blend(0.45 * grain + 0.35 * rings + 0.35 * offset - 0.1, low, high)
    gap = np.abs(y * planks - np.round(y * planks)) < 0.018 * rng.uniform(0.3, 1.5)
    field[gap] *= 0.55
    return field


def _checker(rng: np.random.Generator, size: int) -> _Field:
    x, y = _coordinates(size)
    count = int(rng.integers(2, 8))
    cells = (np.floor(x * 2 * count) + np.floor(y * 2 * count)) % 2
    return _blend(cells, *_pair(rng, (0.15, 0.7))) * (0.9 + 0.1 * _noise(rng, size, 24)[..., None])


def _clouds(rng: np.random.Generator, size: int) -> _Field:
    return _blend(1.6 * _fractal(rng, size, int(rng.integers(3, 14))) - 0.3, *_pair(rng, (0.2, 0.8)))


def _stripes(rng: np.random.Generator, size: int) -> _Field:
    x, y = _coordinates(size)
    a, b = int(rng.integers(0, 9)), int(rng.integers(0, 9))
    wave = 0.5 + 0.5 * np.sin(2 * np.pi * (a * x + b * y + (4 if a + b == 0 else 0) * x))
    sharp = rng.uniform(1.0, 6.0)
    return _blend((wave - 0.5) * sharp + 0.5, *_pair(rng, (0.1, 0.6)))


def _granite(rng: np.random.Generator, size: int) -> _Field:
    base, other = _pair(rng, (0.2, 0.5))
    field = _blend(_fractal(rng, size, 10), base, other)
    for share in (0.04, 0.03):
        speck = cv2.resize(rng.random((size // 2, size // 2), dtype=np.float32), (size, size)) < share * 3
        field[speck] = colour(rng, saturation=(0.0, 0.3), value=(0.05, 1.0))
    return field


def _plain(rng: np.random.Generator, size: int) -> _Field:
    base = colour(rng, saturation=(0.0, 0.8), value=(0.25, 1.0))
    return base * (0.94 + 0.06 * _noise(rng, size, int(rng.integers(2, 40)))[..., None])


def _planed(rng: np.random.Generator, size: int) -> _Field:
    """Veneer: fine grain without boards."""
    grain = 0.6 * _noise(rng, size, size // 2, stretch=32) + 0.4 * _noise(rng, size, 12, stretch=4)
    return _blend(grain, colour(rng, (10, 50), (0.15, 0.6), (0.15, 0.6)), colour(rng, (15, 50), (0.1, 0.5), (0.4, 1.0)))


def _patches(rng: np.random.Generator, size: int) -> _Field:
    """Rectangles of several colours, as of papers and mats on a desk."""
    field = np.empty((size, size, 3), np.float32)
    field[:] = colour(rng, saturation=(0.0, 0.5), value=(0.3, 1.0))
    for _ in range(int(rng.integers(2, 7))):
        x, y = rng.integers(0, size, 2)
        w, h = rng.integers(size // 8, size // 2, 2)
        field[y : y + h, x : x + w] = colour(rng, saturation=(0.0, 0.6), value=(0.2, 1.0))
    return field * (0.93 + 0.07 * _noise(rng, size, 30)[..., None])


def _cloth(rng: np.random.Generator, size: int) -> _Field:
    x, y = _coordinates(size)
    threads = int(rng.integers(24, 48))
    weave = 0.5 + 0.25 * np.sin(2 * np.pi * threads * x) + 0.25 * np.sin(2 * np.pi * threads * y)
    return _blend(0.7 * weave + 0.3 * _fractal(rng, size, 5), *_pair(rng, (0.2, 0.5)))


def _marble(rng: np.random.Generator, size: int) -> _Field:
    x, y = _coordinates(size)
    bend = _fractal(rng, size, 4, 5)
    vein = np.abs(np.sin(np.pi * (rng.uniform(1, 4) * x + rng.uniform(1, 4) * y + 5.0 * bend)))
    light = colour(rng, saturation=(0.0, 0.15), value=(0.7, 1.0))
    return _blend(vein**0.35, colour(rng, saturation=(0.0, 0.4), value=(0.15, 0.6)), light)


def _tiles(rng: np.random.Generator, size: int) -> _Field:
    x, y = _coordinates(size)
    count = int(rng.integers(3, 8))
    row = np.floor(y * count)
    shifted = x * count + 0.5 * (row % 2)
    edge = np.minimum(np.abs(shifted - np.round(shifted)), np.abs(y * count - np.round(y * count)))
    shade = rng.random((count + 2, count + 2), dtype=np.float32)[row.astype(int), np.floor(shifted).astype(int)]
    field = _blend(shade, *_pair(rng, (0.1, 0.35)))
    field[edge < rng.uniform(0.02, 0.05)] = colour(rng, saturation=(0.0, 0.2), value=(0.2, 0.9))
    return field


def _dots(rng: np.random.Generator, size: int) -> _Field:
    x, y = _coordinates(size)
    count = int(rng.integers(4, 12))
    radius = np.hypot((x * count) % 1 - 0.5, (y * count) % 1 - 0.5)
    return _blend((rng.uniform(0.2, 0.35) - radius) * 20, *_pair(rng, (0.2, 0.6)))


def _brushed(rng: np.random.Generator, size: int) -> _Field:
    streak = _noise(rng, size, size, stretch=64)
    base = colour(rng, (180, 260), (0.0, 0.12), (0.45, 0.85))
    return base * (0.8 + 0.25 * streak[..., None])


def _plaid(rng: np.random.Generator, size: int) -> _Field:
    x, y = _coordinates(size)
    count = int(rng.integers(2, 6))
    bands = 0.5 * (np.sin(2 * np.pi * count * x) > 0.2) + 0.5 * (np.sin(2 * np.pi * count * y) > 0.2)
    return _blend(bands, *_pair(rng, (0.25, 0.7)))


def _cutting_mat(rng: np.random.Generator, size: int) -> _Field:
    """Dark green mat with pale rulings."""
    x, y = _coordinates(size)
    field = np.array([0.10, 0.32, 0.22], np.float32) * (0.85 + 0.15 * _noise(rng, size, 40)[..., None])
    for count, width, strength in ((16, 0.06, 0.35), (4, 0.03, 0.8)):
        edge = np.minimum(np.abs(x * count - np.round(x * count)), np.abs(y * count - np.round(y * count)))
        field[edge < width] = field[edge < width] * (1 - strength) + np.array([0.75, 0.8, 0.55], np.float32) * strength
    return field


def _hazard(rng: np.random.Generator, size: int) -> _Field:
    x, y = _coordinates(size)
    bands = np.sin(2 * np.pi * 3 * (x + y)) > 0
    field = _blend(bands, np.array([0.12, 0.12, 0.12], np.float32), np.array([0.75, 0.6, 0.1], np.float32))
    return field * (0.75 + 0.25 * _fractal(rng, size, 8)[..., None])


def _label_bands(rng: np.random.Generator, size: int) -> _Field:
    """White with bands along v: around a can or a bottle."""
    _, y = _coordinates(size)
    field = np.ones((size, size, 3), np.float32)
    for _ in range(int(rng.integers(1, 4))):
        centre, half = rng.uniform(0.1, 0.9), rng.uniform(0.02, 0.14)
        field[np.abs(y - centre) < half] = colour(rng, saturation=(0.2, 1.0), value=(0.1, 1.0))
    return field


def _label_print(rng: np.random.Generator, size: int) -> _Field:
    """White with a picture block and lines of text, as on a carton."""
    field = np.ones((size, size, 3), np.float32)
    left, top = rng.uniform(0.05, 0.35, 2)
    wide, high = rng.uniform(0.3, 0.6, 2)
    rows, columns = slice(int(top * size), int((top + high) * size)), slice(int(left * size), int((left + wide) * size))
    field[rows, columns] = colour(rng, saturation=(0.3, 1.0), value=(0.3, 1.0))
    ink = colour(rng, saturation=(0.0, 0.8), value=(0.0, 0.4))
    start = top + high + 0.04
    while start < 0.94:
        length = rng.uniform(0.3, 0.8)
        field[int(start * size) : int((start + 0.035) * size), int(0.1 * size) : int((0.1 + length) * size)] = ink
        start += 0.08
    return field


def _label_blobs(rng: np.random.Generator, size: int) -> _Field:
    field = _noise(rng, size, int(rng.integers(4, 9)))
    return _blend((field - 0.5) * 30, np.ones(3, np.float32), colour(rng, saturation=(0.2, 1.0), value=(0.1, 0.9)))


_Family = Callable[[np.random.Generator, int], _Field]

#: Families for tables, floors and walls of training scenes.
TRAIN_FAMILIES: dict[str, _Family] = {
    "wood": _wood,
    "veneer": _planed,
    "checker": _checker,
    "clouds": _clouds,
    "stripes": _stripes,
    "granite": _granite,
    "plain": _plain,
    "patches": _patches,
}
#: Families for tables, floors and walls of held-out scenes; none of them appears in training.
HELDOUT_FAMILIES: dict[str, _Family] = {
    "cloth": _cloth,
    "marble": _marble,
    "tiles": _tiles,
    "dots": _dots,
    "brushed": _brushed,
    "plaid": _plaid,
}
#: Families of the one fixed customer site; none of them appears elsewhere.
SITE_FAMILIES: dict[str, _Family] = {"cutting_mat": _cutting_mat, "hazard": _hazard}
#: Prints on cans, cartons, bottles, mugs and balls.
LABEL_FAMILIES: dict[str, _Family] = {"bands": _label_bands, "print": _label_print, "blobs": _label_blobs}

_ALL = {**TRAIN_FAMILIES, **HELDOUT_FAMILIES, **SITE_FAMILIES, **LABEL_FAMILIES}


def draw_texture(family: str, rng: np.random.Generator, size: int = 256) -> Texture:
    """Draw a texture of a family.

    Args:
        family: a name in one of the family tables.
        rng: generator that decides everything about the texture.
        size: edge length [px].

    Returns:
        ``(size, size, 3) uint8`` RGB.

    Raises:
        DataError: the family is unknown.
    """
    if family not in _ALL:
        raise DataError(f"unknown texture family '{family}'; expected one of {', '.join(sorted(_ALL))}")
    field = _ALL[family](rng, size)
    return np.ascontiguousarray(np.clip(field * 255.0 + 0.5, 0.0, 255.0).astype(np.uint8))
