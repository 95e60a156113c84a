"""What every inference backend offers, and the check that a graph is the one its manifest describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from carpus.runtime.errors import BackendError, BundleError
from carpus.runtime.iospec import THRESHOLD_INPUTS
from carpus.runtime.spec import Manifest, TensorSpec

__all__ = ["Backend", "GraphTensor", "check_graph", "check_input", "resolve_shape", "scalar_inputs"]


class GraphTensor(NamedTuple):
    """One input or output as the loaded graph itself states it; None marks a dynamic size."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


class Backend(Protocol):
    """A loaded model with one image input, ready to run.

    Buffers belong to the backend: fill :meth:`input_buffer`, call :meth:`infer`, and use the outputs before the next
    call. One thread at a time.

    Attributes:
        name: name in the table of backends.
        version: version of the package that runs the model.
        device: what it runs on, in words.
        precision: precision of the loaded artefact.
        num_threads: threads that it was allowed, 0 for its own choice.
        scalars: (1,) float32 buffers of the graph's further inputs by name, which the next :meth:`infer` reads; they
            start with the manifest's own values.
    """

    name: str
    version: str
    device: str
    precision: str
    num_threads: int
    scalars: Mapping[str, np.ndarray]

    def input_buffer(self, batch: int) -> np.ndarray:
        """The (batch, 3, H, W) float32 buffer that the next :meth:`infer` of this batch size reads."""
        ...

    def infer(self, batch: int) -> dict[str, np.ndarray]:
        """Run on the input buffer of this batch size; views of the outputs by name, valid until the next call."""
        ...

    def run(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        """Run on a tensor (batch, 3, H, W) float32; the outputs are the caller's own copies."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


def check_graph(manifest: Manifest, inputs: Sequence[GraphTensor], outputs: Sequence[GraphTensor], where: str) -> None:
    """Refuse a graph that is not the one the manifest describes.

    Args:
        manifest: the bundle's manifest.
        inputs: the graph's inputs.
        outputs: the graph's outputs.
        where: the artefact, for the message.

    Raises:
        BundleError: names, ranks, fixed sizes or element types differ.
    """
    groups: tuple[tuple[str, Sequence[GraphTensor], tuple[TensorSpec, ...]], ...] = (
        ("inputs", inputs, manifest.inputs),
        ("outputs", outputs, manifest.outputs),
    )
    for group, found, stated in groups:
        by_name = {tensor.name: tensor for tensor in found}
        if set(by_name) != {spec.name for spec in stated}:
            raise BundleError(
                f"{where}: the manifest does not fit the graph: it states {group} "
                f"{', '.join(spec.name for spec in stated)}, the graph has {', '.join(by_name)}"
            )
        for spec in stated:
            tensor = by_name[spec.name]
            problem = spec.mismatch(tensor.name, tensor.shape)
            if problem is None and tensor.dtype != spec.dtype:
                problem = f"{spec.name!r} is {tensor.dtype} in the graph and {spec.dtype} in the manifest"
            if problem is not None:
                raise BundleError(f"{where}: the manifest does not fit the graph: {problem}")


def check_input(tensor: np.ndarray, spec: TensorSpec) -> None:
    """Refuse an input array that does not fit the graph's input.

    Raises:
        BackendError: wrong type or shape.
    """
    fits = tensor.ndim == len(spec.shape) and all(
        size == wanted or isinstance(wanted, str) for size, wanted in zip(tensor.shape, spec.shape, strict=True)
    )
    if not fits or tensor.dtype.name != spec.dtype:
        raise BackendError(
            f"input {spec.name!r}: expected {spec.dtype} of shape {spec.shape}, got {tensor.dtype} of shape "
            f"{tensor.shape}"
        )


def scalar_inputs(manifest: Manifest) -> dict[str, np.ndarray]:
    """Buffers (1,) float32 of the thresholds that the graph takes, with the manifest's values; empty for none."""
    spec = manifest.postprocess
    if spec is None or not spec.in_graph:
        return {}
    return {name: np.array([getattr(spec, name)], np.float32) for name in THRESHOLD_INPUTS}


def resolve_shape(spec: TensorSpec, batch: int, size: tuple[int, int] | None = None) -> tuple[int, ...]:
    """The concrete shape of an input for a batch size and an image (height, width).

    Raises:
        BackendError: the graph's batch size is fixed at another, or a size stays open.
    """
    shape = list(spec.shape)
    if isinstance(shape[0], int) and shape[0] != batch:
        raise BackendError(f"input {spec.name!r}: the graph takes batches of {shape[0]} only, got {batch}")
    shape[0] = batch
    if size is not None:
        shape[-2:] = size
    if not all(isinstance(value, int) for value in shape):
        raise BackendError(f"input {spec.name!r}: a size stays open in {tuple(shape)}")
    return tuple(int(value) for value in shape)
