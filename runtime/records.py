"""What a manifest records about its files: hashes, origin, parity and benchmarks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath
from typing import Literal

from carpus.runtime.codec import check_fields
from carpus.runtime.errors import BundleError

__all__ = ["Artefact", "BenchmarkRecord", "FileEntry", "ParityRecord", "Provenance", "Reference", "check_member_path"]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_FORBIDDEN = re.compile(r'[\x00-\x1f\\:*?"<>|]')


def check_member_path(path: str) -> str:
    """Return ``path`` when it names a file inside a bundle, in POSIX form.

    Raises:
        BundleError: it is absolute, climbs out with "..", or is not spelled in its plain form.
    """
    parts = PurePosixPath(path).parts
    plain = "/".join(parts)
    if not path or path.startswith("/") or ".." in parts or _FORBIDDEN.search(path):
        raise BundleError(f"path {path!r} leaves the bundle: expected a relative POSIX path without '..'")
    if plain != path or parts[0] == ".":
        raise BundleError(f"path {path!r}: expected its plain form {plain!r}")
    return path


def _check_sha256(value: str, where: str) -> None:
    if not _SHA256.fullmatch(value):
        raise BundleError(f"{where}: expected 64 lower-case hexadecimal digits, got {value!r}")


@dataclass(frozen=True)
class FileEntry:
    """One file of the bundle.

    Attributes:
        path: relative POSIX path inside the bundle.
        sha256: hash of its bytes, 64 hexadecimal digits.
        bytes: its size.
    """

    path: str
    sha256: str
    bytes: int

    def __post_init__(self) -> None:
        check_fields(self)
        check_member_path(self.path)
        _check_sha256(self.sha256, f"FileEntry.sha256 of {self.path!r}")
        if self.bytes < 0:
            raise BundleError(f"FileEntry.bytes of {self.path!r}: expected a size, got {self.bytes}")


@dataclass(frozen=True)
class Artefact:
    """One executable form of the model.

    Attributes:
        format: what it is, which decides the backends that can load it.
        precision: arithmetic of the weights.
        files: its files, the one to open first (model.onnx, model.xml, *.plan).
        opset: ONNX opset of the default domain, when the format is onnx.
        target: hardware it is bound to, when it is ("sm_87"); None runs anywhere.
        built_with: version of the tool whose version it is bound to, when it is (TensorRT plans).
    """

    format: Literal["onnx", "openvino", "tensorrt"]
    precision: Literal["fp32", "fp16", "int8"]
    files: tuple[FileEntry, ...]
    opset: int | None = None
    target: str | None = None
    built_with: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.files:
            raise BundleError(f"Artefact ({self.format} {self.precision}): expected at least one file, got none")

    @property
    def path(self) -> str:
        """Path of the file to open first."""
        return self.files[0].path


@dataclass(frozen=True)
class Reference:
    """Stored inputs and outputs that ``carpus verify`` runs every backend against.

    The file is an .npz with, for case ``i`` = 0..cases-1: ``image_<i>`` (H, W, 3) uint8 RGB and, for the outputs that
    the postprocessing names as logits and boxes, ``<output>_<i>`` as the trained module computed it from that image,
    without the batch axis.

    Attributes:
        file: the .npz.
        cases: number of images in it.
        source: what computed the outputs ("torch 2.9.0 cpu float32").
    """

    file: FileEntry
    cases: int
    source: str

    def __post_init__(self) -> None:
        check_fields(self)
        if self.cases < 1:
            raise BundleError(f"Reference.cases: expected at least 1, got {self.cases}")


@dataclass(frozen=True)
class Provenance:
    """Where the model comes from.

    Attributes:
        created: time of writing, ISO 8601 with offset.
        git_commit: commit of the exporting checkout, with "+dirty" when it was changed, or None outside one.
        checkpoint_sha256: hash of the checkpoint that was exported, or None.
        packages: version of every package that mattered, by name.
        recipe: command, configuration and seed that made the weights, as short strings by name.
    """

    created: str
    git_commit: str | None = None
    checkpoint_sha256: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    recipe: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            datetime.fromisoformat(self.created.replace("Z", "+00:00"))
        except ValueError:
            raise BundleError(
                f"Provenance.created: expected an ISO 8601 time such as 2026-01-31T12:00:00+00:00, got {self.created!r}"
            ) from None
        if self.checkpoint_sha256 is not None:
            _check_sha256(self.checkpoint_sha256, "Provenance.checkpoint_sha256")


@dataclass(frozen=True)
class ParityRecord:
    """How far one backend's answers lay from the trained module's, over a set of images.

    Attributes:
        backend: backend name ("onnxruntime", "openvino").
        backend_version: its version.
        precision: precision of the artefact.
        images: number of images compared.
        metrics: measured figures by name ("max_box_px", "max_score", "ap", "ap_reference").
        thresholds: greatest value allowed, for those metrics that decide.
        passed: whether every threshold was met.
        worst: the worst output, in words.
    """

    backend: str
    backend_version: str
    precision: Literal["fp32", "fp16", "int8"]
    images: int
    metrics: Mapping[str, float]
    thresholds: Mapping[str, float]
    passed: bool
    worst: str = ""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class BenchmarkRecord:
    """How fast one backend ran on one machine.

    Attributes:
        backend: backend name.
        backend_version: its version.
        precision: precision of the artefact.
        machine: processor or accelerator, in words.
        threads: threads the backend was allowed.
        metrics: milliseconds by name ("inference_p50_ms", "preprocess_p90_ms", ...).
    """

    backend: str
    backend_version: str
    precision: Literal["fp32", "fp16", "int8"]
    machine: str
    threads: int
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        check_fields(self)
