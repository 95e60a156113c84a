"""Binary STL files to decimated triangle meshes, cached on disk by content.

A humanoid's STL files hold close to a million triangles; a software renderer draws them at four frames a second.
Decimated to some hundred faces a link they cost nothing, and the result is cached so that it is computed once.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carpus.runtime.errors import DataError

__all__ = ["CACHE_VARIABLE", "cache_folder", "load_decimated", "read_stl"]

CACHE_VARIABLE = "CARPUS_MESH_CACHE"
_FORMAT = 3
_STL_RECORD = np.dtype([("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")])


def cache_folder() -> Path:
    """Folder of the mesh cache: ``$CARPUS_MESH_CACHE``, else ``$XDG_CACHE_HOME/carpus/meshes``."""
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "carpus" / "meshes"


def _without_degenerate(faces: NDArray[Any]) -> NDArray[Any]:
    keep = (faces[:, 0] != faces[:, 1]) & (faces[:, 1] != faces[:, 2]) & (faces[:, 0] != faces[:, 2])
    return faces[keep]


def read_stl(path: str | Path) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Read a binary STL file and weld equal vertices.

    Returns:
        ``vertices (V, 3) float32`` in the file's unit and ``faces (F, 3) int32``, without degenerate faces.

    Raises:
        DataError: the file is not a binary STL file, or its length does not match its triangle count.
    """
    raw = Path(path).read_bytes()
    count = int(np.frombuffer(raw, "<u4", 1, 80)[0]) if len(raw) >= 84 else -1
    if count < 0 or 84 + _STL_RECORD.itemsize * count != len(raw):
        raise DataError(f"{path}: not a binary STL file ({len(raw)} bytes, header says {count} triangles)")
    corners = np.frombuffer(raw, _STL_RECORD, count, 84)["corners"].reshape(-1, 3)
    vertices, inverse = np.unique(corners, axis=0, return_inverse=True)
    faces = _without_degenerate(inverse.reshape(-1, 3).astype(np.int32))
    return np.ascontiguousarray(vertices, np.float32), faces


def _decimate(
    vertices: NDArray[np.float32], faces: NDArray[np.int32], max_faces: int
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    import fast_simplification

    result = fast_simplification.simplify(vertices, faces, target_count=max_faces, agg=3)
    return np.asarray(result[0], np.float32), _without_degenerate(np.asarray(result[1], np.int32))


def load_decimated(path: str | Path, max_faces: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Return a binary STL file as a mesh of about ``max_faces`` faces, from the cache when it was decimated before.

    Args:
        path: binary STL file.
        max_faces: target number of faces; smaller meshes are returned whole, and one that would lose its shape keeps
            up to a few times as many.

    Returns:
        ``vertices (V, 3) float32`` and ``faces (F, 3) int32``.

    Raises:
        DataError: the file is not a binary STL file.
    """
    path = Path(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:24]
    cached = cache_folder() / f"v{_FORMAT}-{digest}-{max_faces}.npz"
    if cached.is_file():
        try:
            with np.load(cached) as data:
                return data["vertices"], data["faces"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            pass  # A damaged cache entry is rebuilt below.
    vertices, faces = read_stl(path)
    if len(faces) > max_faces:
        vertices, faces = _decimate(vertices, faces, max_faces)
    _store(cached, vertices, faces)
    return vertices, faces


def _store(cached: Path, vertices: NDArray[np.float32], faces: NDArray[np.int32]) -> None:
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cached.parent, suffix=".tmp", delete=False) as stream:
            np.savez(stream, vertices=vertices, faces=faces)
        os.replace(stream.name, cached)
    except OSError:
        return  # A read-only home only costs the time to decimate again.
