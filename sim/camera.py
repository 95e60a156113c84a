"""A robot's head camera as a film: arms and head move, now and then an object is moved, ground truth comes along.

The scene lives in cycles of :data:`PERIOD` seconds: first the arms go to new postures, then one object is lifted to
another place. Everything is a function of the seed and of time, so two cameras with one seed that are stepped alike
show the same film.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpus.runtime.errors import DataError
from carpus.sim.arms import Posture, points_hit_boxes
from carpus.sim.boxes import ObjectBox, camera_pose, observe
from carpus.sim.domains import domain_by_name
from carpus.sim.layout import Placement
from carpus.sim.population import Standing, TableView
from carpus.sim.scene import TABLE_HEIGHT
from carpus.sim.tabletop import Tabletop

__all__ = ["PERIOD", "Frame", "SimCamera"]

#: Length of a cycle [s].
PERIOD = 5.0
_ARMS_UNTIL = 2.8  # Arms move from the start of a cycle to this moment [s].
_MOVE_FROM, _MOVE_UNTIL = 3.2, 4.6  # An object moves between these moments [s].
_OBJECTS = (6, 9)  # Number of objects on the table.
_LIFT = 0.10  # Height of an object's arc [m].
_MOVE_SHARE = 0.85  # Probability that an arm moves in a cycle.
_HEAD_SWAY = np.array([0.015, 0.03, 0.012])  # Amplitude of the head's movement [m].
_GAZE_SWAY = np.array([0.03, 0.05, 0.0])  # Amplitude of the point looked at [m].
_CHECKS = (0.2, 0.4, 0.6, 0.8)  # Shares of an arm's way at which collisions are looked for.


class Frame(NamedTuple):
    """One frame of the film.

    Attributes:
        image: ``(height, width, 3) uint8`` RGB.
        T_base_camera: ``(4, 4)`` optical frame (x right, y down, z forward) to the robot's base frame [m].
        time: seconds since the start.
    """

    image: NDArray[np.uint8]
    T_base_camera: NDArray[np.float64]
    time: float


def _smooth(share: float) -> float:
    """Smoothstep from 0 to 1 with zero speed at both ends."""
    share = min(max(share, 0.0), 1.0)
    return share * share * (3.0 - 2.0 * share)


class SimCamera:
    """Continuous view of the head camera over the table.

    The OpenGL context belongs to the thread that made the camera: step it from there only.

    Args:
        seed: decides scene and film.
        size: picture height and width [px].
        domain: name in :data:`carpus.sim.domains.DOMAINS`: textures, lights and camera of the scene.
        robot: name in :data:`carpus.sim.robot.ROBOTS`.
        antialias: samples per pixel; the pictures of data sets have none.
        shadows: whether the key light casts shadows, which doubles the time of a frame; None leaves it to the domain.

    Raises:
        DataError: an argument is out of range, or the robot's package is missing.
        BackendError: no offscreen OpenGL context can be made.
    """

    def __init__(
        self,
        seed: int = 0,
        size: tuple[int, int] = (480, 640),
        domain: str = "heldout",
        robot: str = "gr1t2",
        *,
        antialias: int = 0,
        shadows: bool | None = None,
    ) -> None:
        if seed < 0:
            raise DataError(f"seed is {seed}; expected 0 or more")
        settings = replace(domain_by_name(domain), objects=_OBJECTS)
        self._tabletop = Tabletop(settings, robot, size, antialias=antialias)
        scene = self._tabletop.scene
        self._rng = np.random.default_rng(np.random.SeedSequence((seed, 1_000_003)))
        drawn = self._tabletop.randomise(self._rng)
        self._shadows = drawn if shadows is None else shadows
        self._exposure = self._tabletop.sensor.draw(settings, self._rng)
        self._head = scene.ego_position + np.asarray(settings.camera_offset)
        self._gaze = np.array([*(sum(limits) / 2 for limits in settings.look_at), TABLE_HEIGHT])
        self._fovy = sum(settings.fovy) / 2
        self._phases = self._rng.uniform(0.0, 2.0 * np.pi, (2, 3))
        self._rates = self._rng.uniform(0.25, 0.6, (2, 3))
        self._time, self._cycle = 0.0, -1
        self._place_head(np.zeros((2, 3)))
        self._tabletop.population.randomise(self._rng)  # Again, now for the place from which the film is taken.
        postures = self._tabletop.postures
        # An arm cannot come from under the table, so both start above it where they can.
        self._arm_to = {
            side: self._tabletop.draw_posture(side, self._rng) or resting for side, resting in postures.resting.items()
        }
        self._arm_from = dict(self._arm_to)
        self._moving: tuple[int, Standing, Standing] | None = None
        self._boxes: tuple[ObjectBox, ...] | None = None
        self._begin_cycle(0)
        self._pose()

    def __enter__(self) -> SimCamera:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the renderer; the camera cannot be used afterwards."""
        self._tabletop.close()

    @property
    def size(self) -> tuple[int, int]:
        """Picture height and width [px]."""
        return self._tabletop.scene.size

    @property
    def camera_matrix(self) -> NDArray[np.float64]:
        """Pinhole matrix ``(3, 3)`` [px]; the camera has no distortion, and the matrix stays the same."""
        return self._tabletop.camera_matrix

    @property
    def time(self) -> float:
        """Seconds since the start."""
        return self._time

    def step(self, dt: float) -> Frame:
        """Let ``dt`` seconds pass and take a picture.

        Raises:
            DataError: ``dt`` is negative or not finite.
        """
        if not (math.isfinite(dt) and dt >= 0.0):
            raise DataError(f"dt is {dt} s; expected a finite number, 0 or more")
        self._time += dt
        while self._cycle < int(self._time // PERIOD):
            self._begin_cycle(self._cycle + 1)
        self._pose()
        sensor = self._tabletop.sensor
        exposure = replace(self._exposure, grain_at=sensor.draw_grain(self._rng))
        image = sensor.expose(self._tabletop.renderer.picture(self._shadows), exposure)
        self._boxes = None
        return Frame(image, self.T_base_camera, self._time)

    @property
    def T_base_camera(self) -> NDArray[np.float64]:
        """``(4, 4)`` optical frame to the robot's base frame [m]."""
        pose = camera_pose(self._tabletop.scene)
        pose[2, 3] -= self._tabletop.scene.robot.base_height
        return pose

    def boxes(self) -> tuple[ObjectBox, ...]:
        """Ground truth of the latest frame."""
        if self._boxes is None:
            self._boxes = tuple(observe(self._tabletop.scene, self._tabletop.renderer))
        return self._boxes

    def _place_head(self, sway: NDArray[np.float64]) -> None:
        """Place the camera; ``sway (2, 3)`` displaces the head and the point it looks at, -1..1 of their amplitudes."""
        position, target = self._head + _HEAD_SWAY * sway[0], self._gaze + _GAZE_SWAY * sway[1]
        self._tabletop.place_camera(position, target, 0.0, self._fovy)

    def _begin_cycle(self, cycle: int) -> None:
        """Settle what the cycle before moved, then plan this one."""
        population = self._tabletop.population
        if self._moving is not None:
            row, _, after = self._moving
            population.standing[row] = after
            population.show(after)
        self._cycle, self._moving = cycle, None
        self._arm_from = dict(self._arm_to)
        low, high = population.bounds()
        for side in self._arm_to:
            self._arm_to[side] = self._next_posture(side, low, high)
        self._moving = self._plan_move()

    def _next_posture(self, side: str, low: NDArray[np.float64], high: NDArray[np.float64]) -> Posture:
        """A posture whose straight way in joint space stays clear of table and objects; else the arm stays."""
        tabletop, start = self._tabletop, self._arm_from[side]
        if start is tabletop.postures.resting[side] or self._rng.random() > _MOVE_SHARE:
            return start
        for _ in range(4):
            goal = tabletop.draw_posture(side, self._rng)
            if goal is None:
                return start
            between = [tabletop.postures.between(side, start, goal, share) for share in _CHECKS]
            if all(
                tabletop.postures.clears_table(side, item) and tabletop.posture_is_free(item, low, high)
                for item in between
            ):
                return goal
        return start

    def _plan_move(self) -> tuple[int, Standing, Standing] | None:
        """Position in ``standing`` of an object and where it goes; None when no free place was found."""
        population, scene = self._tabletop.population, self._tabletop.scene
        rows = [row for row, item in enumerate(population.standing) if scene.objects[item.index].class_id >= 0]
        if not rows:
            return None
        row = rows[int(self._rng.integers(len(rows)))]
        before, view = population.standing[row], TableView(scene)
        for _ in range(30):
            x, y = (float(v) for v in view.draw(self._rng))
            after = replace(before, place=Placement(x, y, float(self._rng.uniform(-np.pi, np.pi))))
            low, high = population.bounds_of([after])
            hit = any(points_hit_boxes(posture.points, low, high) for posture in self._arm_to.values())
            if not hit and population.is_free(after, ignore=row):
                return row, before, after
        return None

    def _pose(self) -> None:
        """Place head, arms and the moving object for the present time."""
        tabletop, phase = self._tabletop, self._time - self._cycle * PERIOD
        self._place_head(np.sin(self._rates * self._time + self._phases))
        if self._moving is not None:
            _, before, after = self._moving
            share = _smooth((phase - _MOVE_FROM) / (_MOVE_UNTIL - _MOVE_FROM))
            turn = (after.place.yaw - before.place.yaw + np.pi) % (2.0 * np.pi) - np.pi
            place = Placement(
                before.place.x + share * (after.place.x - before.place.x),
                before.place.y + share * (after.place.y - before.place.y),
                before.place.yaw + share * turn,
            )
            tabletop.population.show(replace(before, place=place), lift=4.0 * _LIFT * share * (1.0 - share))
        share = _smooth(phase / _ARMS_UNTIL)
        for side, start in self._arm_from.items():
            tabletop.postures.set_between(side, start, self._arm_to[side], share)
        tabletop.scene.update_kinematics()
