"""Where installed robot descriptions lie on this machine; files are read in place, never copied."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from carpus.runtime.errors import DataError

__all__ = ["ASSETS_VARIABLE", "fourier_assets", "have_fourier_assets"]

ASSETS_VARIABLE = "CARPUS_FOURIER_ASSETS"
_PACKAGE = "fourier_robot_descriptions"
_URDF = Path("urdf/gr1t2_inspire_hand.urdf")


def fourier_assets() -> Path:
    """Return the ``assets`` folder of ``fourier-robot-descriptions`` (Apache-2.0, by the maker of the robot).

    The package is located without importing it. The environment variable ``CARPUS_FOURIER_ASSETS`` names another
    folder of the same layout.

    Raises:
        DataError: the package is not installed, or the folder lacks the GR1T2 URDF.
    """
    override = os.environ.get(ASSETS_VARIABLE)
    if override:
        folder = Path(override)
    else:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise DataError(
                "robot 'gr1t2' needs the package fourier-robot-descriptions, which is not installed; run "
                "'pip install --no-deps fourier-robot-descriptions==0.2.7' or choose robot 'primitive'"
            )
        folder = Path(next(iter(spec.submodule_search_locations))) / "assets"
    if not (folder / _URDF).is_file():
        source = f"{ASSETS_VARIABLE}={override}" if override else f"installed package {_PACKAGE}"
        raise DataError(f"{source}: expected the file {folder / _URDF}; install version 0.2.7 of the package")
    return folder


def have_fourier_assets() -> bool:
    """Whether :func:`fourier_assets` would succeed."""
    try:
        fourier_assets()
    except DataError:
        return False
    return True
