"""The DDS profile that lets images through shared memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["profile_environment"]

_VARIABLES = ("FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE")
_OLD = ("humble", "iron", "jazzy")  # Fast DDS 2 knows the second name only; Fast DDS 3 warns about it


def profile_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables to add so that Fast DDS uses ``fastdds_images.xml``; none where the user has a profile already.

    Args:
        environment: the present environment; this process's when None.
    """
    environment = os.environ if environment is None else environment
    if any(environment.get(name) for name in _VARIABLES):
        return {}
    name = _VARIABLES[1] if environment.get("ROS_DISTRO") in _OLD else _VARIABLES[0]
    return {name: str(Path(__file__).with_name("fastdds_images.xml"))}
