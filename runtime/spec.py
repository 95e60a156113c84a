"""The manifest of a bundle, and all the spec types it is made of.

This is the module to import specs from; the classes live in :mod:`~carpus.runtime.iospec` (tensors, pre- and
postprocessing, classes) and :mod:`~carpus.runtime.records` (files, provenance, parity, benchmarks).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from carpus.runtime.codec import check_fields, decode, encode, json_schema
from carpus.runtime.errors import BundleError
from carpus.runtime.iospec import (
    DETECTION_OUTPUTS,
    THRESHOLD_INPUTS,
    ClassInfo,
    Postprocess,
    Preprocess,
    TensorSpec,
)
from carpus.runtime.records import (
    Artefact,
    BenchmarkRecord,
    FileEntry,
    ParityRecord,
    Provenance,
    Reference,
    check_member_path,
)

__all__ = [
    "MANIFEST_NAME",
    "SCHEMA_VERSION",
    "Artefact",
    "BenchmarkRecord",
    "ClassInfo",
    "FileEntry",
    "Manifest",
    "ParityRecord",
    "Postprocess",
    "Preprocess",
    "Provenance",
    "Reference",
    "TensorSpec",
    "check_member_path",
    "manifest_schema",
]

SCHEMA_VERSION = 1
"""Version of the manifest's layout that this Carpus reads and writes."""

MANIFEST_NAME = "manifest.json"
"""File name of the manifest inside a bundle."""


@dataclass(frozen=True)
class Manifest:
    """All there is to know about a deployable model.

    Attributes:
        kind: what the model does.
        name: short name for people ("tabletop").
        family: architecture family ("deimv2").
        variant: member of the family ("atto").
        licence: SPDX expression of the weights ("Apache-2.0").
        inputs: the graph's inputs, in its order.
        outputs: the graph's outputs, in its order.
        provenance: where the model comes from.
        artefacts: its executable forms; empty only in a draft, before export has made them.
        preprocess: image to input; required for a detector.
        postprocess: outputs to detections; required for a detector.
        classes: classes by model class id; required for a detector.
        reference: stored inputs and outputs, for verification.
        parity: what verification measured when the bundle was written.
        benchmarks: speeds measured when the bundle was written.
        description: one paragraph for people.
        schema_version: layout of the manifest.
    """

    kind: Literal["detector", "policy", "hand_pose"]
    name: str
    family: str
    variant: str
    licence: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    provenance: Provenance
    artefacts: tuple[Artefact, ...]
    preprocess: Preprocess | None = None
    postprocess: Postprocess | None = None
    classes: tuple[ClassInfo, ...] = ()
    reference: Reference | None = None
    parity: tuple[ParityRecord, ...] = ()
    benchmarks: tuple[BenchmarkRecord, ...] = ()
    description: str = ""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        check_fields(self)
        if self.schema_version != SCHEMA_VERSION:
            raise BundleError(_version_message("Manifest", self.schema_version))
        for field_name in ("name", "family", "variant", "licence", "inputs", "outputs"):
            if not getattr(self, field_name):
                raise BundleError(f"Manifest.{field_name}: expected a value, got an empty one")
        for group in ("inputs", "outputs"):
            names = [spec.name for spec in getattr(self, group)]
            if len(set(names)) != len(names):
                raise BundleError(f"Manifest.{group}: expected distinct names, got {names}")
        stated: dict[str, FileEntry] = {}
        for entry in self.files:
            if stated.setdefault(entry.path, entry) != entry:
                raise BundleError(f"Manifest.artefacts: {entry.path!r} is listed twice with different hashes")
        if self.kind == "detector":
            self._check_detector()

    def _check_detector(self) -> None:
        if self.preprocess is None or self.postprocess is None or not self.classes:
            raise BundleError("Manifest: a detector needs preprocess, postprocess and at least one class")
        names = [info.name for info in self.classes]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise BundleError(f"Manifest.classes: expected distinct names, {repeated[0]!r} is there twice")
        scalars = THRESHOLD_INPUTS if self.postprocess.in_graph else ()
        if [spec.name for spec in self.inputs[1:]] != list(scalars):
            besides = f" and the inputs {', '.join(scalars)} of its suppression" if scalars else ""
            raise BundleError(
                f"Manifest.inputs: a detector takes one image input{besides}, got "
                f"{', '.join(spec.name for spec in self.inputs)}"
            )
        for spec in self.inputs[1:]:
            if spec.dtype != "float32" or spec.shape != (1,):
                raise BundleError(f"Manifest.inputs: {spec.name!r} must be float32 (1,), got {spec.dtype} {spec.shape}")
        image = self.inputs[0]
        wanted = (3, *self.preprocess.size)
        if image.dtype != "float32" or len(image.shape) != 4:
            raise BundleError(
                f"Manifest.inputs[0]: a detector takes float32 (N, 3, H, W), got {image.dtype} {image.shape}"
            )
        for axis, (stated, size) in enumerate(zip(image.shape[1:], wanted, strict=True), start=1):
            if isinstance(stated, int) and stated != size:
                raise BundleError(
                    f"Manifest.inputs[0]: axis {axis} is {stated} but preprocess gives {size}; the two must agree"
                )
        outputs = {spec.name: spec for spec in self.outputs}
        for role, width in (("logits", len(self.classes)), ("boxes", 4)):
            name = getattr(self.postprocess, role)
            if name not in outputs:
                raise BundleError(
                    f"Manifest.postprocess.{role}: no output is named {name!r}; the outputs are {', '.join(outputs)}"
                )
            shape = outputs[name].shape
            if len(shape) != 3 or (isinstance(shape[2], int) and shape[2] != width):
                raise BundleError(f"Manifest.outputs: {name!r} must have shape (N, Q, {width}), got {shape}")
        if self.postprocess.in_graph:
            lacking = [name for name in DETECTION_OUTPUTS if name not in outputs]
            if lacking:
                raise BundleError(
                    f"Manifest.outputs: a graph that suppresses gives {', '.join(DETECTION_OUTPUTS)}; "
                    f"{lacking[0]!r} is missing"
                )
            for name, dtype, rank in zip(
                DETECTION_OUTPUTS, ("int64", "float32", "float32", "int64"), (1, 3, 2, 2), strict=True
            ):
                if outputs[name].dtype != dtype or len(outputs[name].shape) != rank:
                    raise BundleError(
                        f"Manifest.outputs: {name!r} must be {dtype} with {rank} dimensions, got "
                        f"{outputs[name].dtype} {outputs[name].shape}"
                    )

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file that the manifest lists, artefacts first."""
        entries = [entry for artefact in self.artefacts for entry in artefact.files]
        if self.reference is not None:
            entries.append(self.reference.file)
        return tuple(entries)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names by model class id."""
        return tuple(info.name for info in self.classes)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, ``schema_version`` first."""
        data = encode(self)
        return {"schema_version": data.pop("schema_version"), **data}

    def dumps(self) -> str:
        """The text of ``manifest.json``: indented, UTF-8, same manifest same text."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, data: Any, where: str = MANIFEST_NAME) -> Manifest:
        """Build a manifest from what ``json.load`` returned.

        Raises:
            BundleError: unknown schema version, or a field that is missing, unknown, mistyped or contradictory.
        """
        if not isinstance(data, Mapping):
            raise BundleError(f"{where}: expected a JSON object, got {type(data).__name__}")
        version = data.get("schema_version")
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise BundleError(_version_message(where, version))
        try:
            return decode(cls, data, where)
        except BundleError as error:
            message = str(error)
            raise BundleError(message if message.startswith(where) else f"{where}: {message}") from None

    @classmethod
    def loads(cls, text: str | bytes, where: str = MANIFEST_NAME) -> Manifest:
        """Build a manifest from the text of ``manifest.json``.

        Raises:
            BundleError: not JSON, or not a manifest.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{where}: not a JSON file ({error})") from None
        return cls.from_json(data, where)


def _version_message(where: str, version: Any) -> str:
    return (
        f"{where}: schema version {version!r} is unknown, this Carpus reads version {SCHEMA_VERSION}; "
        "export the bundle again or install the Carpus that wrote it"
    )


def manifest_schema() -> dict[str, Any]:
    """The JSON schema of ``manifest.json``, as published in ``runtime/schema/manifest-1.json``."""
    schema = json_schema(
        Manifest,
        title=f"Carpus bundle manifest, version {SCHEMA_VERSION}",
        schema_id=f"https://carpus.readthedocs.io/schema/manifest-{SCHEMA_VERSION}.json",
    )
    schema["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    schema["required"] = ["schema_version", *schema["required"]]
    return schema
