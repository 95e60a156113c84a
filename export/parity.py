"""The gate: what the trained module says about a set of pictures, and what the written bundle says about them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from carpus.export.images import ParityImage
from carpus.runtime.backends import BACKENDS
from carpus.runtime.detector import Detector
from carpus.runtime.errors import BackendError
from carpus.runtime.parity import ParityError, compare, failure, make_answer, summarise
from carpus.runtime.parity_suppression import suppression_differences
from carpus.runtime.preprocess import Preprocessor
from carpus.runtime.spec import Artefact, Manifest, ParityRecord, Postprocess, Preprocess
from carpus.runtime.thresholds import parity_limits
from carpus.runtime.verify import ReferenceCase, detector_specs, measure

__all__ = ["TorchReference", "check_bundle", "pack_reference", "reference_cases"]

_BATCH = 3  # neither 1 nor the exporter's example of 2


class TorchReference:
    """The trained module as the reference: in eval mode, not fused, with the preprocessing it was trained with.

    Args:
        module: gives ``pred_logits`` and ``pred_boxes``, before suppression; put into eval mode while it is asked.
        preprocess: how images entered it in training.
        spec: how its outputs are read.
        class_names: its classes.
    """

    def __init__(
        self, module: nn.Module, preprocess: Preprocess, spec: Postprocess, class_names: tuple[str, ...]
    ) -> None:
        self._module = module
        self._preprocessor = Preprocessor(preprocess)
        self._spec = spec
        self._class_names = class_names

    def outputs(self, image: ParityImage) -> dict[str, np.ndarray]:
        """The module's outputs for one picture, without the batch axis, named and activated as the graph's are."""
        tensor, _ = self._preprocessor(image.pixels)
        was_training = self._module.training
        self._module.eval()
        try:
            with torch.inference_mode():
                found = self._module(torch.from_numpy(tensor))
        finally:
            self._module.train(was_training)
        logits, boxes = (found[name][0].float().cpu() for name in ("pred_logits", "pred_boxes"))
        scores = logits.sigmoid() if self._spec.activation == "none" else logits
        return {self._spec.logits: scores.numpy(), self._spec.boxes: boxes.numpy()}

    def case(self, image: ParityImage) -> ReferenceCase:
        """The picture with the module's answer.

        Raises:
            BackendError: the module itself answers NaN or infinity.
        """
        outputs = self.outputs(image)
        size = (image.pixels.shape[0], image.pixels.shape[1])
        answer = make_answer(
            outputs[self._spec.logits],
            outputs[self._spec.boxes],
            self._preprocessor.spec.transform(size),
            self._spec,
            self._class_names,
        )
        return ReferenceCase(image.name, image.pixels, answer)


def reference_cases(
    reference: TorchReference, images: Sequence[ParityImage], progress: Callable[[int, int], None] | None = None
) -> list[ReferenceCase]:
    """The trained module's answers to some pictures; ``progress`` hears (done, in all)."""
    cases = []
    for image in images:
        cases.append(reference.case(image))
        if progress is not None:
            progress(len(cases), len(images))
    return cases


def pack_reference(reference: TorchReference, images: Sequence[ParityImage]) -> bytes:
    """Pictures and the trained module's outputs as an .npz, in the layout of ``carpus.runtime.spec.Reference``."""
    arrays: dict[str, np.ndarray] = {}
    for index, image in enumerate(images):
        arrays[f"image_{index}"] = image.pixels
        for name, values in reference.outputs(image).items():
            arrays[f"{name}_{index}"] = values
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def check_bundle(
    path: Path,
    manifest: Manifest,
    cases: Sequence[ReferenceCase],
    *,
    num_threads: int | None = None,
    progress: Callable[[ParityRecord], None] | None = None,
) -> tuple[ParityRecord, ...]:
    """Run every artefact of a bundle on every backend that loads its format, and hold it to the limits.

    Args:
        path: the bundle, as it is to be shipped.
        manifest: its manifest.
        cases: pictures with the trained module's answers.
        num_threads: threads for one inference.
        progress: called with every record.

    Returns:
        The records; whether each passed stands in it.

    Raises:
        ParityError: a backend answers NaN, cannot run the artefact or treats a batch unlike its images, or no backend
            is installed.
    """
    records = []
    for artefact in manifest.artefacts:
        for name, info in BACKENDS.items():
            if artefact.format != info.formats[0] or not info.installed:
                continue
            try:
                record = measure(path, name, artefact.precision, cases, num_threads=num_threads)
            except BackendError as error:
                raise ParityError(f"{name}, {artefact.path} ({artefact.precision}): {error}") from error
            if record.passed:
                _check_batch(path, name, artefact, cases, num_threads)
            records.append(record)
            if progress is not None:
                progress(record)
    if not records:
        raise ParityError(
            "no backend is installed that could check the export; pip install 'carpus[export]' brings onnxruntime and "
            "openvino"
        )
    return tuple(records)


def _check_batch(
    path: Path, backend: str, artefact: Artefact, cases: Sequence[ReferenceCase], num_threads: int | None
) -> None:
    """Hold a batch to what the same images give one by one.

    An exporter that takes the batch size of its example for a constant writes a graph that is right for one image.

    Raises:
        ParityError: an image's answer depends on its neighbours or on their number.
    """
    images = [case.image for case in cases[:_BATCH]] * _BATCH  # however few there are
    limits = parity_limits(artefact.precision)
    with Detector.open(path, backend, precision=artefact.precision, num_threads=num_threads) as detector:
        preprocess, spec = detector_specs(detector.manifest)
        tensor, transforms = preprocess(images[:_BATCH])
        try:
            together = detector.backend.run(tensor)
        except BackendError as error:
            raise ParityError(f"{backend}, {artefact.path}: a batch of {_BATCH} cannot be run: {error}") from error
        for index, transform in enumerate(transforms):
            alone = detector.backend.run(tensor[index : index + 1])
            one, among = (
                make_answer(found[spec.logits][at], found[spec.boxes][at], transform, spec, detector.class_names)
                for found, at in ((alone, 0), (together, index))
            )
            differs = None
            if spec.in_graph:
                thresholds = spec.score_threshold, spec.iou_threshold
                differs = suppression_differences(together, index, spec, transform.model_size, *thresholds)
            where = f"image {index} of a batch of {_BATCH}"
            errors = compare(one, among, limits, where, suppression_differs=differs)
            record = summarise(
                [errors], backend=backend, backend_version=detector.backend.version, precision=artefact.precision
            )
            if not record.passed:
                raise ParityError(f"{failure(record)}, against the same image alone; no bundle was written")
