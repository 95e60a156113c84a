"""Makes the built ros_ws importable in the test process, or says why the ROS 2 tests cannot run."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import sysconfig
from pathlib import Path

__all__ = ["ROOT", "activate", "child_environment"]

ROOT = Path(__file__).resolve().parents[2]
_INSTALL = ROOT / "ros_ws" / "install"


def activate() -> str | None:
    """Put the workspace on the import path; a reason when that is not enough to import it, else None."""
    candidates = [Path(sysconfig.get_path("purelib", vars={"base": str(_INSTALL)}))]
    candidates += _INSTALL.glob("local/lib/python3*/dist-packages")  # Debian's layout
    for path in candidates:
        if path.is_dir() and str(path) not in sys.path:
            sys.path.insert(0, str(path))
    libraries = str(_INSTALL / "lib")
    if libraries not in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        # The workspace was not sourced, and a process cannot change where its own loader searches; type supports are
        # opened by name, which succeeds for what is loaded already. Children get the path.
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join((libraries, os.environ.get("LD_LIBRARY_PATH", "")))
        _preload(sorted(Path(libraries).glob("lib*_msgs__*.so")))
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    os.environ.setdefault("ROS_LOCALHOST_ONLY", "1" if os.environ.get("ROS_DISTRO") == "humble" else "0")
    for module in ("rclpy", "vision_msgs.msg", "carpus_msgs.msg", "carpus_ros"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"ROS 2 is not ready ({module}: {error}); run scripts/ros_setup.sh"
    from carpus_ros.dds import profile_environment

    os.environ.update(profile_environment())
    return None


def _preload(libraries: list[Path]) -> None:
    for library in libraries:
        with contextlib.suppress(OSError):  # without ROS itself on the path; the import below then says so
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def child_environment(domain: int) -> dict[str, str]:
    """Environment for node processes: this process's import path, this domain, unbuffered logs."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "ROS_DOMAIN_ID": str(domain),
        "RCUTILS_LOGGING_BUFFERED_STREAM": "0",
        "RCUTILS_COLORIZED_OUTPUT": "0",
    }
