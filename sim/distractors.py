"""Shapes that lie about, occlude and are never annotated."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from carpus.sim.object_model import ON_FRONT, UPRIGHT, Palette, Part, Pose, TabletopObject
from carpus.sim.shapes import Surface, extrude, lathe

__all__ = ["DISTRACTOR_BUILDERS"]


def _lone(name: str, surface: Surface, lying: bool) -> TabletopObject:
    poses = (Pose(UPRIGHT, False, 1.0), Pose(ON_FRONT, False, 0.5)) if lying else (Pose(UPRIGHT, False, 1.0),)
    palette = Palette(labels=("blobs", "bands"), label_share=0.3)
    return TabletopObject(name, (Part(surface, palette),), poses)


def _cone(rng: np.random.Generator) -> TabletopObject:
    radius, height = rng.uniform(0.02, 0.04), rng.uniform(0.05, 0.1)
    return _lone("cone", lathe([(0, 0), (radius, 0), (radius * 0.05, height), (0, height)], 20), False)


def _wedge(rng: np.random.Generator) -> TabletopObject:
    a, b = rng.uniform(0.04, 0.09), rng.uniform(0.03, 0.06)
    return _lone(
        "wedge", extrude([(-a / 3, -b / 3), (2 * a / 3, -b / 3), (-a / 3, 2 * b / 3)], rng.uniform(0.02, 0.06)), True
    )


def _star(rng: np.random.Generator) -> TabletopObject:
    points = int(rng.integers(5, 9))
    angle = np.arange(2 * points) * np.pi / points
    radius = np.where(np.arange(2 * points) % 2, rng.uniform(0.012, 0.022), rng.uniform(0.03, 0.045))
    outline = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    return _lone("star", extrude(outline, rng.uniform(0.008, 0.03)), False)


def _cross(rng: np.random.Generator) -> TabletopObject:
    a, b = rng.uniform(0.008, 0.016), rng.uniform(0.03, 0.05)
    outline = [
        (b, -a),
        (b, a),
        (a, a),
        (a, b),
        (-a, b),
        (-a, a),
        (-b, a),
        (-b, -a),
        (-a, -a),
        (-a, -b),
        (a, -b),
        (a, -a),
    ]
    return _lone("cross", extrude(outline, rng.uniform(0.01, 0.03)), True)


def _bracket(rng: np.random.Generator) -> TabletopObject:
    length, thick = rng.uniform(0.05, 0.08), rng.uniform(0.008, 0.016)
    outline = np.array([(0, 0), (length, 0), (length, thick), (thick, thick), (thick, length), (0, length)])
    middle = thick * 0.6
    return _lone("bracket", extrude(outline - middle, rng.uniform(0.02, 0.04), (thick / 2 - middle,) * 2), True)


#: Functions that draw one instance, by name.
DISTRACTOR_BUILDERS: dict[str, Callable[[np.random.Generator], TabletopObject]] = {
    "cone": _cone,
    "wedge": _wedge,
    "star": _star,
    "cross": _cross,
    "bracket": _bracket,
}
