"""Robots as data: a description becomes a MuJoCo spec plus the names that the scene needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np

from carpus.runtime.errors import DataError
from carpus.sim.assets import fourier_assets
from carpus.sim.meshes import load_decimated

__all__ = ["GROUP_HIDDEN", "GROUP_ROBOT", "ROBOTS", "Arm", "Robot", "build_robot"]

#: Geom group of the robot's visible parts.
GROUP_ROBOT = 1
#: Geom group that no camera draws.
GROUP_HIDDEN = 5

_BASE_HEIGHT = 0.95
_LEAN = 0.3
_FACES_TORSO = 6000  # Large, and close to the camera.
_FACES_PER_LINK = 600
_FACES_PER_FINGER = 200
_ARM = ("shoulder_pitch", "shoulder_roll", "shoulder_yaw", "elbow_pitch", "wrist_yaw", "wrist_roll", "wrist_pitch")
_FINGERS = (
    "thumb_proximal_yaw_joint",
    "thumb_proximal_pitch_joint",
    "index_proximal_joint",
    "middle_proximal_joint",
    "ring_proximal_joint",
    "pinky_proximal_joint",
)


@dataclass(frozen=True)
class Arm:
    """One arm with its hand.

    Attributes:
        root: name of the first body that moves with the arm.
        hand: name of the palm's body.
        joints: arm joints from shoulder to wrist.
        fingers: independent hand joints; coupled ones follow by the model's joint equalities.
    """

    root: str
    hand: str
    joints: tuple[str, ...]
    fingers: tuple[str, ...]


@dataclass(frozen=True)
class Robot:
    """A robot ready to be put into a scene.

    Attributes:
        name: key in :data:`ROBOTS`.
        spec: the robot alone, standing at x = y = 0 with its base frame at ``base_height``; facing +x.
        arms: ``left`` and ``right``.
        ego_site: site at the head camera's mount.
        base_height: height of the base frame above the floor [m].
    """

    name: str
    spec: mujoco.MjSpec
    arms: dict[str, Arm]
    ego_site: str
    base_height: float


def _half_turn_quat(angle: float) -> list[float]:
    """Quaternion (wxyz) of a rotation about y by ``angle`` [rad]."""
    return [float(np.cos(angle / 2)), 0.0, float(np.sin(angle / 2)), 0.0]


def _face_budget(mesh: str) -> int:
    if mesh == "torso_link":
        return _FACES_TORSO
    small = mesh.startswith(("L_", "R_", "waist", "base_link"))
    return _FACES_PER_FINGER if small else _FACES_PER_LINK


def _load_urdf(path: Path) -> mujoco.MjSpec:
    """URDF to spec; MuJoCo drops visual meshes and folds fixed links unless the file itself asks it not to."""
    options = '<mujoco><compiler discardvisual="false" strippath="false" fusestatic="false"/></mujoco>'
    text, count = re.subn(r"(<robot[^>]*>)", rf"\1{options}", path.read_text(encoding="utf-8"), count=1)
    if not count:
        raise DataError(f"{path}: no <robot> element; expected a URDF file")
    return mujoco.MjSpec.from_string(text)


def _gr1t2() -> Robot:
    """Fourier GR1T2 with two Inspire hands: upper body, waist and head held still, leaning over the table."""
    folder = fourier_assets() / "urdf"
    spec = _load_urdf(folder / "gr1t2_inspire_hand.urdf")
    for body in list(spec.bodies):
        if body.name in ("left_thigh_roll_link", "right_thigh_roll_link", "imu_link"):
            spec.delete(body)
    used = {geom.meshname for geom in spec.geoms}
    for mesh in list(spec.meshes):
        if mesh.name not in used:
            spec.delete(mesh)
            continue
        vertices, faces = load_decimated(folder / mesh.file, _face_budget(mesh.name))
        mesh.file = ""
        mesh.uservert, mesh.userface = vertices.ravel(), faces.ravel()
        mesh.inertia = mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL
    for joint in list(spec.joints):
        if joint.name.startswith(("waist_", "head_")):
            spec.delete(joint)
    for geom in list(spec.geoms):
        if geom.contype:  # Collision shapes: nothing touches anything in a rendered data set.
            spec.delete(geom)
            continue
        # The head would stand in front of its own camera.
        geom.group = GROUP_HIDDEN if geom.parent.name.startswith("head_") else GROUP_ROBOT
        geom.rgba = [0.2, 0.2, 0.22, 1.0] if geom.parent.name.startswith(("L_", "R_")) else [0.55, 0.55, 0.58, 1.0]
    spec.body("base_link").pos = [0.0, 0.0, _BASE_HEIGHT]
    spec.body("waist_pitch_link").quat = _half_turn_quat(_LEAN)
    spec.body("head_yaw_link").add_site(name="ego_mount", pos=[0.13, 0.0, 0.06], group=GROUP_HIDDEN)
    arms = {
        side: Arm(
            root=f"{side}_upper_arm_pitch_link",
            hand=f"{side[0].upper()}_hand_base_link",
            joints=tuple(f"{side}_{name}_joint" for name in _ARM),
            fingers=tuple(f"{side[0].upper()}_{name}" for name in _FINGERS),
        )
        for side in ("left", "right")
    }
    return Robot("gr1t2", spec, arms, "ego_mount", _BASE_HEIGHT)


def _primitive() -> Robot:
    """A small robot of capsules and boxes with the proportions of a humanoid's upper body."""
    spec = mujoco.MjSpec()
    spec.compiler.degree = False
    kind = mujoco.mjtGeom
    skin = {"contype": 0, "conaffinity": 0, "group": GROUP_ROBOT}
    base = spec.worldbody.add_body(name="base_link", pos=[0.0, 0.0, _BASE_HEIGHT])
    torso = base.add_body(name="torso", quat=_half_turn_quat(_LEAN))
    torso.add_geom(type=kind.mjGEOM_BOX, size=[0.07, 0.14, 0.2], pos=[0, 0, 0.2], rgba=[0.6, 0.6, 0.62, 1], **skin)
    torso.add_site(name="ego_mount", pos=[0.13, 0.0, 0.58], group=GROUP_HIDDEN)
    arms = {}
    for side, sign in (("left", 1.0), ("right", -1.0)):
        arms[side] = _primitive_arm(torso, side, sign, skin)
    return Robot("primitive", spec, arms, "ego_mount", _BASE_HEIGHT)


def _primitive_arm(torso: mujoco.MjsBody, side: str, sign: float, skin: dict[str, int]) -> Arm:
    kind, hinge = mujoco.mjtGeom, mujoco.mjtJoint.mjJNT_HINGE
    grey, dark = [0.55, 0.55, 0.6, 1], [0.2, 0.2, 0.22, 1]

    def joint(body: mujoco.MjsBody, name: str, axis: list[float], low: float, high: float) -> str:
        body.add_joint(name=f"{side}_{name}", type=hinge, axis=axis, range=[low, high], limited=True)
        return f"{side}_{name}"

    joints, fingers = [], []
    upper = torso.add_body(name=f"{side}_upper", pos=[0, sign * 0.2, 0.37])
    joints.append(joint(upper, "shoulder_pitch", [0, 1, 0], -2.8, 1.9))
    joints.append(joint(upper, "shoulder_roll", [sign, 0, 0], -0.5, 2.5))
    joints.append(joint(upper, "shoulder_yaw", [0, 0, 1], -2.9, 2.9))
    upper.add_geom(type=kind.mjGEOM_CAPSULE, fromto=[0, 0, 0, 0, 0, -0.25], size=[0.04, 0, 0], rgba=grey, **skin)
    lower = upper.add_body(name=f"{side}_lower", pos=[0, 0, -0.25])
    joints.append(joint(lower, "elbow", [0, 1, 0], -2.2, 0.0))
    lower.add_geom(type=kind.mjGEOM_CAPSULE, fromto=[0, 0, 0, 0, 0, -0.23], size=[0.035, 0, 0], rgba=grey, **skin)
    hand = lower.add_body(name=f"{side}_hand", pos=[0, 0, -0.26])
    joints.append(joint(hand, "wrist_roll", [0, 0, 1], -2.9, 2.9))
    joints.append(joint(hand, "wrist_pitch", [0, 1, 0], -0.6, 0.6))
    hand.add_geom(type=kind.mjGEOM_BOX, size=[0.035, 0.015, 0.045], pos=[0, 0, -0.045], rgba=dark, **skin)
    for index in range(4):
        finger = hand.add_body(name=f"{side}_finger{index}", pos=[0.027 - 0.018 * index, 0, -0.09])
        fingers.append(joint(finger, f"finger{index}", [sign, 0, 0], -1.6, 0.0))
        finger.add_geom(type=kind.mjGEOM_CAPSULE, fromto=[0, 0, 0, 0, 0, -0.07], size=[0.008, 0, 0], rgba=dark, **skin)
    return Arm(f"{side}_upper", f"{side}_hand", tuple(joints), tuple(fingers))


#: Robots by name.
ROBOTS: dict[str, Callable[[], Robot]] = {"gr1t2": _gr1t2, "primitive": _primitive}


def build_robot(name: str) -> Robot:
    """Build a robot of :data:`ROBOTS`.

    Raises:
        DataError: the name is unknown, or the package with its description is not installed.
    """
    if name not in ROBOTS:
        raise DataError(f"unknown robot '{name}'; expected one of {', '.join(ROBOTS)}")
    return ROBOTS[name]()
