"""What a tabletop object is made of: coloured parts and the ways it rests on the table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carpus.sim.shapes import Surface

__all__ = ["HEAD_DOWN", "ON_FRONT", "ON_SIDE", "UPRIGHT", "Palette", "Part", "Pose", "TabletopObject"]

UPRIGHT = np.eye(3)
ON_SIDE = np.array([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])  # object z to world x
ON_FRONT = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 1.0, 0.0]])  # object y to world z
HEAD_DOWN = np.diag([1.0, -1.0, -1.0])


@dataclass(frozen=True)
class Palette:
    """HSV ranges a part's colour is drawn from (hue in degrees), and what may be printed on it.

    Attributes:
        hue, saturation, value: uniform ranges.
        labels: texture families (:data:`carpus.sim.textures.LABEL_FAMILIES`) the part may carry.
        label_share: probability that the part carries one of them.
        shininess: upper bound of the specular strength, 0..1.
    """

    hue: tuple[float, float] = (0.0, 360.0)
    saturation: tuple[float, float] = (0.0, 1.0)
    value: tuple[float, float] = (0.3, 1.0)
    labels: tuple[str, ...] = ()
    label_share: float = 0.0
    shininess: float = 0.4


@dataclass(frozen=True)
class Part:
    """One surface of an object and the palette of its colour."""

    surface: Surface
    palette: Palette


@dataclass(frozen=True)
class Pose:
    """A way an object rests on the table.

    Attributes:
        rotation: ``(3, 3)`` upright object frame to resting frame, before the yaw about z.
        roll: whether any turn about the object's own z axis comes before it.
        weight: relative frequency.
    """

    rotation: NDArray[np.float64]
    roll: bool
    weight: float


@dataclass(frozen=True)
class TabletopObject:
    """One instance: its class name, parts, and resting poses."""

    category: str
    parts: tuple[Part, ...]
    poses: tuple[Pose, ...]

    @property
    def vertices(self) -> NDArray[np.float64]:
        """All vertices ``(V, 3)`` [m] in the object frame."""
        return np.concatenate([part.surface.vertices for part in self.parts])
