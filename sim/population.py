"""Which objects stand on the table, in which colours, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carpus.sim.boxes import camera_matrix, camera_pose
from carpus.sim.domains import Domain
from carpus.sim.layout import Footprint, Placement, arrange, footprint_corners, rectangles_overlap
from carpus.sim.object_model import Pose
from carpus.sim.objects import CLASSES
from carpus.sim.scene import TABLE_HEIGHT, TABLE_X, TABLE_Y, Scene
from carpus.sim.textures import LABEL_FAMILIES, colour

__all__ = ["Population", "Standing", "TableView"]

_EDGE = 0.05  # Objects keep this far from the table's edge [m].
_VIEW_MARGIN = 0.04  # ... and their feet this share of the picture from its border.
_BOX_MARGIN = 0.01  # Arms keep this far from objects [m].


def _rotation_z(angle: float) -> NDArray[np.float64]:
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])


@dataclass(frozen=True)
class Standing:
    """An object on the table.

    Attributes:
        index: position in ``scene.objects``.
        rotation: ``(3, 3)`` resting pose before the yaw.
        footprint: rectangle under it before the yaw.
        bottom: height of its lowest point in the resting pose [m].
        place: where it stands.
    """

    index: int
    rotation: NDArray[np.float64]
    footprint: Footprint
    bottom: float
    place: Placement

    @property
    def world_rotation(self) -> NDArray[np.float64]:
        """``(3, 3)`` body to world frame."""
        return _rotation_z(self.place.yaw) @ self.rotation

    @property
    def position(self) -> NDArray[np.float64]:
        """``(3,)`` place of the body's origin in the world frame [m]."""
        return np.array([self.place.x, self.place.y, TABLE_HEIGHT - self.bottom])


class TableView:
    """The part of the table that the ego camera sees at this moment.

    Args:
        scene: a scene whose kinematics are up to date.
    """

    def __init__(self, scene: Scene) -> None:
        self._pose = camera_pose(scene)
        self._matrix = camera_matrix(float(scene.model.cam_fovy[scene.camera]), scene.size)
        self._inverse = self._pose[:3, :3] @ np.linalg.inv(self._matrix)
        self._height, self._width = scene.size

    def accepts(self, x: float, y: float) -> bool:
        """Whether an object may stand at ``x``, ``y`` [m]: on the table, clear of its edge, and in view."""
        if not (TABLE_X[0] + _EDGE < x < TABLE_X[1] - _EDGE and TABLE_Y[0] + _EDGE < y < TABLE_Y[1] - _EDGE):
            return False
        local = self._pose[:3, :3].T @ (np.array([x, y, TABLE_HEIGHT]) - self._pose[:3, 3])
        if local[2] <= 0.05:
            return False
        u, v, w = self._matrix @ local
        u, v = u / w / self._width, v / w / self._height
        return bool(_VIEW_MARGIN < u < 1 - _VIEW_MARGIN and _VIEW_MARGIN < v < 1 - _VIEW_MARGIN)

    def draw(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw an accepted point ``(2,)`` [m], uniform over the picture; the table's middle when none is found."""
        for _ in range(50):
            pixel = np.array([rng.uniform(0, self._width), rng.uniform(0, self._height), 1.0])
            ray = self._inverse @ pixel
            if ray[2] < -1e-6:
                point = self._pose[:3, 3] + ray * (TABLE_HEIGHT - self._pose[2, 3]) / ray[2]
                if self.accepts(point[0], point[1]):
                    return point[:2]
        return np.array([sum(TABLE_X) / 2, 0.0])


class Population:
    """The objects of a scene: drawn, painted and placed by a generator.

    Args:
        scene: the compiled scene.
        domain: bounds of the randomisation.

    Attributes:
        standing: what stands on the table, annotated objects first.
    """

    def __init__(self, scene: Scene, domain: Domain) -> None:
        self._scene, self._domain = scene, domain
        self._by_class = [
            [index for index, item in enumerate(scene.objects) if item.class_id == class_id]
            for class_id in range(len(CLASSES))
        ]
        self._distractors = [index for index, item in enumerate(scene.objects) if item.class_id < 0]
        self.standing: list[Standing] = []

    def randomise(self, rng: np.random.Generator) -> None:
        """Clear the table, then choose, paint and place objects in view of the camera."""
        scene, domain = self._scene, self._domain
        scene.hide_objects()
        chosen = self._choose(rng)
        rotations = [_draw_rotation(rng, scene.objects[index].shape.poses) for index in chosen]
        candidates = [self._lay(index, rotation) for index, rotation in zip(chosen, rotations, strict=True)]
        view = TableView(scene)
        layout = domain.layouts[int(rng.integers(len(domain.layouts)))]
        footprints = [candidate.footprint for candidate in candidates]
        places = arrange(rng, layout, footprints, lambda: view.draw(rng), view.accepts)
        self.standing = []
        for candidate, place in zip(candidates, places, strict=True):
            self._paint(rng, candidate.index)
            if place is not None:
                self.standing.append(replace(candidate, place=place))
                self.show(self.standing[-1])

    def show(self, item: Standing, lift: float = 0.0) -> None:
        """Put an object where it stands, or ``lift`` [m] above."""
        raised = item.position + np.array([0.0, 0.0, lift])
        self._scene.show_object(item.index, raised, item.world_rotation)

    def bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """:meth:`bounds_of` everything on the table."""
        return self.bounds_of(self.standing)

    def bounds_of(self, items: Sequence[Standing]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Axis-aligned boxes ``low``, ``high (B, 3)`` [m] about objects, with a margin."""
        low, high = np.empty((len(items), 3)), np.empty((len(items), 3))
        for row, item in enumerate(items):
            corners = self._scene.objects[item.index].vertices @ item.world_rotation.T + item.position
            low[row], high[row] = corners.min(0) - _BOX_MARGIN, corners.max(0) + _BOX_MARGIN
        return low, high

    def is_free(self, item: Standing, ignore: int, gap: float = 0.008) -> bool:
        """Whether ``item`` overlaps none of :attr:`standing` except the one in position ``ignore``."""
        corners = footprint_corners(item.footprint, item.place)
        return not any(
            rectangles_overlap(corners, footprint_corners(other.footprint, other.place), gap)
            for row, other in enumerate(self.standing)
            if row != ignore
        )

    def _choose(self, rng: np.random.Generator) -> list[int]:
        domain = self._domain
        count = int(rng.integers(domain.objects[0], domain.objects[1] + 1))
        chosen: list[int] = []
        while len(chosen) < count:
            variants = self._by_class[int(rng.integers(len(CLASSES)))]
            index = variants[int(rng.integers(len(variants)))]
            if index not in chosen:
                chosen.append(index)
        extra = int(rng.integers(0, domain.distractors + 1))
        return chosen + [self._distractors[k] for k in rng.permutation(len(self._distractors))[:extra]]

    def _lay(self, index: int, rotation: NDArray[np.float64]) -> Standing:
        """An object in its resting pose, not placed yet."""
        vertices = self._scene.objects[index].vertices @ rotation.T
        low, high = vertices.min(0), vertices.max(0)
        footprint = Footprint((low[:2] + high[:2]) / 2, (high[:2] - low[:2]) / 2)
        return Standing(index, rotation, footprint, float(low[2]), Placement(0.0, 0.0, 0.0))

    def _paint(self, rng: np.random.Generator, index: int) -> None:
        model, item = self._scene.model, self._scene.objects[index]
        families = tuple(LABEL_FAMILIES)
        before: tuple[Any, ...] | None = None
        for part, material in zip(item.shape.parts, item.materials, strict=True):
            palette = part.palette
            paint = colour(rng, palette.hue, palette.saturation, palette.value)
            shine = rng.uniform(0.0, palette.shininess)
            labelled = bool(palette.labels) and rng.random() < palette.label_share
            family = palette.labels[int(rng.integers(len(palette.labels)))] if palette.labels else families[0]
            if before is not None and palette is before[0]:  # Parts of one palette are one piece, as a mug's handle.
                _, paint, shine = before
                labelled = False
            before = (palette, paint, shine)
            model.mat_rgba[material] = [*paint, 1.0]
            model.mat_specular[material], model.mat_shininess[material] = shine, 0.3 + 0.5 * shine
            texture = self._scene.textures[f"label{families.index(family)}"] if labelled else -1
            self._scene.set_texture(int(material), texture)


def _draw_rotation(rng: np.random.Generator, poses: tuple[Pose, ...]) -> NDArray[np.float64]:
    weights = np.array([pose.weight for pose in poses])
    pose = poses[int(rng.choice(len(poses), p=weights / weights.sum()))]
    roll = rng.uniform(-np.pi, np.pi)
    return pose.rotation @ _rotation_z(roll) if pose.roll else pose.rotation
