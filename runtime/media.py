"""Inputs named on a command line: images, folders, patterns and videos."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from carpus.runtime.errors import DataError

__all__ = ["IMAGE_SUFFIXES", "VIDEO_SUFFIXES", "MediaFile", "find_media"]

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
"""File name endings that are taken for images, in lower case."""
VIDEO_SUFFIXES = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"})
"""File name endings that are taken for videos, in lower case."""


class MediaFile(NamedTuple):
    """One file to look at.

    Attributes:
        path: the file.
        name: short name that is unique among the files found, with "/" between folders; results are filed under it.
        video: whether it is a video.
    """

    path: Path
    name: str
    video: bool


def find_media(inputs: Iterable[str | os.PathLike[str]], *, recursive: bool = True) -> list[MediaFile]:
    """Find images and videos.

    Args:
        inputs: files, folders, or patterns with ``*``, ``?``, ``[...]`` or ``**``. What exists under the literal name
            is never read as a pattern.
        recursive: whether folders are searched to the bottom.

    Returns:
        The files, each once; those of a folder or pattern in the order of their names.

    Raises:
        DataError: nothing matches an input, or a file named outright is neither an image nor a video.
    """
    found: dict[Path, tuple[Path, Path | None]] = {}
    for item in inputs:
        if not str(item):
            raise DataError("input '': expected a file, folder or pattern, got an empty name; '.' is this folder")
        path = Path(item)
        if path.is_dir():
            files = sorted(file for file in path.glob("**/*" if recursive else "*") if _kind(file) and file.is_file())
            if not files:
                raise DataError(f"input {str(item)!r}: the folder holds no image and no video")
            root: Path | None = path
        elif path.exists():
            if _kind(path) is None:
                raise DataError(
                    f"input {str(item)!r}: neither an image ({', '.join(sorted(IMAGE_SUFFIXES))}) nor a video "
                    f"({', '.join(sorted(VIDEO_SUFFIXES))}) by its name"
                )
            files, root = [path], None
        else:
            files = sorted(Path(name) for name in glob.glob(str(item), recursive=True) if _kind(Path(name)))
            root = None
            if not files:
                pattern = any(mark in str(item) for mark in "*?[")
                raise DataError(
                    f"input {str(item)!r}: {'no image or video matches the pattern' if pattern else 'no such file'}"
                )
        for file in files:
            found.setdefault(file.resolve(), (file, root))
    taken: set[str] = set()
    media = []
    for file, root in found.values():
        name = file.relative_to(root).as_posix() if root is not None else file.name
        stem, suffix, number = name, Path(name).suffix, 1
        while name in taken:
            number += 1
            name = f"{stem.removesuffix(suffix)}_{number}{suffix}"
        taken.add(name)
        media.append(MediaFile(file, name, _kind(file) == "video"))
    return media


def _kind(path: Path) -> str | None:
    suffix = path.suffix.lower()
    if suffix in IMAGE_SUFFIXES:
        return "image"
    return "video" if suffix in VIDEO_SUFFIXES else None
