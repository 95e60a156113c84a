"""Arm postures over the table: a library of valid ones, and a check against the objects that stand there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from carpus.sim.robot import Arm
from carpus.sim.scene import TABLE_HEIGHT, TABLE_X, TABLE_Y, Scene

__all__ = ["ArmPostures", "Posture", "points_hit_boxes"]

_POINTS_PER_GEOM = 14
_WANTED = 48
_MAX_DRAWS = 6000


@dataclass(frozen=True)
class Posture:
    """One arm's joint values and the space it takes.

    Attributes:
        values: ``(J,)`` [rad], arm joints then fingers.
        points: ``(P, 3)`` [m] sample of the arm's surface in the world frame.
    """

    values: NDArray[np.float64]
    points: NDArray[np.float32]


def points_hit_boxes(points: NDArray[Any], low: NDArray[Any], high: NDArray[Any]) -> bool:
    """Whether any of ``points (P, 3)`` lies in any of the axis-aligned boxes ``low``, ``high (B, 3)``."""
    if not len(low):
        return False
    inside = (points[:, None] >= low) & (points[:, None] <= high)
    return bool(inside.all(-1).any())


class ArmPostures:
    """Postures of each arm that reach over the table without touching it, fixed by scene and domain name.

    Attributes:
        library: postures by side.
        resting: the posture with all joints at zero (arms hanging), by side.
        addresses: positions in ``qpos`` by side, in the order of :attr:`Posture.values`.
    """

    def __init__(self, scene: Scene, domain: str, wanted: int = _WANTED) -> None:
        self._scene = scene
        self.addresses = {
            side: scene.joint_addresses(arm.joints + arm.fingers) for side, arm in scene.robot.arms.items()
        }
        self._geoms = {side: self._arm_geoms(arm) for side, arm in scene.robot.arms.items()}
        self._local = {side: [self._sample(geom) for geom in geoms] for side, geoms in self._geoms.items()}
        self.resting = {side: self._posture(side, np.zeros(len(adr))) for side, adr in self.addresses.items()}
        self.library: dict[str, tuple[Posture, ...]] = {}
        for side in scene.robot.arms:
            digest = hashlib.sha256(f"{domain}/{side}".encode()).digest()
            rng = np.random.default_rng(np.frombuffer(digest, np.uint32))
            self.library[side] = self._search(side, rng, wanted)

    def _arm_geoms(self, arm: Arm) -> list[int]:
        model, root = self._scene.model, self._scene.model.body(arm.root).id

        def moves(body: int) -> bool:
            while body > 0:
                if body == root:
                    return True
                body = int(model.body_parentid[body])
            return False

        return [geom for geom in range(model.ngeom) if moves(int(model.geom_bodyid[geom]))]

    def _sample(self, geom: int) -> NDArray[np.float64]:
        """Points on the surface of a geom in its own frame."""
        model = self._scene.model
        if model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_MESH:
            mesh = model.geom_dataid[geom]
            start, count = model.mesh_vertadr[mesh], model.mesh_vertnum[mesh]
            return model.mesh_vert[start : start + count : max(1, count // _POINTS_PER_GEOM)].astype(float)
        centre, half = model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
        signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 0, 1)], float)
        return centre + signs * half

    def _posture(self, side: str, values: NDArray[np.float64]) -> Posture:
        self._scene.data.qpos[self.addresses[side]] = values
        self._scene.update_kinematics()
        return self._current(side, values)

    def _current(self, side: str, values: NDArray[np.float64]) -> Posture:
        data = self._scene.data
        points = [
            local @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom]
            for geom, local in zip(self._geoms[side], self._local[side], strict=True)
        ]
        return Posture(values, np.concatenate(points).astype(np.float32))

    def _hand_in_place(self, side: str) -> bool:
        hand = self._scene.data.body(self._scene.robot.arms[side].hand).xpos
        across = hand[1] if side == "left" else -hand[1]
        return bool(0.30 < hand[0] < 0.68 and -0.10 < across < 0.48 and 0.07 < hand[2] - TABLE_HEIGHT < 0.30)

    @staticmethod
    def clears_table(side: str, posture: Posture) -> bool:
        """Whether an arm stays above the table, below the head and on its own side."""
        points, sign = posture.points, 1.0 if side == "left" else -1.0
        over = (points[:, 0] > TABLE_X[0] - 0.03) & (points[:, 1] > TABLE_Y[0]) & (points[:, 1] < TABLE_Y[1])
        if (points[over, 2] < TABLE_HEIGHT + 0.015).any() or points[:, 2].max() > 1.40:
            return False
        return bool((sign * points[:, 1] > -0.25).all())

    def _search(self, side: str, rng: np.random.Generator, wanted: int) -> tuple[Posture, ...]:
        arm = self._scene.robot.arms[side]
        limits = self._scene.joint_ranges(arm.joints + arm.fingers)
        low, high = np.maximum(limits[:, 0], -2.2), np.minimum(limits[:, 1], 2.2)
        found: list[Posture] = []
        for _ in range(_MAX_DRAWS):
            if len(found) == wanted:
                break
            values = rng.uniform(low, high)
            self._scene.data.qpos[self.addresses[side]] = values
            self._scene.update_kinematics()
            if self._hand_in_place(side):
                posture = self._current(side, values)
                if self.clears_table(side, posture):
                    found.append(posture)
        self._scene.data.qpos[self.addresses[side]] = 0.0
        return tuple(found)

    def apply(self, side: str, posture: Posture) -> None:
        """Set one arm's joints; call ``scene.update_kinematics`` afterwards."""
        self._scene.data.qpos[self.addresses[side]] = posture.values

    def set_between(self, side: str, start: Posture, goal: Posture, share: float) -> None:
        """Set one arm's joints a ``share`` 0..1 of the way from one posture to another."""
        values = start.values + share * (goal.values - start.values)
        self._scene.data.qpos[self.addresses[side]] = values

    def between(self, side: str, start: Posture, goal: Posture, share: float) -> Posture:
        """The posture a ``share`` 0..1 of the way from one to another; leaves the arm there."""
        return self._posture(side, start.values + share * (goal.values - start.values))
