"""Checks of the models against reference data: ``python -m tests.goldens DIR [DIR...]``."""
