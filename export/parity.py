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
from carpus.runtime.errors import BackendError
from carpus.runtime.parity import ParityError, make_answer
from carpus.runtime.preprocess import Preprocessor
from carpus.runtime.spec import Manifest, ParityRecord, Postprocess, Preprocess
from carpus.runtime.verify import ReferenceCase, measure

__all__ = ["TorchReference", "check_bundle", "pack_reference", "reference_cases"]


class TorchReference:
    """The trained module as the reference: in eval mode, not fused, with the preprocessing it was trained with.

    Args:
        module: gives ``pred_logits`` and ``pred_boxes``; put into eval mode while it is asked.
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
        """The module's outputs for one picture, without the batch axis."""
        tensor, _ = self._preprocessor(image.pixels)
        was_training = self._module.training
        self._module.eval()
        try:
            with torch.inference_mode():
                found = self._module(torch.from_numpy(tensor))
        finally:
            self._module.train(was_training)
        return {name: found[name][0].float().cpu().numpy() for name in (self._spec.logits, self._spec.boxes)}

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
        The records, all passed.

    Raises:
        ParityError: a backend lies above a limit, answers NaN, cannot run the artefact, or none is installed.
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
            records.append(record)
            if progress is not None:
                progress(record)
    if not records:
        raise ParityError(
            "no backend is installed that could check the export; pip install 'carpus[export]' brings onnxruntime and "
            "openvino"
        )
    return tuple(records)
