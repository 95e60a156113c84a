"""Domain randomisation: one generator decides everything about one picture of the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cv2
import mujoco
import numpy as np
from carpus.sim.arms import ArmPostures, Posture, points_hit_boxes
from carpus.sim.boxes import ObjectBox, camera_matrix, camera_pose, observe
from carpus.sim.domains import Domain, domain_by_name
from carpus.sim.layout import Footprint, arrange
from carpus.sim.objects import CLASSES, Pose
from carpus.sim.render import SceneRenderer
from carpus.sim.scene import LABEL_SLOTS, TABLE_HEIGHT, TABLE_X, TABLE_Y, Scene
from carpus.sim.textures import LABEL_FAMILIES, colour, draw_texture
from numpy.typing import NDArray

__all__ = ["Sample", "Tabletop"]

_EDGE = 0.05  # Objects keep this far from the table's edge [m].
_GRAIN_SCALE = 32.0  # Standard deviation of the stored grain [grey levels].
_LENS_CLEARANCE = 0.27  # No arm is nearer to the camera than this within its view [m].
_VIEW_MARGIN = 0.04  # ... and their feet this share of the picture from its border.


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


def _rotation_z(angle: float) -> NDArray[np.float64]:
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])


class Tabletop:
    """A scene, its renderer and a domain; :meth:`sample` makes a picture from a generator and nothing else.

    Args:
        domain: name in :data:`carpus.sim.domains.DOMAINS`.
        robot: name in :data:`carpus.sim.robot.ROBOTS`.
        size: picture height and width [px].
        variants: instances of each class to choose from.

    Raises:
        DataError: an unknown name, a size out of range, or the robot's package is missing.
        BackendError: no offscreen OpenGL context can be made.
    """

    def __init__(
        self, domain: str = "train", robot: str = "gr1t2", size: tuple[int, int] = (480, 640), variants: int = 6
    ) -> None:
        self.domain: Domain = domain_by_name(domain)
        self.scene = Scene(robot, size, variants)
        self.postures = ArmPostures(self.scene, domain)
        self.renderer = SceneRenderer(self.scene)
        grain = np.random.default_rng(5).standard_normal((size[0] * 2, size[1] * 2, 3), dtype=np.float32)
        self._grain = np.clip(128.0 + _GRAIN_SCALE * grain, 0.0, 255.0).astype(np.uint8)
        self._by_class = [
            [index for index, item in enumerate(self.scene.objects) if item.class_id == class_id]
            for class_id in range(len(CLASSES))
        ]
        self._distractors = [index for index, item in enumerate(self.scene.objects) if item.class_id < 0]

    def close(self) -> None:
        """Free the renderer."""
        self.renderer.close()

    def sample(self, rng: np.random.Generator) -> Sample:
        """Randomise the scene and render it; equal generators give equal bytes, whatever came before."""
        shadows = self.randomise(rng)
        matrix = camera_matrix(float(self.scene.model.cam_fovy[self.scene.camera]), self.scene.size)
        image = self.expose(self.renderer.picture(shadows), rng)
        boxes = tuple(observe(self.scene, self.renderer))
        return Sample(image, boxes, matrix, camera_pose(self.scene))

    def randomise(self, rng: np.random.Generator) -> bool:
        """Set up a scene; return whether the key light casts shadows."""
        self.scene.hide_objects()
        self._surfaces(rng)
        self._labels(rng)
        shadows = self._lights(rng)
        self._camera(rng)
        low, high = self._objects(rng)
        self._arms(rng, low, high)
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
        families = tuple(LABEL_FAMILIES)
        for slot in range(LABEL_SLOTS):
            self._write_texture(f"label{slot}", families[slot], rng)

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

    def _view(self, rng: np.random.Generator) -> tuple[Any, Any]:
        """Two functions: draw a table point uniformly over the picture, and tell whether one is in view."""
        scene = self.scene
        pose = camera_pose(scene)
        matrix = camera_matrix(float(scene.model.cam_fovy[scene.camera]), scene.size)
        inverse = pose[:3, :3] @ np.linalg.inv(matrix)
        height, width = scene.size

        def region() -> NDArray[np.float64]:
            for _ in range(50):
                pixel = np.array([rng.uniform(0, width), rng.uniform(0, height), 1.0])
                ray = inverse @ pixel
                if ray[2] < -1e-6:
                    point = pose[:3, 3] + ray * (TABLE_HEIGHT - pose[2, 3]) / ray[2]
                    if accept(point[0], point[1]):
                        return point[:2]
            return np.array([sum(TABLE_X) / 2, 0.0])

        def accept(x: float, y: float) -> bool:
            if not (TABLE_X[0] + _EDGE < x < TABLE_X[1] - _EDGE and TABLE_Y[0] + _EDGE < y < TABLE_Y[1] - _EDGE):
                return False
            local = pose[:3, :3].T @ (np.array([x, y, TABLE_HEIGHT]) - pose[:3, 3])
            if local[2] <= 0.05:
                return False
            u, v, w = matrix @ local
            u, v = u / w / width, v / w / height
            return bool(_VIEW_MARGIN < u < 1 - _VIEW_MARGIN and _VIEW_MARGIN < v < 1 - _VIEW_MARGIN)

        return region, accept

    def _objects(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Choose, paint and place objects; return the axis-aligned boxes ``(B, 3)`` that they take [m]."""
        domain, scene = self.domain, self.scene
        count = int(rng.integers(domain.objects[0], domain.objects[1] + 1))
        chosen: list[int] = []
        while len(chosen) < count:
            variants = self._by_class[int(rng.integers(len(CLASSES)))]
            index = variants[int(rng.integers(len(variants)))]
            if index not in chosen:
                chosen.append(index)
        extra = int(rng.integers(0, domain.distractors + 1))
        chosen += [self._distractors[k] for k in rng.permutation(len(self._distractors))[:extra]]
        rotations = [self._resting(rng, scene.objects[index].shape.poses) for index in chosen]
        footprints, bottoms = [], []
        for index, rotation in zip(chosen, rotations, strict=True):
            vertices = scene.objects[index].vertices @ rotation.T
            low, high = vertices.min(0), vertices.max(0)
            footprints.append(Footprint((low[:2] + high[:2]) / 2, (high[:2] - low[:2]) / 2))
            bottoms.append(low[2])
        region, accept = self._view(rng)
        layout = domain.layouts[int(rng.integers(len(domain.layouts)))]
        places = arrange(rng, layout, footprints, region, accept)
        lows, highs = [], []
        for index, rotation, bottom, place in zip(chosen, rotations, bottoms, places, strict=True):
            self._paint(rng, index)
            if place is None:
                continue
            world = _rotation_z(place.yaw) @ rotation
            position = np.array([place.x, place.y, TABLE_HEIGHT - bottom])
            scene.show_object(index, position, world)
            corners = scene.objects[index].vertices @ world.T + position
            lows.append(corners.min(0) - 0.01)
            highs.append(corners.max(0) + 0.01)
        return np.reshape(lows, (-1, 3)), np.reshape(highs, (-1, 3))

    @staticmethod
    def _resting(rng: np.random.Generator, poses: tuple[Pose, ...]) -> NDArray[np.float64]:
        weights = np.array([pose.weight for pose in poses])
        pose = poses[int(rng.choice(len(poses), p=weights / weights.sum()))]
        roll = rng.uniform(-np.pi, np.pi)
        return pose.rotation @ _rotation_z(roll) if pose.roll else pose.rotation

    def _paint(self, rng: np.random.Generator, index: int) -> None:
        model, item = self.scene.model, self.scene.objects[index]
        families = tuple(LABEL_FAMILIES)
        first: tuple[Any, ...] | None = None
        for part, material in zip(item.shape.parts, item.materials, strict=True):
            palette = part.palette
            paint = colour(rng, palette.hue, palette.saturation, palette.value)
            shine = rng.uniform(0.0, palette.shininess)
            labelled = bool(palette.labels) and rng.random() < palette.label_share
            family = palette.labels[int(rng.integers(len(palette.labels)))] if palette.labels else families[0]
            slot = families.index(family)
            if first is not None and palette is first[0]:  # Parts of one palette are one piece, as a mug's handle.
                _, paint, shine, labelled, slot = first
                labelled = False
            first = (palette, paint, shine, labelled, slot)
            model.mat_rgba[material] = [*paint, 1.0]
            model.mat_specular[material], model.mat_shininess[material] = shine, 0.3 + 0.5 * shine
            texture = self.scene.textures[f"label{slot}"] if labelled else -1
            model.mat_texid[material, 1] = texture

    def _arms(self, rng: np.random.Generator, low: NDArray[Any], high: NDArray[Any]) -> None:
        for side, library in self.postures.library.items():
            posture = self.postures.resting[side]
            if rng.random() < self.domain.arms_share:
                for index in rng.permutation(len(library))[:6]:
                    if self.posture_is_free(library[index], low, high):
                        posture = library[index]
                        break
            self.postures.apply(side, posture)

    def posture_is_free(self, posture: Posture, low: NDArray[Any], high: NDArray[Any]) -> bool:
        """Whether an arm keeps clear of the boxes ``low``, ``high (B, 3)`` [m] and does not cover the lens."""
        pose = camera_pose(self.scene)
        local = (posture.points - pose[:3, 3]) @ pose[:3, :3]
        slope = np.abs(local[:, :2]).max(1) / np.maximum(local[:, 2], 1e-6)
        if ((local[:, 2] > 0.0) & (local[:, 2] < _LENS_CLEARANCE) & (slope < 1.0)).any():
            return False
        return not points_hit_boxes(posture.points, low, high)

    def expose(self, image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """What a sensor does: automatic exposure, gamma, slight blur and grain."""
        wanted, gamma = rng.uniform(*self.domain.exposure), rng.uniform(0.85, 1.2)
        blur, noise = rng.uniform(0.0, 0.9), rng.uniform(*self.domain.noise)
        dy, dx = int(rng.integers(image.shape[0])), int(rng.integers(image.shape[1]))
        gain = np.clip(wanted / max(float(image[::8, ::8].mean()) / 255.0, 1e-3), 0.6, 2.5)
        curve = 255.0 * np.clip(gain * np.arange(256) / 255.0, 0.0, 1.0) ** gamma
        image = cv2.LUT(image, (curve + 0.5).astype(np.uint8))
        if blur > 0.45:
            image = cv2.GaussianBlur(image, (3, 3), blur)
        grain = self._grain[dy : dy + image.shape[0], dx : dx + image.shape[1]]
        weight = noise / _GRAIN_SCALE
        return cv2.addWeighted(image, 1.0, grain, weight, -128.0 * weight)
