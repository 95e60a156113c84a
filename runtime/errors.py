"""The errors Carpus raises on purpose.

Every message says what was wrong, where (file, field, index), what was expected and what to do about it.
"""

from __future__ import annotations

__all__ = ["BackendError", "BundleError", "CalibrationError", "CarpusError", "DataError", "RetargetError"]


class CarpusError(Exception):
    """Base of every error that Carpus raises deliberately; the command line turns it into one line and an exit code.

    Attributes:
        exit_code: process exit code the command line uses: 2 for wrong usage or input, 1 when the work itself failed.
    """

    exit_code = 2


class BundleError(CarpusError):
    """A bundle is missing, altered, of an unknown version, or contradicts itself."""


class BackendError(CarpusError):
    """An inference backend is not installed, cannot load an artefact, or failed while running."""


class CalibrationError(CarpusError):
    """A calibration is missing, degenerate or does not fit the data."""


class DataError(CarpusError):
    """Input data (images, annotations, arrays) cannot be used as given."""


class RetargetError(CarpusError):
    """A hand pose cannot be mapped to a robot hand."""
