"""The twelve annotated classes: each a function that draws the proportions of one instance.

Colours are drawn anew for every picture from the palette of each part. Sizes are metres, z is up in the upright pose.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carpus.runtime.errors import DataError
from carpus.sim.distractors import DISTRACTOR_BUILDERS
from carpus.sim.object_model import HEAD_DOWN, ON_FRONT, ON_SIDE, UPRIGHT, Palette, Part, Pose, TabletopObject
from carpus.sim.shapes import Surface, arc, box, extrude, lathe, sphere, tube

__all__ = ["CLASSES", "DISTRACTORS", "build_object"]

_ANY_PAINT = Palette(saturation=(0.35, 1.0), value=(0.35, 1.0))
_CERAMIC = Palette(
    saturation=(0.0, 0.75), value=(0.55, 1.0), labels=("bands", "blobs"), label_share=0.35, shininess=0.8
)
_STEEL = Palette(hue=(190.0, 250.0), saturation=(0.0, 0.12), value=(0.45, 0.85), shininess=1.0)
_DARK = Palette(saturation=(0.0, 0.3), value=(0.05, 0.25), shininess=0.5)
_WOOD = Palette(hue=(18.0, 42.0), saturation=(0.35, 0.7), value=(0.4, 0.85), shininess=0.2)


def _turn(angle: float, axis: int) -> NDArray[np.float64]:
    """Rotation matrix by ``angle`` [rad] about a coordinate axis."""
    cos, sin = np.cos(angle), np.sin(angle)
    u, v = (axis + 1) % 3, (axis + 2) % 3
    matrix = np.eye(3)
    matrix[[u, v], [u, v]] = cos
    matrix[u, v], matrix[v, u] = -sin, sin
    return matrix


def _standing(upright: float = 1.0, lying: float = 0.0, inverted: float = 0.0, roll: bool = True) -> tuple[Pose, ...]:
    poses = (Pose(UPRIGHT, False, upright), Pose(ON_SIDE, roll, lying), Pose(HEAD_DOWN, False, inverted))
    return tuple(pose for pose in poses if pose.weight > 0)


def _can(rng: np.random.Generator) -> TabletopObject:
    radius, height = rng.uniform(0.031, 0.039), rng.uniform(0.095, 0.13)
    neck = radius * rng.uniform(0.78, 0.88)
    rim = height * 0.07
    label = Palette(saturation=(0.4, 1.0), value=(0.35, 1.0), labels=("bands", "blobs", "print"), label_share=0.8)
    sleeve = lathe([(radius, rim), (radius, height - rim)])
    base = lathe([(0, 0.003), (neck, 0.003), (neck, 0), (neck + 0.002, 0), (radius, rim)])
    lid = lathe([(radius, height - rim), (neck, height), (neck - 0.003, height), (neck - 0.003, height - 0.004)])
    top = lathe([(neck - 0.003, height - 0.004), (0, height - 0.004)])
    tab = box((0.004, 0.010, 0.0012)).moved((0.006, 0, height - 0.002))
    steel = Palette(hue=(190, 250), saturation=(0, 0.08), value=(0.6, 0.9), shininess=1.0)
    parts = (Part(sleeve, label), Part(base.joined(lid).joined(top), steel), Part(tab, _DARK))
    return TabletopObject("can", parts, _standing(0.7, 0.3))


def _handle(x: float, bottom: float, top: float, reach: float, thickness: float) -> Surface:
    """A mug's handle: half an ellipse in the xz plane from (x, bottom) to (x, top)."""
    angle = np.linspace(-np.pi / 2, np.pi / 2, 11)
    middle, half = (bottom + top) / 2, (top - bottom) / 2
    path = np.stack([x + reach * np.cos(angle), np.zeros_like(angle), middle + half * np.sin(angle)], 1)
    return tube(path, thickness, sides=10, flatten=1.3)


def _mug(rng: np.random.Generator) -> TabletopObject:
    radius, height, wall = rng.uniform(0.037, 0.046), rng.uniform(0.08, 0.105), 0.004
    waist = radius * rng.uniform(0.82, 1.0)
    profile = [(0, 0), (waist, 0), (radius, height), (radius - wall, height), (waist - wall, wall), (0, wall)]
    handle = _handle(radius * 0.93, 0.18 * height, 0.85 * height, rng.uniform(0.028, 0.04), rng.uniform(0.0055, 0.008))
    body = lathe(profile)
    # Lying, the handle points sideways or up, so that the body rests on the table.
    lying = tuple(Pose(ON_SIDE @ _turn(angle, 2), False, 0.1) for angle in (np.pi / 2, -np.pi / 2, np.pi))
    poses = (Pose(UPRIGHT, False, 0.7), *lying, Pose(HEAD_DOWN, False, 0.06))
    return TabletopObject("mug", (Part(body, _CERAMIC), Part(handle, _CERAMIC)), poses)


def _bowl(rng: np.random.Generator) -> TabletopObject:
    radius, height, foot = rng.uniform(0.062, 0.085), rng.uniform(0.045, 0.062), rng.uniform(0.026, 0.034)
    angle = np.linspace(0.0, 1.0, 7)
    outer = np.stack([foot + (radius - foot) * np.sin(angle * np.pi / 2), 0.006 + (height - 0.006) * angle**1.3], 1)
    inner = outer[::-1] * [0.94, 1.0] + [0.0, 0.003]
    profile = np.concatenate([[(0, 0), (foot, 0)], outer, inner, [(0, 0.010)]])
    return TabletopObject("bowl", (Part(lathe(profile, 32), _CERAMIC),), _standing(0.88, 0.0, 0.12))


def _plate(rng: np.random.Generator) -> TabletopObject:
    radius, height = rng.uniform(0.085, 0.115), rng.uniform(0.014, 0.022)
    flat = radius * rng.uniform(0.58, 0.72)
    inside = lathe([(radius * 0.99, height), (flat, 0.005), (0, 0.005)], 36)
    outside = lathe([(0, 0), (flat, 0), (radius, height - 0.002), (radius * 0.99, height)], 36)
    rim = lathe([(radius, height - 0.001), (radius * 0.93, height - 0.0015), (radius * 0.93, height - 0.004)], 36)
    china = Palette(saturation=(0.0, 0.55), value=(0.6, 1.0), labels=("bands",), label_share=0.5, shininess=0.9)
    return TabletopObject("plate", (Part(inside, china), Part(outside, china), Part(rim, _ANY_PAINT)), _standing())


def _bottle(rng: np.random.Generator) -> TabletopObject:
    radius, height = rng.uniform(0.031, 0.041), rng.uniform(0.18, 0.24)
    neck, shoulder = radius * rng.uniform(0.36, 0.46), height * rng.uniform(0.55, 0.66)
    cap = height - rng.uniform(0.016, 0.026)
    slope = np.linspace(0.0, 1.0, 6)
    curve = np.stack(
        [neck + (radius - neck) * np.cos(slope * np.pi / 2) ** 1.2, shoulder + (cap - 0.03 - shoulder) * slope], 1
    )
    glass = lathe(np.concatenate([[(0, 0), (radius * 0.9, 0), (radius, 0.008)], curve, [(neck, cap)]]))
    label = lathe([(radius * 1.012, shoulder * 0.25), (radius * 1.012, shoulder * 0.85)])
    top = lathe([(neck * 1.2, cap), (neck * 1.2, height), (0, height)])
    tint = Palette(saturation=(0.2, 0.9), value=(0.15, 0.8), shininess=1.0)
    paper = Palette(saturation=(0, 0.5), value=(0.6, 1), labels=("print", "bands", "blobs"), label_share=0.85)
    return TabletopObject("bottle", (Part(glass, tint), Part(label, paper), Part(top, _ANY_PAINT)), _standing(0.7, 0.3))


def _carton(rng: np.random.Generator) -> TabletopObject:
    half = np.array([rng.uniform(0.032, 0.055), rng.uniform(0.016, 0.034), rng.uniform(0.05, 0.085)])
    print_ = Palette(saturation=(0.15, 0.9), value=(0.5, 1.0), labels=("print", "print", "bands"), label_share=0.95)
    poses = (Pose(UPRIGHT, False, 0.4), Pose(ON_FRONT, False, 0.4), Pose(ON_SIDE, False, 0.2))
    return TabletopObject("box", (Part(box(half).moved((0, 0, half[2])), print_),), poses)


def _ball(rng: np.random.Generator) -> TabletopObject:
    radius = rng.uniform(0.032, 0.048)
    paint = Palette(saturation=(0.3, 1.0), value=(0.45, 1.0), labels=("bands", "blobs"), label_share=0.6, shininess=0.7)
    return TabletopObject("ball", (Part(sphere(radius).moved((0, 0, radius)), paint),), (Pose(ON_SIDE, True, 1.0),))


def _banana(rng: np.random.Generator) -> TabletopObject:
    bend, length = rng.uniform(0.09, 0.13), rng.uniform(0.17, 0.21)
    half = length / bend / 2
    thick = rng.uniform(0.017, 0.021)
    path = np.concatenate([arc((0, 0), bend, -half, half, 15), np.zeros((15, 1))], 1)
    taper = np.array([0.3, 0.62, 0.85, 0.95, *[1.0] * 7, 0.95, 0.82, 0.55, 0.25])
    peel = Palette(hue=(44, 62), saturation=(0.65, 1.0), value=(0.65, 1.0), shininess=0.3)
    tip = Palette(hue=(30, 80), saturation=(0.4, 0.8), value=(0.15, 0.4))
    stem = arc((0, 0), bend, half, half + rng.uniform(0.1, 0.2), 4)
    stem_tube = tube(np.concatenate([stem, np.zeros((4, 1))], 1), thick * 0.3, sides=8)
    offset = (-bend * 0.85, 0.0, 0.0)
    parts = (Part(tube(path, thick * taper, sides=10).moved(offset), peel), Part(stem_tube.moved(offset), tip))
    return TabletopObject("banana", parts, (Pose(UPRIGHT, False, 0.5), Pose(HEAD_DOWN, False, 0.5)))


def _rod(
    start: float, stop: float, radius: ArrayLike, count: int = 2, sides: int = 12, flatten: float = 1.0
) -> Surface:
    """A tube along x from ``start`` to ``stop`` [m]."""
    x = np.linspace(start, stop, count)
    return tube(np.stack([x, np.zeros(count), np.zeros(count)], 1), radius, sides, flatten)


def _hammer(rng: np.random.Generator) -> TabletopObject:
    length, grip = rng.uniform(0.2, 0.26), rng.uniform(0.011, 0.014)
    head, thick = rng.uniform(0.045, 0.058), rng.uniform(0.014, 0.019)
    handle = _rod(-length / 2, length / 2, grip * np.array([1, 1.1, 1, 0.85, 0.75, 0.75]), 6, flatten=0.8)
    face = _rod(-head, head * 0.5, thick * np.array([1.15, 1.15, 0.85, 0.8]), 4)
    claw = extrude(
        [
            (head * 0.4, -thick * 0.7),
            (head * 1.1, -thick * 0.12),
            (head * 1.1, thick * 0.12),
            (head * 0.4, thick * 0.7),
        ],
        thick,
        (head * 0.6, 0),
    )
    top = face.joined(claw.moved((0, 0, -thick / 2))).moved((length / 2, 0, 0), _turn(np.pi / 2, 2))
    colours = _WOOD if rng.random() < 0.5 else _ANY_PAINT
    poses = (Pose(UPRIGHT, False, 0.5), Pose(HEAD_DOWN, False, 0.5))
    return TabletopObject(
        "hammer",
        (
            Part(handle, colours),
            Part(top, Palette(hue=(190, 250), saturation=(0, 0.15), value=(0.15, 0.6), shininess=0.9)),
        ),
        poses,
    )


def _screwdriver(rng: np.random.Generator) -> TabletopObject:
    handle, shaft = rng.uniform(0.085, 0.105), rng.uniform(0.08, 0.12)
    grip = rng.uniform(0.014, 0.018)
    body = _rod(-handle, 0, grip * np.array([0.75, 1.0, 1.0, 0.95, 0.8, 0.95, 0.6]), 7, sides=8)
    collar = _rod(-handle - 0.004, -handle * 0.85, grip * 0.82, sides=8)
    blade = _rod(0, shaft, np.array([0.0042, 0.0042, 0.0042, 0.003]), 4, sides=8)
    tip = box((0.008, 0.006, 0.0015)).moved((shaft, 0, 0))
    paint = Palette(saturation=(0.7, 1.0), value=(0.5, 1.0), shininess=0.7)
    parts = (Part(body, paint), Part(collar, _DARK), Part(blade.joined(tip), _STEEL))
    return TabletopObject("screwdriver", parts, (Pose(UPRIGHT, False, 1.0),))


def _tape(rng: np.random.Generator) -> TabletopObject:
    outer, width = rng.uniform(0.044, 0.058), rng.uniform(0.018, 0.042)
    core = outer * rng.uniform(0.62, 0.76)
    roll = lathe([(core, 0), (outer, 0), (outer, width), (core, width)], 32)
    tube_ = lathe([(core, width), (core - 0.003, width), (core - 0.003, 0), (core, 0)], 32)
    card = Palette(hue=(25, 40), saturation=(0.2, 0.5), value=(0.5, 0.9))
    colours = Palette(saturation=(0.0, 1.0), value=(0.3, 1.0), shininess=0.8)
    return TabletopObject("tape", (Part(roll, colours), Part(tube_, card)), _standing(0.75, 0.25))


def _pan(rng: np.random.Generator) -> TabletopObject:
    radius, depth = rng.uniform(0.072, 0.092), rng.uniform(0.028, 0.04)
    base = radius * rng.uniform(0.78, 0.9)
    profile = [(0, 0), (base, 0), (radius, depth), (radius - 0.004, depth), (base - 0.004, 0.004), (0, 0.004)]
    grip = _rod(
        radius * 0.97, radius + rng.uniform(0.12, 0.15), np.array([0.008, 0.007, 0.011, 0.012, 0.009]), 5, flatten=0.7
    )
    metal = Palette(saturation=(0.0, 0.7), value=(0.08, 0.4), shininess=0.8)
    parts = (
        Part(lathe(profile, 32), metal),
        Part(grip.moved((0, 0, depth * 0.75)), _DARK if rng.random() < 0.6 else _WOOD),
    )
    return TabletopObject("pan", parts, _standing(1.0))


_Builder = Callable[[np.random.Generator], TabletopObject]
_BUILDERS: dict[str, _Builder] = {
    "can": _can,
    "mug": _mug,
    "bowl": _bowl,
    "plate": _plate,
    "bottle": _bottle,
    "box": _carton,
    "ball": _ball,
    "banana": _banana,
    "hammer": _hammer,
    "screwdriver": _screwdriver,
    "tape": _tape,
    "pan": _pan,
}
#: Names of the annotated classes; the position in this tuple is the contiguous class id.
CLASSES: tuple[str, ...] = tuple(_BUILDERS)
#: Shapes that lie about, occlude and are never annotated.
DISTRACTORS: tuple[str, ...] = tuple(DISTRACTOR_BUILDERS)


def build_object(category: str, rng: np.random.Generator) -> TabletopObject:
    """Draw one instance of a class of :data:`CLASSES` or :data:`DISTRACTORS`.

    Raises:
        DataError: the class is unknown.
    """
    builders = _BUILDERS | DISTRACTOR_BUILDERS
    if category not in builders:
        raise DataError(f"unknown object class '{category}'; expected one of {', '.join(builders)}")
    return builders[category](rng)
