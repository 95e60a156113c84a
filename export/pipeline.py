"""A trained detector to a verified bundle, or to nothing.

The bundle is first written to a temporary folder, opened there as a robot opens it, and held against the trained
module on real pictures: preprocessing, graph and postprocessing together. Only then is it written to its place.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

import onnx
import torch
from torch import nn

from carpus.export.families import get_family
from carpus.export.images import ParityImage, procedural_images, shrink
from carpus.export.onnx import OPSET, export_onnx, with_metadata
from carpus.export.openvino import export_openvino
from carpus.export.parity import TorchReference, check_bundle, pack_reference, reference_cases
from carpus.export.provenance import make_provenance
from carpus.export.suppression import with_suppression
from carpus.export.writer import BundleWriter
from carpus.runtime.errors import DataError
from carpus.runtime.metadata import manifest_metadata
from carpus.runtime.parity import ParityError, failure
from carpus.runtime.spec import (
    Artefact,
    ClassInfo,
    FileEntry,
    Manifest,
    ParityRecord,
    Postprocess,
    Preprocess,
    Reference,
    TensorSpec,
)

__all__ = ["ExportSource", "Exported", "OpenVinoPrecision", "export_bundle", "export_network"]

_DTYPES: dict[int, Literal["float32", "int64"]] = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.INT64: "int64"}
OpenVinoPrecision = Literal["fp32", "fp16"]

_REFERENCE_CASES = 3
_REFERENCE_SIDE = 320  # longest side of a stored picture [px]
_PROCEDURAL_IMAGES = 8


@dataclass(frozen=True)
class ExportSource:
    """A trained detector and all that is known about it.

    Attributes:
        module: the trained network, as training evaluates it (not fused).
        family: architecture family.
        variant: member of the family.
        input_size: (height, width) that it was trained for [px].
        classes: classes in the order of the class logits.
        name: short name for people.
        licence: SPDX expression of the weights.
        description: one paragraph for people.
        checkpoint_sha256: hash of the file the weights came from.
        recipe: how the weights were made, as short strings.
    """

    module: nn.Module
    family: str
    variant: str
    input_size: tuple[int, int]
    classes: tuple[ClassInfo, ...]
    name: str
    licence: str = "Apache-2.0"
    description: str = ""
    checkpoint_sha256: str | None = None
    recipe: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for field_name in ("name", "licence"):
            if not getattr(self, field_name).strip():
                raise DataError(f"{field_name}: expected some text, got {getattr(self, field_name)!r}")


@dataclass(frozen=True)
class Exported:
    """A bundle that was written.

    Attributes:
        path: where.
        manifest: its manifest, with the parity records.
    """

    path: Path
    manifest: Manifest

    @property
    def parity(self) -> tuple[ParityRecord, ...]:
        """What the gate measured."""
        return self.manifest.parity


def export_network(source: ExportSource) -> onnx.ModelProto:
    """The graph of a source in its deployed form, without metadata.

    Raises:
        BackendError: the network cannot be exported.
        DataError: unknown family.
    """
    family = get_family(source.family)
    network = export_onnx(family.deploy(source.module), source.input_size)
    if family.postprocess.in_graph:
        network = with_suppression(network, source.input_size, family.postprocess)
    return network


def export_bundle(
    source: ExportSource,
    out: Path,
    *,
    images: Sequence[ParityImage] | None = None,
    openvino: Sequence[OpenVinoPrecision] = ("fp32", "fp16"),
    score_threshold: float | None = None,
    iou_threshold: float | None = None,
    preprocess: Preprocess | None = None,
    network: onnx.ModelProto | None = None,
    num_threads: int | None = None,
    created: datetime | None = None,
    progress: Callable[[str], None] | None = None,
) -> Exported:
    """Export a detector, check the result against it, and write the bundle.

    Args:
        source: the trained detector.
        out: target; a name that ends in ".zip" makes a .zip, any other a folder. An older bundle there stays whole
            until the new one has passed.
        images: pictures for the parity gate; None draws some.
        openvino: precisions of the OpenVINO artefacts; empty writes the ONNX artefact alone.
        score_threshold: default score threshold of the bundle; None takes the family's own.
        iou_threshold: default IoU threshold of its suppression; None takes the family's own.
        preprocess: what the bundle is to state as its preprocessing; None takes the family's own, the one that the
            gate's reference always uses. Another one than that must fail the gate.
        network: this source's graph when it was exported before (see `export_network`); None exports it now.
        num_threads: threads for the gate's inferences.
        created: time to write into the bundle; None reads the clock.
        progress: called with a line at each step.

    Returns:
        The bundle's path and manifest.

    Raises:
        ParityError: an exported form does not compute what the module does; the worst output is named and nothing is
            written.
        BackendError: the network cannot be exported.
        BundleError: the target cannot be written.
        DataError: unknown family, no pictures, or an IoU threshold for a family that suppresses nothing.
    """
    say = progress if progress is not None else _silent
    family = get_family(source.family)
    pictures = list(procedural_images(_PROCEDURAL_IMAGES) if images is None else images)
    if not pictures:
        raise DataError("export: expected at least one picture for the parity gate, got none")
    # What cannot be used is refused before the long work.
    BundleWriter(out).probe()
    spec = _with_thresholds(source.family, family.postprocess, score_threshold, iou_threshold)

    if network is None:
        say(f"exporting {source.family} {source.variant} to ONNX, opset {OPSET}")
        network = export_network(source)
    trained = family.preprocess(source.module, source.input_size)
    draft = _draft(source, network, trained if preprocess is None else preprocess, spec, created)
    metadata = manifest_metadata(draft, stride=family.stride)
    forms = [_Form("onnx", "fp32", {"model.onnx": with_metadata(network, metadata)}, OPSET)]
    for precision in openvino:
        say(f"converting to OpenVINO {precision}")
        exact = family.exact_weights(source.module) if precision == "fp16" else []
        xml, weights = export_openvino(network.SerializeToString(), metadata, precision, exact=exact)
        folder = "openvino" if precision == "fp32" else f"openvino-{precision}"
        forms.append(_Form("openvino", precision, {f"{folder}/model.xml": xml, f"{folder}/model.bin": weights}))

    reference = TorchReference(source.module, trained, spec, draft.class_names)
    stored = [shrink(picture, _REFERENCE_SIDE) for picture in pictures[:_REFERENCE_CASES]]
    say(f"asking the trained module about {len(pictures) + len(stored)} pictures")
    cases = reference_cases(reference, [*pictures, *stored])
    content = _Content(tuple(forms), pack_reference(reference, stored), len(stored))
    with tempfile.TemporaryDirectory(prefix="carpus-export-") as scratch:
        staging = Path(scratch) / "candidate.carpus"
        candidate = content.write(staging, draft)
        parity = check_bundle(
            staging, candidate, cases, num_threads=num_threads, progress=lambda record: say(_parity_line(record))
        )
    failed = [record for record in parity if not record.passed]
    if failed:
        wide = any(record.precision == "fp32" for record in failed)
        advice = "" if wide else "; without the fp16 artefact (--precision fp32) all forms pass"
        raise ParityError(f"{failure(failed[0])}; no bundle was written{advice}", parity)
    manifest = content.write(out, replace(draft, parity=parity))
    say(f"wrote {out}")
    return Exported(out, manifest)


@dataclass(frozen=True)
class _Form:
    """One artefact's files, in memory."""

    format: Literal["onnx", "openvino"]
    precision: OpenVinoPrecision
    files: dict[str, bytes]
    opset: int | None = None


@dataclass(frozen=True)
class _Content:
    """All files of the bundle, in memory."""

    forms: tuple[_Form, ...]
    reference: bytes
    cases: int

    def write(self, path: Path, draft: Manifest) -> Manifest:
        """Write a bundle of these files; returns its manifest."""
        with BundleWriter(path) as writer:
            artefacts = tuple(
                writer.add_artefact(form.format, form.precision, form.files, opset=form.opset) for form in self.forms
            )
            entry = writer.add("reference.npz", self.reference)
            source = f"torch {torch.__version__} cpu float32"
            manifest = replace(draft, artefacts=artefacts, reference=Reference(entry, self.cases, source))
            writer.finish(manifest)
        return manifest


def _with_thresholds(family: str, spec: Postprocess, score: float | None, iou: float | None) -> Postprocess:
    if score is not None:
        spec = replace(spec, score_threshold=score)
    if iou is None:
        return spec
    if spec.kind != "nms":
        raise DataError(f"iou_threshold: {family} has no non-maximum suppression; leave it out")
    return replace(spec, iou_threshold=iou)


def _draft(
    source: ExportSource,
    network: onnx.ModelProto,
    preprocess: Preprocess,
    spec: Postprocess,
    created: datetime | None,
) -> Manifest:
    """The manifest as far as it is known before anything is written; its one artefact is a placeholder."""
    placeholder = Artefact("onnx", "fp32", (FileEntry("model.onnx", "0" * 64, 0),), opset=OPSET)
    return Manifest(
        kind="detector",
        name=source.name,
        family=source.family,
        variant=source.variant,
        licence=source.licence,
        inputs=tuple(_tensor_spec(value) for value in network.graph.input),
        outputs=tuple(_tensor_spec(value) for value in network.graph.output),
        provenance=make_provenance(source.checkpoint_sha256, dict(source.recipe), created=created),
        artefacts=(placeholder,),
        preprocess=preprocess,
        postprocess=spec,
        classes=source.classes,
        description=source.description,
    )


def _tensor_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    """What the graph states about an input or output."""
    sizes = tuple(size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim)
    tensor = value.type.tensor_type
    return TensorSpec(value.name, _DTYPES[tensor.elem_type], sizes)


def _parity_line(record: ParityRecord) -> str:
    verdict = "passed" if record.passed else "FAILED"
    return (
        f"{record.backend} {record.precision}: boxes {record.metrics['max_box_px']:.2g} px, scores "
        f"{record.metrics['max_score']:.2g}, {record.images} pictures: {verdict}"
    )


def _silent(line: str) -> None:
    """Say nothing."""
