"""Offscreen pictures and geom-id maps of a scene."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from carpus.runtime.errors import BackendError
from carpus.sim.robot import GROUP_ROBOT
from carpus.sim.scene import GROUP_DISTRACTOR, GROUP_OBJECT, Scene

__all__ = ["SceneRenderer"]

_MAX_GEOMS = 2000


def _options(groups: tuple[int, ...]) -> mujoco.MjvOption:
    option = mujoco.MjvOption()
    option.geomgroup[:] = 0
    option.geomgroup[list(groups)] = 1
    option.sitegroup[:] = 0
    return option


def _context_class() -> Any:
    """MuJoCo's context class for ``MUJOCO_GL``.

    MuJoCo itself reads the variable once, when it is first imported; somebody may have imported it before this package
    had a chance to set the default.
    """
    platform = os.environ.get("MUJOCO_GL", "egl").lower()
    if platform == "egl":
        from mujoco import egl

        return egl.GLContext
    if platform == "osmesa":
        from mujoco import osmesa

        return osmesa.GLContext
    return mujoco.GLContext


class SceneRenderer:
    """Renders a :class:`~carpus.sim.scene.Scene` from its ego camera.

    Every call sets all renderer state that it depends on, so a picture does not depend on the pictures before it.

    Raises:
        BackendError: no offscreen OpenGL context can be made.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        height, width = scene.size
        try:
            self._context = _context_class()(width, height)
            self._context.make_current()
            self._mjr = mujoco.MjrContext(scene.model, mujoco.mjtFontScale.mjFONTSCALE_100)
        except Exception as error:
            raise BackendError(
                f"cannot make an offscreen OpenGL context: {error}; on Debian or Ubuntu run 'apt-get install "
                "libegl1 libopengl0 libgl1-mesa-dri', or install libosmesa6 and set MUJOCO_GL=osmesa"
            ) from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._mjr)
        self._mjv = mujoco.MjvScene(scene.model, maxgeom=_MAX_GEOMS)
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera.fixedcamid = scene.camera
        self._viewport = mujoco.MjrRect(0, 0, width, height)
        self._all = _options((0, GROUP_ROBOT, GROUP_DISTRACTOR, GROUP_OBJECT))
        # The room hides nothing that stands on its table, so the id maps do without it.
        self._foreground = _options((GROUP_ROBOT, GROUP_DISTRACTOR, GROUP_OBJECT))
        self._objects_only = _options((GROUP_OBJECT,))
        self._buffer = np.empty((height, width, 3), np.uint8)

    def __enter__(self) -> SceneRenderer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the OpenGL context; the renderer cannot be used afterwards."""
        if self._context is not None:
            self._mjr.free()
            self._context.free()
            self._context = None

    def upload_texture(self, texture: int) -> None:
        """Send a texture whose ``model.tex_data`` changed to the renderer."""
        self._context.make_current()
        mujoco.mjr_uploadTexture(self._scene.model, self._mjr, texture)

    def _draw(self, option: mujoco.MjvOption, *, shadows: bool, identify: bool) -> NDArray[np.uint8]:
        self._context.make_current()
        flags = self._mjv.flags
        flags[mujoco.mjtRndFlag.mjRND_SHADOW] = shadows
        flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        flags[mujoco.mjtRndFlag.mjRND_SEGMENT] = identify
        flags[mujoco.mjtRndFlag.mjRND_IDCOLOR] = identify
        scene = self._scene
        # The context keeps its own copy of the texture of each material; without this a changed one has no effect.
        self._mjr.mat_texid[: scene.model.mat_texid.size] = scene.model.mat_texid.ravel()
        self._mjr.mat_texrepeat[: scene.model.mat_texrepeat.size] = scene.model.mat_texrepeat.ravel()
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(scene.model, scene.data, option, None, self._camera, everything, self._mjv)
        mujoco.mjr_render(self._viewport, self._mjv, self._mjr)
        mujoco.mjr_readPixels(self._buffer, None, self._viewport, self._mjr)
        return self._buffer

    def picture(self, shadows: bool = True) -> NDArray[np.uint8]:
        """Render the scene: ``(height, width, 3) uint8`` RGB."""
        return self._draw(self._all, shadows=shadows, identify=False)[::-1].copy()

    def geom_ids(self, objects_only: bool = False) -> NDArray[np.int64]:
        """Render which geom is seen: ``(height, width) int64``; -1 where it is the room.

        Args:
            objects_only: leave out robot and distractors too, so that only annotated objects hide one another.
        """
        option = self._objects_only if objects_only else self._foreground
        pixels = self._draw(option, shadows=False, identify=True)[::-1]
        lookup = np.full(self._mjv.ngeom + 1, -1, np.int64)
        for geom in self._mjv.geoms[: self._mjv.ngeom]:
            if geom.objtype == mujoco.mjtObj.mjOBJ_GEOM:
                lookup[geom.segid + 1] = geom.objid
        # The colour is the geom's number plus one, low byte in red; a scene never holds 2**16 of them.
        code = pixels[..., 0] + (pixels[..., 1].astype(np.uint16) << 8)
        return lookup[code]
