"""The ROS 2 packages as packages: manifests, launch files, configuration, and documentation that lists everything."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ros.workspace import ROOT, activate, child_environment
from tests.tiny_detector import write_tiny_bundle

_REASON = activate()
if _REASON is None:
    import yaml
    from carpus_ros import detector_parameters, recorder_node, sim_camera_node
else:
    pytest.skip(_REASON, allow_module_level=True)
pytestmark = pytest.mark.ros

SOURCES = ROOT / "ros_ws" / "src"
PACKAGES = ("vision_msgs", "carpus_msgs", "carpus_ros", "carpus_bringup")
LAUNCH_FILES = tuple(sorted((SOURCES / "carpus_bringup" / "launch").glob("*.launch.py")))
BRINGUP_README = (SOURCES / "carpus_bringup" / "README.md").read_text("utf-8")
ROS_README = (SOURCES / "carpus_ros" / "README.md").read_text("utf-8")


def _arguments(path: Path) -> dict[str, ast.Tuple]:
    """The table ARGUMENTS of a launch file, unevaluated: name -> (default, description)."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "ARGUMENTS":
            assert isinstance(node.value, ast.Dict)
            return {key.value: value for key, value in zip(node.value.keys, node.value.values, strict=True)}
    raise AssertionError(f"{path.name} has no table ARGUMENTS")


@pytest.mark.parametrize("package", PACKAGES)
def test_manifest_is_complete(package: str) -> None:
    root = ElementTree.parse(SOURCES / package / "package.xml").getroot()
    assert root.findtext("name") == package
    assert root.findtext("license") == "Apache-2.0"
    assert re.fullmatch(r"\d+\.\d+\.\d+", root.findtext("version") or "")
    assert (root.findtext("description") or "").strip().endswith(".")
    assert (SOURCES / package / "README.md").is_file()


def test_every_package_that_carpus_ros_imports_is_declared() -> None:
    root = ElementTree.parse(SOURCES / "carpus_ros" / "package.xml").getroot()
    declared = {element.text for element in root.findall("exec_depend")}
    imported = set()
    for path in (SOURCES / "carpus_ros" / "carpus_ros").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported |= {name.partition(".")[0] for name in names}
    ros = {name for name in imported if name.endswith("_msgs") or name in ("rclpy", "rcl_interfaces")}
    assert ros - {"tf2_msgs"} <= declared  # tf2_msgs is used where it is there


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.name)
def test_every_launch_argument_is_described_and_documented(path: Path) -> None:
    for name, entry in _arguments(path).items():
        default, description = entry.elts
        assert isinstance(description, ast.Constant)
        assert str(description.value).endswith("."), name
        assert f"| `{name}` |" in BRINGUP_README
        if isinstance(default, ast.Constant) and default.value:
            assert f"`{default.value}`" in BRINGUP_README, name


@pytest.mark.parametrize(
    ("node", "specs"),
    [
        ("detector", detector_parameters.PARAMETERS),
        ("sim_camera", sim_camera_node.PARAMETERS),
        ("recorder", recorder_node.PARAMETERS),
    ],
)
def test_every_parameter_is_documented_and_configured_names_exist(node: str, specs: tuple) -> None:
    section = ROS_README.partition(f"\n## {node}\n")[2].partition("\n## ")[0]
    for spec in specs:
        assert f"`{spec.name}`" in section, spec.name
    config = SOURCES / "carpus_bringup" / "config" / f"{node}.yaml"
    if config.exists():
        given = yaml.safe_load(config.read_text("utf-8"))["/**"]["ros__parameters"]
        known = {spec.name: spec for spec in specs}
        assert set(given) <= set(known)
        for name, value in given.items():
            assert known[name].problem(value) is None
            assert isinstance(value, type(known[name].default)) or value == [""]


@pytest.mark.skipif(
    find_spec("launch") is None or find_spec("launch_ros") is None,
    reason="launch and launch_ros are not importable (ROS 2 from wheels has neither)",
)
def test_robot_launch_file_brings_the_detector_up(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "tiny.carpus", formats=("onnx",))
    log = tmp_path / "log.txt"
    command = [sys.executable, "-m", "ros2cli.cli"] if find_spec("ros2cli") else ["ros2"]
    command += ["launch", "carpus_bringup", "robot.launch.py", f"bundle:={bundle}", "backend:=onnxruntime"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=child_environment(101 - os.getpid() % 10), start_new_session=True
        )
    end = time.monotonic() + 60
    try:
        while "loaded tiny" not in log.read_text("utf-8") and process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        assert "loaded tiny" in log.read_text("utf-8")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
