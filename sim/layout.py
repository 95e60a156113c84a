"""Where objects stand: arrangements on the table without overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LAYOUTS", "Footprint", "Placement", "arrange", "footprint_corners", "rectangles_overlap"]

_Region = Callable[[], NDArray[np.float64]]


@dataclass(frozen=True)
class Footprint:
    """Rectangle under an object before its yaw: centre ``(2,)`` relative to the body and half sides ``(2,)`` [m]."""

    centre: NDArray[np.float64]
    half: NDArray[np.float64]


@dataclass(frozen=True)
class Placement:
    """Place of a body on the table: ``x``, ``y`` [m] and ``yaw`` [rad]."""

    x: float
    y: float
    yaw: float


def footprint_corners(footprint: Footprint, place: Placement) -> NDArray[np.float64]:
    """Corners ``(4, 2)`` of a footprint at its place, in order [m]."""
    signs = np.array([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
    cos, sin = np.cos(place.yaw), np.sin(place.yaw)
    rotation = np.array([[cos, -sin], [sin, cos]])
    return (footprint.centre + signs * footprint.half) @ rotation.T + [place.x, place.y]


def rectangles_overlap(a: NDArray[Any], b: NDArray[Any], gap: float = 0.0) -> bool:
    """Whether two rectangles, ``(4, 2)`` corners in order [m], come closer than ``gap`` (separating-axis test)."""
    for corners in (a, b):
        for k in (0, 1):
            axis = corners[k + 1] - corners[k]
            axis = axis / max(float(np.linalg.norm(axis)), 1e-12)
            pa, pb = a @ axis, b @ axis
            if pa.min() > pb.max() + gap or pb.min() > pa.max() + gap:
                return False
    return True


def _scatter(rng: np.random.Generator, region: _Region, spread: float) -> Iterator[tuple[NDArray[Any], float]]:
    """Uniform over the picture."""
    while True:
        yield region(), rng.uniform(-np.pi, np.pi)


def _cluster(rng: np.random.Generator, region: _Region, spread: float) -> Iterator[tuple[NDArray[Any], float]]:
    """One or two crowds."""
    middles = [region() for _ in range(int(rng.integers(1, 3)))]
    while True:
        middle = middles[int(rng.integers(len(middles)))]
        yield middle + rng.normal(0.0, 0.6 * spread, 2), rng.uniform(-np.pi, np.pi)


def _row(rng: np.random.Generator, region: _Region, spread: float) -> Iterator[tuple[NDArray[Any], float]]:
    """One or two parallel lines with a common heading."""
    middle, heading = region(), rng.uniform(-np.pi, np.pi)
    along = np.array([np.cos(heading), np.sin(heading)])
    across = np.array([-along[1], along[0]])
    while True:
        lane = float(rng.integers(0, 2)) * spread
        yield middle + along * rng.uniform(-3.0, 3.0) * spread + across * lane, heading + rng.normal(0.0, 0.25)


def _ring(rng: np.random.Generator, region: _Region, spread: float) -> Iterator[tuple[NDArray[Any], float]]:
    """A circle, everything facing its centre."""
    middle, radius = region(), rng.uniform(1.2, 2.2) * spread
    while True:
        angle = rng.uniform(-np.pi, np.pi)
        yield middle + radius * np.array([np.cos(angle), np.sin(angle)]), angle + rng.normal(0.0, 0.2)


def _pairs(rng: np.random.Generator, region: _Region, spread: float) -> Iterator[tuple[NDArray[Any], float]]:
    """Neighbours that nearly touch, the pairs far apart."""
    middle = region()
    while True:
        if rng.random() < 0.5:
            middle = region()
        angle = rng.uniform(-np.pi, np.pi)
        yield middle + 0.7 * spread * np.array([np.cos(angle), np.sin(angle)]), rng.uniform(-np.pi, np.pi)


#: Arrangements by name; each yields candidates of place ``(2,)`` [m] and yaw [rad] without end.
LAYOUTS = {"scatter": _scatter, "cluster": _cluster, "row": _row, "ring": _ring, "pairs": _pairs}


def arrange(
    rng: np.random.Generator,
    layout: str,
    footprints: Sequence[Footprint],
    region: _Region,
    accept: Callable[[float, float], bool],
    *,
    gap: float = 0.008,
    spread: float = 0.15,
    tries: int = 40,
) -> list[Placement | None]:
    """Place objects one by one where they neither overlap nor leave the accepted part of the table.

    Args:
        rng: generator that decides everything.
        layout: a name in :data:`LAYOUTS`.
        footprints: one per object, in order of placement.
        region: draws a place ``(2,)`` [m] somewhere in view.
        accept: whether a body may stand at x, y [m].
        gap: least distance between footprints [m].
        spread: scale of the arrangement [m].
        tries: candidates per object; the second half is scattered, so that a full row does not lose its objects.

    Returns:
        one placement per footprint, ``None`` where no candidate was free.
    """
    arranged, scattered = LAYOUTS[layout](rng, region, spread), _scatter(rng, region, spread)
    taken: list[tuple[NDArray[np.float64], NDArray[np.float64], float]] = []  # corners, middle, radius
    places: list[Placement | None] = []
    for footprint in footprints:
        places.append(None)
        for attempt in range(tries):
            middle, yaw = next(arranged if 2 * attempt < tries else scattered)
            place = Placement(float(middle[0]), float(middle[1]), float(yaw))
            if not accept(place.x, place.y):
                continue
            corners = footprint_corners(footprint, place)
            centre, radius = corners.mean(0), float(np.hypot(*footprint.half))
            near = [
                other for other, at, reach in taken if np.hypot(*(at - centre)) <= radius + reach + gap
            ]  # Circles first: most candidates are far from most objects.
            if not any(rectangles_overlap(corners, other, gap) for other in near):
                taken.append((corners, centre, radius))
                places[-1] = place
                break
    return places
