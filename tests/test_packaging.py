"""The package mapping, the base install and the layer contracts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_folder_is_listed() -> None:
    mapping = PROJECT["tool"]["setuptools"]["package-dir"]
    found = set()
    for package, folder in mapping.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            relative = init.parent.relative_to(ROOT / folder)
            found.add(".".join([package, *relative.parts]))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_base_dependencies_are_what_a_robot_needs() -> None:
    names = {requirement.split(">")[0].split("=")[0] for requirement in PROJECT["project"]["dependencies"]}
    assert names == {"numpy", "opencv-python-headless", "pillow", "tyro", "rich"}


def test_runtime_import_leaves_heavy_libraries_out() -> None:
    code = (
        "import sys, carpus.runtime.detector, carpus.runtime.bundle\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'openvino', 'mujoco', 'scipy', 'rich', 'tyro', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert out.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_base_install_works_without_torch(tmp_path: Path) -> None:
    """`pip install .` with no extras, in an environment of its own: the runtime imports, `train` names its extra."""
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = venv / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", str(source)], check=True)
    code = (
        "import importlib.util, carpus.runtime.detector\n"
        "print(importlib.util.find_spec('torch'), carpus.runtime.detector.__file__)"
    )
    out = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert out.stdout.startswith("None ")
    assert str(venv) in out.stdout
    listing = subprocess.run([str(venv / "bin" / "carpus")], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert listing.returncode == 2
    assert "detect" in listing.stdout
    train = subprocess.run(
        [str(venv / "bin" / "carpus"), "train", "--help"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert train.returncode == 2
    assert "pip install 'carpus[train]'" in train.stderr
