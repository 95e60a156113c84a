"""Sphinx configuration; warnings are errors in CI."""

from importlib.metadata import version as _version

project = "Carpus"
author = "The Carpus developers"
copyright = "2026, the Carpus developers"
version = release = _version("carpus")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"Carpus {release}"
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
suppress_warnings = ["myst.header"]
