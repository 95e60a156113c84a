"""Pinhole cameras and their poses as messages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from geometry_msgs.msg import Pose
from sensor_msgs.msg import CameraInfo

__all__ = ["camera_info", "pose_message", "quaternion_xyzw"]


def camera_info(camera_matrix: np.ndarray, size: tuple[int, int], header: Any) -> CameraInfo:
    """CameraInfo of an ideal pinhole camera, whose rectified image is its raw one.

    Args:
        camera_matrix: (3, 3) [px], for coordinates whose origin is the top left corner of the picture. ROS and OpenCV
            count from the centre of the first pixel, so the principal point in the message is half a pixel less.
        size: image (height, width) [px].
        header: std_msgs/Header; its frame is the optical one (x right, y down, z forward).
    """
    info = CameraInfo(header=header, height=size[0], width=size[1], distortion_model="plumb_bob")
    info.d = [0.0] * 5
    matrix = np.array(camera_matrix, np.float64)
    matrix[:2, 2] -= 0.5
    info.k = matrix.reshape(9)
    info.r = np.eye(3).reshape(9)
    info.p = np.hstack((matrix, np.zeros((3, 1)))).reshape(12)
    return info


def quaternion_xyzw(rotation: np.ndarray) -> tuple[float, float, float, float]:
    """Unit quaternion (x, y, z, w), w >= 0, of a rotation matrix (3, 3).

    Follows Shepperd, "Quaternion from rotation matrix", Journal of Guidance and Control 1(3), 1978: the greatest
    component is computed from the diagonal, the others from it, so that nothing is divided by a small number.
    """
    r = np.asarray(rotation, np.float64)
    squares = np.array([r[0, 0], r[1, 1], r[2, 2], r.trace()])
    i = int(np.argmax(squares))
    q = np.empty(4)
    if i == 3:
        q[:3] = r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1]
        q[3] = 1.0 + squares[3]
    else:
        j, k = (i + 1) % 3, (i + 2) % 3
        q[i] = 1.0 + r[i, i] - r[j, j] - r[k, k]
        q[j], q[k] = r[j, i] + r[i, j], r[k, i] + r[i, k]
        q[3] = r[k, j] - r[j, k]
    q *= math.copysign(1.0 / float(np.linalg.norm(q)), q[3])
    return float(q[0]), float(q[1]), float(q[2]), float(q[3])


def pose_message(T_parent_child: np.ndarray) -> Pose:
    """geometry_msgs/Pose of a homogeneous matrix (4, 4) that maps child to parent coordinates [m]."""
    pose = Pose()
    pose.position.x, pose.position.y, pose.position.z = (float(value) for value in T_parent_child[:3, 3])
    rotation = quaternion_xyzw(T_parent_child[:3, :3])
    pose.orientation.x, pose.orientation.y, pose.orientation.z, pose.orientation.w = rotation
    return pose
