"""``carpus verify``: every backend of this machine against the outputs that the trained module left in the bundle.

Needs neither torch nor onnx, so it runs on the robot itself.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from carpus.runtime.backends import BACKENDS
from carpus.runtime.bundle import Bundle
from carpus.runtime.detector import Detector
from carpus.runtime.errors import BackendError, BundleError
from carpus.runtime.parity import Answer, ImageErrors, compare, failure, make_answer, summarise
from carpus.runtime.parity_suppression import THRESHOLD_CASES, suppression_differences
from carpus.runtime.spec import Artefact, Manifest, ParityRecord, Postprocess, Preprocess
from carpus.runtime.thresholds import parity_limits
from carpus.runtime.transform import ImageTransform

__all__ = [
    "ReferenceCase",
    "VerifyReport",
    "VerifyRow",
    "detector_specs",
    "load_reference",
    "measure",
    "verify_bundle",
]


@dataclass(frozen=True)
class ReferenceCase:
    """One stored image and what the trained module said about it.

    Attributes:
        name: name for messages.
        image: (H, W, 3) uint8 RGB.
        answer: the trained module's answer.
    """

    name: str
    image: np.ndarray
    answer: Answer


@dataclass(frozen=True)
class VerifyRow:
    """One artefact on one backend.

    Attributes:
        backend: name of the backend.
        artefact: path of the artefact's first file.
        precision: precision of its weights.
        status: "passed", "failed" (above a threshold, or it could not run) or "absent" (not installed here).
        record: the measured errors; None when it did not run.
        reason: why it failed or is absent; empty when it passed.
    """

    backend: str
    artefact: str
    precision: str
    status: Literal["passed", "failed", "absent"]
    record: ParityRecord | None = None
    reason: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        path: the bundle.
        manifest: its manifest.
        files: files whose sha256 was checked.
        rows: one for each artefact on each backend that loads its format.
    """

    path: str
    manifest: Manifest
    files: tuple[str, ...]
    rows: tuple[VerifyRow, ...]

    @property
    def passed(self) -> bool:
        """Whether at least one backend ran and none failed."""
        return any(row.status == "passed" for row in self.rows) and not self.failures

    @property
    def failures(self) -> tuple[VerifyRow, ...]:
        """The rows that failed."""
        return tuple(row for row in self.rows if row.status == "failed")


def verify_bundle(
    path: str | os.PathLike[str],
    backends: Sequence[str] | None = None,
    *,
    num_threads: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Check a bundle's manifest, hashes and graphs, and run it on every backend against its stored reference.

    Args:
        path: the bundle's folder or .zip.
        backends: names to run, or None for all that Carpus knows; those not installed are reported as absent.
        num_threads: threads for one inference, or None for each backend's choice.
        progress: called with a line for every artefact before it is run.

    Raises:
        BundleError: a file is missing or altered, the manifest is wrong, or the bundle has no reference.
        BackendError: a name in ``backends`` is unknown.
    """
    for name in backends or ():
        if name not in BACKENDS:
            raise BackendError(f"backends: expected some of {', '.join(BACKENDS)}, got {name!r}")
    with Bundle.open(path) as bundle:
        files = bundle.verify()
        manifest = bundle.manifest
        cases = load_reference(bundle)
    rows = []
    for name in backends or BACKENDS:
        for artefact in manifest.artefacts:
            if artefact.format == _best_format(name, manifest):
                if progress is not None:
                    progress(f"{name}: {artefact.path} ({artefact.precision})")
                rows.append(_verify_one(path, name, artefact, cases, num_threads))
    return VerifyReport(str(path), manifest, files, tuple(rows))


def load_reference(bundle: Bundle) -> list[ReferenceCase]:
    """The stored images and answers of a bundle.

    Raises:
        BundleError: there are none, or the file is not what the manifest says.
    """
    manifest, reference = bundle.manifest, bundle.manifest.reference
    where = f"bundle {str(bundle.path)!r}"
    if manifest.kind != "detector":
        raise BundleError(f"{where}: holds a {manifest.kind}; this Carpus verifies detectors only")
    if reference is None:
        raise BundleError(f"{where}: has no stored reference to verify against; export it again with `carpus export`")
    where = f"{where}: {reference.file.path!r}"
    preprocess, spec = detector_specs(manifest)
    cases = []
    try:
        with np.load(io.BytesIO(bundle.read(reference.file)), allow_pickle=False) as stored:
            for index in range(reference.cases):
                image = stored[f"image_{index}"]
                logits, boxes = stored[f"{spec.logits}_{index}"], stored[f"{spec.boxes}_{index}"]
                if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                    raise BundleError(
                        f"{where}: image_{index} must be uint8 (H, W, 3), it is {image.dtype} {image.shape}"
                    )
                if logits.shape != (len(boxes), len(manifest.classes)) or boxes.shape != (len(logits), 4):
                    raise BundleError(
                        f"{where}: case {index} has logits {logits.shape} and boxes {boxes.shape}; expected "
                        f"(Q, {len(manifest.classes)}) and (Q, 4)"
                    )
                answer = make_answer(logits, boxes, preprocess.transform(image.shape[:2]), spec, manifest.class_names)
                cases.append(ReferenceCase(f"reference image {index}", image, answer))
    except KeyError as error:
        raise BundleError(f"{where}: lacks the array {error!s}; export the bundle again") from None
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise BundleError(f"{where}: cannot be read as .npz ({error})") from None
    return cases


def measure(
    path: str | os.PathLike[str],
    backend: str,
    precision: Literal["fp32", "fp16", "int8"],
    cases: Sequence[ReferenceCase],
    *,
    num_threads: int | None = None,
) -> ParityRecord:
    """Run one artefact of a bundle on images through the whole chain and compare with the trained module's answers.

    Args:
        path: the bundle.
        backend: backend to run.
        precision: precision of the artefact to run.
        cases: images with the trained module's answers.
        num_threads: threads for one inference.

    Raises:
        BackendError: the backend is not installed, cannot load the artefact or answers NaN.
        BundleError: an altered file, or a graph that the manifest does not describe.
        ParityError: the artefact is of a model of other sizes.
    """
    limits = parity_limits(precision)
    errors: list[ImageErrors] = []
    with Detector.open(path, backend, precision=precision, num_threads=num_threads) as detector:
        manifest = detector.manifest
        _, spec = detector_specs(manifest)
        version = detector.backend.version
        for index, case in enumerate(cases):
            outputs, transforms, differs = _run_case(detector, spec, case.image, index)
            answer = make_answer(
                outputs[spec.logits][0], outputs[spec.boxes][0], transforms[0], spec, manifest.class_names
            )
            errors.append(compare(case.answer, answer, limits, case.name, suppression_differs=differs))
    return summarise(errors, backend=backend, backend_version=version, precision=precision)


def _run_case(
    detector: Detector, spec: Postprocess, image: np.ndarray, index: int
) -> tuple[dict[str, np.ndarray], list[ImageTransform], int | None]:
    """A graph's outputs for an image; where it suppresses, with thresholds in turn, and what it got wrong there."""
    if not spec.in_graph:
        return *detector.raw([image]), None
    thresholds = THRESHOLD_CASES[index % len(THRESHOLD_CASES)] or (spec.score_threshold, spec.iou_threshold)
    detector.score_threshold, detector.iou_threshold = thresholds
    outputs, transforms = detector.raw([image])
    return outputs, transforms, suppression_differences(outputs, 0, spec, transforms[0].model_size, *thresholds)


def detector_specs(manifest: Manifest) -> tuple[Preprocess, Postprocess]:
    """A detector's preprocessing and postprocessing.

    Raises:
        BundleError: the manifest is not a detector's.
    """
    if manifest.preprocess is None or manifest.postprocess is None:
        raise BundleError(f"bundle of {manifest.name!r}: holds a {manifest.kind}, not a detector")
    return manifest.preprocess, manifest.postprocess


def _best_format(backend: str, manifest: Manifest) -> str | None:
    """The format that this backend takes of this bundle."""
    has = {artefact.format for artefact in manifest.artefacts}
    return next((item for item in BACKENDS[backend].formats if item in has), None)


def _verify_one(
    path: str | os.PathLike[str],
    backend: str,
    artefact: Artefact,
    cases: Sequence[ReferenceCase],
    num_threads: int | None,
) -> VerifyRow:
    row = VerifyRow(backend, artefact.path, artefact.precision, "absent")
    info = BACKENDS[backend]
    if not info.installed:
        return _with(row, "absent", f"the package {info.package!r} is not installed; {info.install}")
    try:
        record = measure(path, backend, artefact.precision, cases, num_threads=num_threads)
    except (BackendError, ImportError) as error:
        return _with(row, "failed", str(error))
    if record.passed:
        return _with(row, "passed", "", record)
    return _with(row, "failed", failure(record), record)


def _with(
    row: VerifyRow,
    status: Literal["passed", "failed", "absent"],
    reason: str,
    record: ParityRecord | None = None,
) -> VerifyRow:
    return VerifyRow(row.backend, row.artefact, row.precision, status, record, reason)
