"""Composition: robot, room, table, objects and lights as one compiled model, which no picture needs to recompile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from carpus.runtime.errors import DataError
from carpus.sim.object_model import Part, TabletopObject
from carpus.sim.objects import CLASSES, DISTRACTORS, build_object
from carpus.sim.robot import GROUP_HIDDEN, Robot, build_robot

__all__ = [
    "GROUP_DISTRACTOR",
    "GROUP_OBJECT",
    "LABEL_SLOTS",
    "TABLE_HEIGHT",
    "TABLE_X",
    "TABLE_Y",
    "Scene",
    "SceneObject",
]

#: Height of the table top above the floor [m].
TABLE_HEIGHT = 0.92
#: Extent of the table top along x and y [m].
TABLE_X = (0.22, 0.98)
TABLE_Y = (-0.8, 0.8)
#: Geom groups of annotated objects and of distractors.
GROUP_OBJECT = 3
GROUP_DISTRACTOR = 2
#: Number of prints that the objects of one picture share.
LABEL_SLOTS = 3

_VARIANT_SEED = 20240917
_DISTRACTOR_VARIANTS = 2
_TEXTURE_SIZE = {"table": 256, "backdrop": 128} | {f"label{i}": 96 for i in range(LABEL_SLOTS)}
_RGB_ROLE = int(mujoco.mjtTextureRole.mjTEXROLE_RGB)
_PARKED = (0.0, 0.0, -3.0)


@dataclass(frozen=True)
class SceneObject:
    """An object instance in the compiled model.

    Attributes:
        name: body name.
        class_id: contiguous class id, -1 for a distractor.
        shape: its parts and resting poses.
        vertices: ``(V, 3)`` [m] in the body's frame.
        mocap: row in ``data.mocap_pos``.
        geoms: geom ids, in the order of the parts.
        materials: material ids, in the order of the parts.
    """

    name: str
    class_id: int
    shape: TabletopObject
    vertices: NDArray[np.float64]
    mocap: int
    geoms: NDArray[np.int64]
    materials: NDArray[np.int64]


class Scene:
    """The compiled tabletop.

    Args:
        robot: name in :data:`carpus.sim.robot.ROBOTS`.
        size: picture height and width [px].
        variants: instances (different proportions) of every class.
        antialias: samples per pixel; 4 looks smoother and costs twice the time of 0.

    Attributes:
        model, data: the compiled model and its state.
        objects: all instances, annotated classes first.
        geom_object: ``(ngeom + 1,)`` index into ``objects`` by geom id, -1 for anything else; the last entry
            stands for the background, so that a geom id of -1 maps to -1.
        textures: texture id by slot name ("table", "backdrop", "label0", ...).
        materials: material id by slot name ("table", "floor", "wall").
    """

    def __init__(
        self, robot: str = "gr1t2", size: tuple[int, int] = (480, 640), variants: int = 6, antialias: int = 0
    ) -> None:
        height, width = size
        if not (16 <= height <= 4096 and 16 <= width <= 4096):
            raise DataError(f"picture size {height}x{width} (height x width): each side must be 16..4096 pixels")
        if variants < 1:
            raise DataError(f"variants is {variants}; expected at least 1")
        self.robot: Robot = build_robot(robot)
        self.size = (height, width)
        spec = self.robot.spec
        spec.visual.quality.offsamples = antialias
        shapes = self._compose(spec, variants)
        self.model: mujoco.MjModel = spec.compile()
        self.data = mujoco.MjData(self.model)
        self.model.stat.extent, self.model.stat.center[:] = 1.0, [0.5, 0.0, TABLE_HEIGHT]
        self.textures = {name: self.model.texture(f"slot_{name}").id for name in _TEXTURE_SIZE}
        self.materials = {name: self.model.material(name).id for name in ("table", "floor", "wall")}
        self.camera = self.model.camera("ego").id
        self.objects = tuple(self._resolve(name, class_id, shape) for name, class_id, shape in shapes)
        self.geom_object = np.full(self.model.ngeom + 1, -1, np.int64)
        for index, item in enumerate(self.objects):
            self.geom_object[item.geoms] = index
        mujoco.mj_kinematics(self.model, self.data)
        #: Nominal place of the head camera in the world frame, ``(3,)`` [m].
        self.ego_position: NDArray[np.float64] = self.data.site(self.robot.ego_site).xpos.copy()
        self._mimics = self._joint_mimics()

    def _compose(self, spec: mujoco.MjSpec, variants: int) -> tuple[tuple[str, int, TabletopObject], ...]:
        spec.modelname = "carpus_tabletop"
        spec.visual.global_.offheight, spec.visual.global_.offwidth = self.size
        spec.visual.quality.shadowsize = 512
        spec.visual.map.znear, spec.visual.map.zfar = 0.02, 20.0
        spec.visual.map.shadowclip = 1.0
        for name, edge in _TEXTURE_SIZE.items():
            texture = spec.add_texture(
                name=f"slot_{name}", type=mujoco.mjtTexture.mjTEXTURE_2D, width=edge, height=edge, nchannel=3
            )
            texture.data = bytes([255]) * (3 * edge * edge)
        self._add_room(spec)
        shapes = _shapes(variants)
        for name, _, shape in shapes:
            body = spec.worldbody.add_body(name=name, mocap=True, pos=_PARKED)
            for index, part in enumerate(shape.parts):
                _add_part(spec, body, f"{name}_{index}", part)
        return shapes

    @staticmethod
    def _add_room(spec: mujoco.MjSpec) -> None:
        kind, still = mujoco.mjtGeom, {"contype": 0, "conaffinity": 0, "group": 0}
        for name in ("table", "floor", "wall"):
            material = spec.add_material(name=name, texrepeat=[2.0, 2.0], specular=0.2, shininess=0.3)
            material.textures[_RGB_ROLE] = "slot_table" if name == "table" else "slot_backdrop"
        world = spec.worldbody
        world.add_geom(name="floor", type=kind.mjGEOM_PLANE, size=[4, 4, 0.1], material="floor", **still)
        wall = {"type": kind.mjGEOM_BOX, "size": [0.05, 4.0, 2.0], "material": "wall", **still}
        world.add_geom(name="wall", pos=[2.2, 0, 2.0], **wall)
        half = [(TABLE_X[1] - TABLE_X[0]) / 2, (TABLE_Y[1] - TABLE_Y[0]) / 2, 0.02]
        middle = [sum(TABLE_X) / 2, sum(TABLE_Y) / 2, TABLE_HEIGHT - half[2]]
        world.add_geom(name="table", type=kind.mjGEOM_BOX, size=half, pos=middle, material="table", **still)
        leg = (TABLE_HEIGHT - 2 * half[2]) / 2
        for x in TABLE_X:
            for y in TABLE_Y:
                pos = [x + np.sign(middle[0] - x) * 0.06, y - np.sign(y) * 0.06, leg]
                dark = [0.3, 0.27, 0.25, 1.0]
                world.add_geom(type=kind.mjGEOM_CYLINDER, size=[0.025, leg, 0], pos=pos, rgba=dark, **still)
        sun = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL
        world.add_light(name="key", type=sun, castshadow=True, dir=[0, 0, -1], pos=[0.5, 0, 2.5])
        world.add_light(name="fill", type=sun, castshadow=False, dir=[0, 0, -1], pos=[0.5, 0, 2.5])
        world.add_camera(name="ego", pos=[0, 0, 1.6], fovy=50.0)

    def _resolve(self, name: str, class_id: int, shape: TabletopObject) -> SceneObject:
        body = self.model.body(name)
        geoms = np.flatnonzero(self.model.geom_bodyid == body.id)
        mocap = int(self.model.body_mocapid[body.id])
        return SceneObject(name, class_id, shape, shape.vertices, mocap, geoms, self.model.geom_matid[geoms])

    def _joint_mimics(self) -> list[tuple[int, int, NDArray[np.float64]]]:
        """Address of the follower, address of the leader, and the polynomial of every joint equality."""
        model, found = self.model, []
        for index in np.flatnonzero(model.eq_type == mujoco.mjtEq.mjEQ_JOINT):
            if model.eq_obj2id[index] >= 0:
                follower, leader = model.eq_obj1id[index], model.eq_obj2id[index]
                adr = model.jnt_qposadr
                found.append((int(adr[follower]), int(adr[leader]), model.eq_data[index, :5].copy()))
        return found

    def joint_addresses(self, names: tuple[str, ...]) -> NDArray[np.int64]:
        """Positions of joints in ``qpos``."""
        return np.array([self.model.jnt_qposadr[self.model.joint(name).id] for name in names], np.int64)

    def joint_ranges(self, names: tuple[str, ...]) -> NDArray[np.float64]:
        """Limits ``(J, 2)`` of joints [rad]."""
        return np.array([self.model.joint(name).range for name in names])

    def set_texture(self, material: int, texture: int) -> None:
        """Give a material a texture, or none with -1; the renderer sees it in its next picture."""
        self.model.mat_texid[material, _RGB_ROLE] = texture

    def update_kinematics(self) -> None:
        """Let coupled joints follow, then place every body, camera and light."""
        for follower, leader, polynomial in self._mimics:
            self.data.qpos[follower] = np.polynomial.polynomial.polyval(self.data.qpos[leader], polynomial)
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)

    def hide_objects(self) -> None:
        """Take every object off the table and out of the pictures."""
        for item in self.objects:
            self.model.geom_group[item.geoms] = GROUP_HIDDEN
            self.data.mocap_pos[item.mocap] = _PARKED

    def show_object(self, index: int, position: Any, rotation: NDArray[np.float64]) -> None:
        """Put an object at ``position (3,)`` [m] with ``rotation (3, 3)``, body to world frame."""
        item = self.objects[index]
        self.model.geom_group[item.geoms] = GROUP_OBJECT if item.class_id >= 0 else GROUP_DISTRACTOR
        self.data.mocap_pos[item.mocap] = position
        mujoco.mju_mat2Quat(self.data.mocap_quat[item.mocap], np.ascontiguousarray(rotation).ravel())


@lru_cache(maxsize=4)
def _shapes(variants: int) -> tuple[tuple[str, int, TabletopObject], ...]:
    """Name, class id and shape of every instance; the same in every scene."""
    shapes: list[tuple[str, int, TabletopObject]] = []
    for class_id, category in enumerate(CLASSES):
        for variant in range(variants):
            rng = np.random.default_rng([_VARIANT_SEED, class_id, variant])
            shapes.append((f"{category}_{variant}", class_id, build_object(category, rng)))
    for kind, category in enumerate(DISTRACTORS):
        for variant in range(_DISTRACTOR_VARIANTS):
            rng = np.random.default_rng([_VARIANT_SEED, 1000 + kind, variant])
            shapes.append((f"{category}_{variant}", -1, build_object(category, rng)))
    return tuple(shapes)


def _add_part(spec: mujoco.MjSpec, body: mujoco.MjsBody, name: str, part: Part) -> None:
    surface = part.surface
    mesh = spec.add_mesh(name=name)
    mesh.uservert, mesh.usernormal = surface.vertices.ravel(), surface.normals.ravel()
    mesh.usertexcoord, mesh.userface = surface.texcoords.ravel(), surface.faces.ravel().astype(np.int32)
    mesh.inertia = mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL
    material = spec.add_material(name=name)
    material.textures[_RGB_ROLE] = "slot_label0"
    body.add_geom(
        type=mujoco.mjtGeom.mjGEOM_MESH,
        meshname=name,
        material=name,
        contype=0,
        conaffinity=0,
        group=GROUP_HIDDEN,
        mass=0.001,
    )
