"""MuJoCo scenes and datasets with ground truth.

MuJoCo picks its OpenGL platform when it is first imported, so the default for machines without a display is set here,
before any module of this package imports it. An existing ``MUJOCO_GL`` (``egl``, ``osmesa``, ``glfw``) is respected.
"""

from __future__ import annotations

import os

os.environ.setdefault("MUJOCO_GL", "egl")

__all__: list[str] = []
