"""Skip what needs to render where nothing can, unless the environment says that it must."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

from carpus.runtime.errors import BackendError

__all__ = ["REQUIRED_VARIABLE", "skip_without_opengl"]

#: Set to 1 where OpenGL is known to be there (CI), so that a broken renderer fails instead of skipping.
REQUIRED_VARIABLE = "CARPUS_REQUIRE_OPENGL"


def skip_without_opengl(error: BackendError) -> NoReturn:
    """Skip the running test with the reason; raise ``error`` where OpenGL is required."""
    if os.environ.get(REQUIRED_VARIABLE) == "1":
        raise error
    pytest.skip(f"no offscreen OpenGL here: {error}")
