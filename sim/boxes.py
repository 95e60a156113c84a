"""Ground truth: visible boxes from the id map, amodal boxes from projected vertices, and the visible share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from carpus.sim.render import SceneRenderer
from carpus.sim.robot import GROUP_HIDDEN
from carpus.sim.scene import GROUP_OBJECT, Scene

__all__ = ["ObjectBox", "amodal_boxes", "camera_matrix", "camera_pose", "observe", "pixel_boxes", "project"]

_NEAR = 0.02
#: MuJoCo's camera looks along -z with y up; optical frames look along +z with y down.
_OPTICAL = np.diag([1.0, -1.0, -1.0])


@dataclass(frozen=True)
class ObjectBox:
    """Ground truth of one visible object.

    Attributes:
        index: position in ``scene.objects``.
        class_id: contiguous class id.
        visible: ``(x0, y0, x1, y1)`` [px], the tightest box about its visible pixels, x1 and y1 exclusive.
        amodal: ``(x0, y0, x1, y1)`` [px] of the whole object as if nothing hid it; may leave the picture.
        pixels: number of visible pixels.
        visibility: visible share of the whole object, 0..1; what lies outside the picture counts as hidden.
    """

    index: int
    class_id: int
    visible: tuple[int, int, int, int]
    amodal: tuple[float, float, float, float]
    pixels: int
    visibility: float


def camera_matrix(fovy: float, size: tuple[int, int]) -> NDArray[np.float64]:
    """Pinhole matrix ``(3, 3)`` [px] of a camera with vertical field of view ``fovy`` [deg], ``size`` height x width.

    Pixel centres lie at half-integers of the picture plane, so the principal point is at (width / 2, height / 2) when
    the top left *corner* of the picture is the origin.
    """
    height, width = size
    focal = 0.5 * height / np.tan(np.deg2rad(fovy) / 2)
    return np.array([[focal, 0.0, width / 2], [0.0, focal, height / 2], [0.0, 0.0, 1.0]])


def camera_pose(scene: Scene) -> NDArray[np.float64]:
    """``T_world_camera (4, 4)``: optical frame (x right, y down, z forward) to world frame [m]."""
    pose = np.eye(4)
    pose[:3, :3] = scene.data.cam_xmat[scene.camera].reshape(3, 3) @ _OPTICAL
    pose[:3, 3] = scene.data.cam_xpos[scene.camera]
    return pose


def project(points: NDArray[Any], pose: NDArray[Any], matrix: NDArray[Any]) -> NDArray[np.float64]:
    """Project world points ``(N, 3)`` [m] to ``(M, 2)`` [px]; points behind the near plane are left out."""
    local = (points - pose[:3, 3]) @ pose[:3, :3]
    local = local[local[:, 2] > _NEAR]
    pixels = local @ matrix.T
    return pixels[:, :2] / pixels[:, 2:]


def pixel_boxes(labels: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tight boxes of a label map.

    Args:
        labels: ``(height, width)`` label 0..count-1, or -1 for none.
        count: number of labels.

    Returns:
        ``(count, 4)`` x0, y0, x1, y1 (exclusive) [px], zeros where a label does not occur, and ``(count,)`` pixels.
    """
    boxes = np.zeros((count, 4), np.int64)
    pixels = np.bincount(labels.ravel() + 1, minlength=count + 1)[1:]
    rows, columns = np.nonzero(labels >= 0)
    found = labels[rows, columns]
    for label in np.flatnonzero(pixels):
        own = found == label
        x, y = columns[own], rows[own]  # np.nonzero goes row by row, so y is sorted.
        boxes[label] = x.min(), y[0], x.max() + 1, y[-1] + 1
    return boxes, pixels


def _overlap(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return bool(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3])


def _unhidden_pixels(
    scene: Scene, renderer: SceneRenderer, shown: Sequence[int], hidden: Sequence[int], amodal: NDArray[np.float64]
) -> dict[int, int]:
    """Pixels that each object of ``hidden`` (rows of ``shown`` and ``amodal``) would cover if nothing stood before it.

    Objects whose amodal boxes do not meet share one rendering.
    """
    passes: list[list[int]] = []
    for row in hidden:
        for members in passes:
            if not any(_overlap(amodal[row], amodal[other]) for other in members):
                members.append(row)
                break
        else:
            passes.append([row])
    pixels: dict[int, int] = {}
    group = scene.model.geom_group
    for members in passes:
        for row, index in enumerate(shown):
            group[scene.objects[index].geoms] = GROUP_OBJECT if row in members else GROUP_HIDDEN
        labels = scene.geom_object[renderer.geom_ids(objects_only=True)]
        counts = np.bincount(labels[labels >= 0], minlength=len(scene.objects))
        pixels.update({row: int(counts[shown[row]]) for row in members})
    for index in shown:
        group[scene.objects[index].geoms] = GROUP_OBJECT
    return pixels


def _alone(ids: NDArray[np.int64], geoms: NDArray[np.int64], box: NDArray[np.float64]) -> bool:
    """Whether nothing but the object's own ``geoms`` and the room is seen within its amodal box."""
    x0, y0 = (int(v) for v in np.maximum(np.floor(box[:2]) - 1, 0))
    x1, y1 = (int(v) for v in np.maximum(np.ceil(box[2:]) + 1, 0))
    window = ids[y0:y1, x0:x1]
    return bool(((window < 0) | ((window >= geoms[0]) & (window <= geoms[-1]))).all())


def amodal_boxes(scene: Scene, shown: Sequence[int]) -> NDArray[np.float64]:
    """Boxes ``(N, 4)`` [px] of the projected vertices of the objects ``shown``; NaN for one behind the camera."""
    pose, matrix = camera_pose(scene), camera_matrix(float(scene.model.cam_fovy[scene.camera]), scene.size)
    boxes = np.full((len(shown), 4), np.nan)
    rotation = np.empty(9)
    for row, index in enumerate(shown):
        item = scene.objects[index]
        mujoco.mju_quat2Mat(rotation, scene.data.mocap_quat[item.mocap])
        world = item.vertices @ rotation.reshape(3, 3).T + scene.data.mocap_pos[item.mocap]
        pixels = project(world, pose, matrix)
        if len(pixels):
            boxes[row] = *pixels.min(0), *pixels.max(0)
    return boxes


def observe(scene: Scene, renderer: SceneRenderer) -> list[ObjectBox]:
    """Ground truth of every annotated object of which at least one pixel is seen, in the order of ``scene.objects``."""
    ids = renderer.geom_ids()
    boxes, pixels = pixel_boxes(scene.geom_object[ids], len(scene.objects))
    shown = [index for index, item in enumerate(scene.objects) if item.class_id >= 0 and pixels[index] > 0]
    if not shown:
        return []
    amodal = amodal_boxes(scene, shown)
    # An object with nothing else inside its amodal box hides behind nothing; only the others need another look.
    hidden = [row for row, index in enumerate(shown) if not _alone(ids, scene.objects[index].geoms, amodal[row])]
    whole = _unhidden_pixels(scene, renderer, shown, hidden, amodal)
    height, width = scene.size
    inside = np.clip(amodal, 0, [width, height, width, height])
    area = np.prod(amodal[:, 2:] - amodal[:, :2], axis=1)
    in_picture = np.prod(inside[:, 2:] - inside[:, :2], axis=1) / np.maximum(area, 1e-9)
    found = []
    for row, index in enumerate(shown):
        share = min(1.0, pixels[index] / max(1, whole.get(row, pixels[index]))) * in_picture[row]
        x0, y0, x1, y1 = (int(v) for v in boxes[index])
        a0, b0, a1, b1 = (float(v) for v in amodal[row])
        found.append(
            ObjectBox(
                index,
                scene.objects[index].class_id,
                (x0, y0, x1, y1),
                (a0, b0, a1, b1),
                int(pixels[index]),
                float(share),
            )
        )
    return found
