"""Domain randomisation: one generator decides everything about one picture of the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from carpus.sim.arms import ArmPostures, Posture, points_hit_boxes
from carpus.sim.boxes import ObjectBox, camera_matrix, camera_pose, observe
from carpus.sim.domains import Domain, domain_by_name
from carpus.sim.population import Population
from carpus.sim.render import SceneRenderer
from carpus.sim.scene import TABLE_HEIGHT, TABLE_X, TABLE_Y, Scene
from carpus.sim.sensor import Sensor
from carpus.sim.textures import LABEL_FAMILIES, draw_texture

__all__ = ["Sample", "Tabletop"]

_LENS_CLEARANCE = 0.27  # No arm is nearer to the camera than this within its view [m].


@dataclass(frozen=True)
class Sample:
    """One picture with its ground truth.

    Attributes:
        image: ``(height, width, 3) uint8`` RGB.
        boxes: objects of which at least one pixel is seen.
        camera_matrix: ``(3, 3)`` [px].
        camera_pose: ``T_world_camera (4, 4)``, optical frame.
    """

    image: NDArray[np.uint8]
    boxes: tuple[ObjectBox, ...]
    camera_matrix: NDArray[np.float64]
    camera_pose: NDArray[np.float64]


class Tabletop:
    """A scene, its renderer and a domain; :meth:`sample` makes a picture from a generator and nothing else.

    The OpenGL context belongs to the thread that made the object: use it from there only.

    Args:
        domain: a domain, or its name in :data:`carpus.sim.domains.DOMAINS`.
        robot: name in :data:`carpus.sim.robot.ROBOTS`.
        size: picture height and width [px].
        antialias: samples per pixel, see :class:`~carpus.sim.scene.Scene`.

    Attributes:
        domain, scene, population, postures, renderer, sensor: the parts.

    Raises:
        DataError: an unknown name, a size out of range, or the robot's package is missing.
        BackendError: no offscreen OpenGL context can be made.
    """

    def __init__(
        self,
        domain: str | Domain = "train",
        robot: str = "gr1t2",
        size: tuple[int, int] = (480, 640),
        *,
        antialias: int = 0,
    ) -> None:
        self.domain: Domain = domain_by_name(domain) if isinstance(domain, str) else domain
        self.scene = Scene(robot, size, antialias=antialias)
        self.population = Population(self.scene, self.domain)
        self.postures = ArmPostures(self.scene, self.domain.name)
        self.sensor = Sensor(self.scene.size)
        self.renderer = SceneRenderer(self.scene)

    def close(self) -> None:
        """Free the renderer; the object cannot be used afterwards."""
        self.renderer.close()

    @property
    def camera_matrix(self) -> NDArray[np.float64]:
        """Pinhole matrix ``(3, 3)`` [px] of the ego camera as it is now."""
        return camera_matrix(float(self.scene.model.cam_fovy[self.scene.camera]), self.scene.size)

    def sample(self, rng: np.random.Generator) -> Sample:
        """Randomise the scene and render it; equal generators give equal bytes, whatever came before."""
        shadows = self.randomise(rng)
        exposure = self.sensor.draw(self.domain, rng)
        image = self.sensor.expose(self.renderer.picture(shadows), exposure)
        boxes = tuple(observe(self.scene, self.renderer))
        return Sample(image, boxes, self.camera_matrix, camera_pose(self.scene))

    def randomise(self, rng: np.random.Generator) -> bool:
        """Set up a scene; return whether the key light casts shadows."""
        self._surfaces(rng)
        self._labels(rng)
        shadows = self._lights(rng)
        self._camera(rng)
        self.population.randomise(rng)
        self._arms(rng)
        self.scene.update_kinematics()
        return shadows

    def _write_texture(self, slot: str, family: str, rng: np.random.Generator) -> None:
        model, texture = self.scene.model, self.scene.textures[slot]
        edge, start = int(model.tex_width[texture]), int(model.tex_adr[texture])
        model.tex_data[start : start + 3 * edge * edge] = draw_texture(family, rng, edge).ravel()
        self.renderer.upload_texture(texture)

    def _surfaces(self, rng: np.random.Generator) -> None:
        domain, model = self.domain, self.scene.model
        source = rng if domain.texture_seed is None else np.random.default_rng(domain.texture_seed)
        for slot, families in (("table", domain.table), ("backdrop", domain.backdrop)):
            self._write_texture(slot, families[int(source.integers(len(families)))], source)
        for slot, material in self.scene.materials.items():
            repeat = source.uniform(*domain.repeat)
            aspect = (TABLE_Y[1] - TABLE_Y[0]) / (TABLE_X[1] - TABLE_X[0]) if slot == "table" else 1.0
            model.mat_texrepeat[material] = [repeat, repeat * aspect]
            model.mat_rgba[material] = [*source.uniform(0.75, 1.0, 3), 1.0]
            model.mat_specular[material], model.mat_shininess[material] = source.uniform(0.0, 0.5, 2)

    def _labels(self, rng: np.random.Generator) -> None:
        for slot, family in enumerate(LABEL_FAMILIES):
            self._write_texture(f"label{slot}", family, rng)

    def _tint(self, rng: np.random.Generator) -> NDArray[np.float64]:
        tints = np.asarray(self.domain.tints)
        mix = rng.random()
        first, second = rng.integers(len(tints), size=2)
        return mix * tints[first] + (1.0 - mix) * tints[second]

    def _lights(self, rng: np.random.Generator) -> bool:
        domain, model = self.domain, self.scene.model
        tint = self._tint(rng)
        for index, strength in ((0, domain.key), (1, domain.fill)):
            azimuth, elevation = np.deg2rad([rng.uniform(*domain.light_azimuth), rng.uniform(*domain.light_elevation)])
            level = np.cos(elevation)
            towards = np.array([np.cos(azimuth) * level, np.sin(azimuth) * level, np.sin(elevation)])
            model.light_dir[index] = -towards
            model.light_pos[index] = np.array([0.55, 0.0, TABLE_HEIGHT]) + 2.0 * towards
            model.light_diffuse[index] = rng.uniform(*strength) * tint
            model.light_specular[index] = rng.uniform(0.0, 0.4)
        model.vis.headlight.ambient[:] = rng.uniform(*domain.ambient) * self._tint(rng)
        model.vis.headlight.diffuse[:] = rng.uniform(0.0, 0.6) * np.asarray(model.vis.headlight.ambient)
        model.vis.headlight.specular[:] = 0.0
        return bool(rng.random() < domain.shadow_share)

    def _camera(self, rng: np.random.Generator) -> None:
        domain = self.domain
        shift = np.asarray(domain.camera_shift)
        position = self.scene.ego_position + domain.camera_offset + rng.uniform(-shift, shift)
        target = np.array([rng.uniform(*domain.look_at[0]), rng.uniform(*domain.look_at[1]), TABLE_HEIGHT])
        roll = np.deg2rad(rng.uniform(-domain.roll, domain.roll))
        self.place_camera(position, target, roll, rng.uniform(*domain.fovy))

    def place_camera(self, position: NDArray[Any], target: NDArray[Any], roll: float, fovy: float) -> None:
        """Put the ego camera at ``position`` looking at ``target`` [m], turned by ``roll`` [rad], ``fovy`` [deg]."""
        model, camera = self.scene.model, self.scene.camera
        forward = (target - position) / np.linalg.norm(target - position)
        right = np.cross(forward, [0.0, 0.0, 1.0])
        right /= np.linalg.norm(right)
        up = np.cross(right, forward)
        right, up = np.cos(roll) * right + np.sin(roll) * up, np.cos(roll) * up - np.sin(roll) * right
        model.cam_pos[camera], model.cam_fovy[camera] = position, fovy
        mujoco.mju_mat2Quat(model.cam_quat[camera], np.stack([right, up, -forward], 1).ravel())
        self.scene.update_kinematics()

    def _arms(self, rng: np.random.Generator) -> None:
        for side in self.postures.library:
            posture = self.postures.resting[side]
            if rng.random() < self.domain.arms_share:
                posture = self.draw_posture(side, rng) or posture
            self.postures.apply(side, posture)

    def draw_posture(self, side: str, rng: np.random.Generator) -> Posture | None:
        """Draw a posture over the table that hits no object and leaves the lens free; None when six tries find none."""
        low, high = self.population.bounds()
        library = self.postures.library[side]
        for index in rng.permutation(len(library))[:6]:
            if self.posture_is_free(library[index], low, high):
                return library[index]
        return None

    def posture_is_free(self, posture: Posture, low: NDArray[Any], high: NDArray[Any]) -> bool:
        """Whether an arm keeps clear of the boxes ``low``, ``high (B, 3)`` [m] and does not cover the lens."""
        pose = camera_pose(self.scene)
        local = (posture.points - pose[:3, 3]) @ pose[:3, :3]
        slope = np.abs(local[:, :2]).max(1) / np.maximum(local[:, 2], 1e-6)
        if ((local[:, 2] > 0.0) & (local[:, 2] < _LENS_CLEARANCE) & (slope < 1.0)).any():
            return False
        return not points_hit_boxes(posture.points, low, high)
