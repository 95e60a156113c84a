"""Robots, their meshes and the package they come from."""

from __future__ import annotations

import importlib
import pkgutil
import struct
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mujoco", reason="the simulation needs mujoco (pip install 'carpus[sim]')")

import carpus.sim
from carpus.runtime.errors import DataError
from carpus.sim.assets import ASSETS_VARIABLE, fourier_assets, have_fourier_assets
from carpus.sim.meshes import CACHE_VARIABLE, load_decimated, read_stl
from carpus.sim.robot import ROBOTS, build_robot
from carpus.sim.scene import Scene
from carpus.sim.shapes import sphere

_needs_assets = pytest.mark.skipif(
    not have_fourier_assets(), reason="fourier-robot-descriptions is not installed (pip install --no-deps)"
)
_ROBOTS = [pytest.param(name, marks=_needs_assets if name == "gr1t2" else ()) for name in ROBOTS]


def _write_stl(path: Path, vertices: np.ndarray, faces: np.ndarray) -> Path:
    body = b"".join(
        struct.pack("<3f", 0, 0, 0) + vertices[face].astype("<f4").tobytes() + struct.pack("<H", 0) for face in faces
    )
    path.write_bytes(b"\0" * 80 + struct.pack("<I", len(faces)) + body)
    return path


@pytest.mark.parametrize("name", _ROBOTS)
def test_robots_have_two_arms_that_can_move(name: str) -> None:
    scene = Scene(name, (32, 32), variants=1)
    assert set(scene.robot.arms) == {"left", "right"}
    for side, arm in scene.robot.arms.items():
        limits = scene.joint_ranges(arm.joints + arm.fingers)
        assert (limits[:, 1] - limits[:, 0] > 0.1).all()
        shoulder = scene.data.body(arm.root).xpos
        assert (shoulder[1] > 0) == (side == "left"), "x forward, y left"
        before = scene.data.body(arm.hand).xpos.copy()
        scene.data.qpos[scene.joint_addresses(arm.joints[:1])] = 0.5
        scene.update_kinematics()
        assert np.linalg.norm(scene.data.body(arm.hand).xpos - before) > 0.1
    assert 1.2 < scene.ego_position[2] < 1.7, "the head camera looks down on a table of 0.92 m"


@_needs_assets
def test_coupled_fingers_follow_their_leader() -> None:
    scene = Scene("gr1t2", (32, 32), variants=1)
    leader, follower = scene.joint_addresses(("L_thumb_proximal_pitch_joint", "L_thumb_intermediate_joint"))
    scene.data.qpos[leader] = 0.4
    scene.update_kinematics()
    assert scene.data.qpos[follower] == pytest.approx(1.6 * 0.4)


def test_decimated_meshes_come_from_the_cache_and_damaged_entries_are_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fast_simplification", reason="decimates meshes (pip install 'carpus[sim]')")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    surface = sphere(1.0, 64)
    path = _write_stl(tmp_path / "ball.stl", surface.vertices, surface.faces)
    whole = read_stl(path)
    vertices, faces = load_decimated(path, 400)
    assert len(faces) < 0.5 * len(whole[1])
    np.testing.assert_allclose(np.linalg.norm(vertices, axis=1), 1.0, atol=0.05)
    (entry,) = (tmp_path / "cache").iterdir()
    stamp = entry.stat().st_mtime_ns
    np.testing.assert_array_equal(load_decimated(path, 400)[1], faces)
    assert entry.stat().st_mtime_ns == stamp
    for damage in (b"", b"PK\x03\x04 torn"):
        entry.write_bytes(damage)
        np.testing.assert_array_equal(load_decimated(path, 400)[1], faces)


def test_small_meshes_are_welded_and_kept_whole(tmp_path: Path) -> None:
    corners = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], float)
    faces = np.array([[0, 2, 1], [0, 1, 3], [1, 2, 3], [0, 3, 2], [0, 0, 1]])
    vertices, kept = read_stl(_write_stl(tmp_path / "tetrahedron.stl", corners, faces))
    assert vertices.shape == (4, 3)
    assert kept.shape == (4, 3), "the degenerate fifth face is dropped"


@pytest.mark.parametrize("content", [b"", b"solid ascii\nfacet", b"\0" * 80 + struct.pack("<I", 3) + b"\0" * 50])
def test_files_that_are_not_binary_stl_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd.stl").write_bytes(content)
    with pytest.raises(DataError, match=r"odd\.stl: not a binary STL file"):
        read_stl(tmp_path / "odd.stl")


def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ASSETS_VARIABLE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install --no-deps fourier-robot-descriptions==0\.2\.7.*'primitive'"):
        build_robot("gr1t2")
    assert not have_fourier_assets()
    monkeypatch.setenv(ASSETS_VARIABLE, str(tmp_path))
    with pytest.raises(DataError, match=r"CARPUS_FOURIER_ASSETS=.*expected the file .*gr1t2_inspire_hand\.urdf"):
        fourier_assets()


def test_public_names_exist() -> None:
    for module_info in pkgutil.iter_modules(carpus.sim.__path__):
        module = importlib.import_module(f"carpus.sim.{module_info.name}")
        assert len(module.__all__) == len(set(module.__all__))
        for name in module.__all__:
            assert hasattr(module, name), f"{module.__name__}.{name}"
