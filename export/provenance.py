"""Where a bundle comes from: commit, checkpoint hash, package versions."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from carpus.runtime.spec import Provenance

__all__ = ["make_provenance"]

_PACKAGES = ("carpus", "torch", "onnx", "onnxscript", "onnxruntime", "openvino", "numpy", "opencv-python-headless")


def make_provenance(
    checkpoint_sha256: str | None, recipe: Mapping[str, str], *, created: datetime | None = None
) -> Provenance:
    """The record for a bundle that is being written now.

    Args:
        checkpoint_sha256: hash of the checkpoint file, or None for a module made in memory.
        recipe: how the weights were made.
        created: time of writing, with its zone; None reads the clock.
    """
    stamp = datetime.now(timezone.utc) if created is None else created
    return Provenance(
        created=stamp.isoformat(timespec="seconds"),
        git_commit=_git_commit(),
        checkpoint_sha256=checkpoint_sha256,
        packages={name: version for name in _PACKAGES if (version := _version(name))},
        recipe=dict(recipe),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _git_commit() -> str | None:
    """Commit of the checkout that this code runs from, "+dirty" when changed; None for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+dirty" if changed else commit


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
