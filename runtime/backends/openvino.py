"""OpenVINO, with a static graph for single images and the input bound without a copy."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from carpus.runtime.backends.base import GraphTensor, check_graph, check_input, resolve_shape, scalar_inputs
from carpus.runtime.bundle import Bundle
from carpus.runtime.errors import BackendError
from carpus.runtime.spec import Artefact

__all__ = ["OpenVinoBackend"]

_LOG = logging.getLogger(__name__)
_DTYPES = {"f32": "float32", "f16": "float16", "i64": "int64", "i32": "int32", "u8": "uint8", "boolean": "bool"}


class OpenVinoBackend:
    """Runs a bundle's OpenVINO or ONNX artefact; see :class:`~carpus.runtime.backends.base.Backend`.

    A single image runs on a graph whose batch size is fixed at 1, which is faster than a dynamic one; other batch sizes
    share one dynamic graph, compiled when first needed. The arithmetic is held at f32, because some processors
    would otherwise compute an fp32 model in bf16.

    Args:
        bundle: the open bundle.
        artefact: its OpenVINO artefact (model.xml, model.bin) or its ONNX artefact.
        num_threads: threads for one inference, or None for OpenVINO's choice.
        device: OpenVINO device.

    Raises:
        BackendError: OpenVINO cannot load or compile the model.
        BundleError: a file is altered, or is not the graph that the manifest describes.
    """

    name = "openvino"

    def __init__(
        self, bundle: Bundle, artefact: Artefact, num_threads: int | None = None, *, device: str = "CPU"
    ) -> None:
        import openvino

        self._ov = openvino
        self._where = where = f"bundle {str(bundle.path)!r}: {artefact.path!r}"
        self.version: str = openvino.__version__.partition("-")[0]
        self.device = device
        self.precision: str = artefact.precision
        self.num_threads = num_threads or 0
        self._core: Any = openvino.Core()
        files = [bundle.read(entry) for entry in artefact.files]
        try:
            self._model: Any = self._core.read_model(*files)
        except RuntimeError as error:
            raise BackendError(f"{where}: OpenVINO {self.version} cannot load it ({error})") from error
        check_graph(bundle.manifest, _describe(self._model.inputs), _describe(self._model.outputs), where)
        self._weights = files  # read_model may keep a view of the bytes
        self._input = bundle.manifest.inputs[0]
        self.scalars = scalar_inputs(bundle.manifest)
        self._names = [spec.name for spec in bundle.manifest.outputs]
        preprocess = bundle.manifest.preprocess
        self._size = preprocess.size if preprocess is not None else None
        self._compiled: dict[bool, Any] = {}
        self._bound: dict[int, tuple[Any, np.ndarray, Any]] = {}
        self._bind(self._input.shape[0] if isinstance(self._input.shape[0], int) else 1)

    def input_buffer(self, batch: int) -> np.ndarray:
        """See :meth:`~carpus.runtime.backends.base.Backend.input_buffer`."""
        return self._bind(batch)[1]

    def infer(self, batch: int) -> dict[str, np.ndarray]:
        """See :meth:`~carpus.runtime.backends.base.Backend.infer`."""
        request = self._bind(batch)[0]
        try:
            request.infer()
        except RuntimeError as error:
            raise BackendError(f"{self._where}: OpenVINO failed while running ({error})") from error
        return {name: request.get_tensor(name).data for name in self._names}

    def run(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        """See :meth:`~carpus.runtime.backends.base.Backend.run`."""
        check_input(tensor, self._input)
        np.copyto(self.input_buffer(len(tensor)), tensor)
        return {name: values.copy() for name, values in self.infer(len(tensor)).items()}

    def close(self) -> None:
        """See :meth:`~carpus.runtime.backends.base.Backend.close`."""
        self._bound.clear()
        self._compiled.clear()
        self._model = None

    def _bind(self, batch: int) -> tuple[Any, np.ndarray, Any]:
        if batch in self._bound:
            return self._bound[batch]
        if self._model is None:
            raise BackendError(f"{self._where}: the backend was closed")
        shape = resolve_shape(self._input, batch, self._size)
        buffer = np.zeros(shape, np.float32)
        tensor = self._ov.Tensor(buffer, shared_memory=True)
        request = self._compile(single=batch == 1, shape=shape).create_infer_request()
        request.set_tensor(self._input.name, tensor)
        for name, value in self.scalars.items():
            request.set_tensor(name, self._ov.Tensor(value, shared_memory=True))
        while len(self._bound) >= 4:
            self._bound.pop(next(iter(self._bound)))
        self._bound[batch] = (request, buffer, tensor)
        return self._bound[batch]

    def _compile(self, *, single: bool, shape: tuple[int, ...]) -> Any:
        if single not in self._compiled:
            model = self._model.clone()
            options: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
            if self.device == "CPU":
                options["INFERENCE_PRECISION_HINT"] = "f32"
            if self.num_threads:
                options["INFERENCE_NUM_THREADS"] = self.num_threads
            try:
                if single:
                    model.reshape({self._input.name: list(shape)})
                self._compiled[single] = self._core.compile_model(model, self.device, options)
            except RuntimeError as error:
                raise BackendError(f"{self._where}: OpenVINO cannot compile it for {self.device} ({error})") from error
            _LOG.debug("compiled %s for %s, batch %s", self._where, self.device, "1" if single else "dynamic")
        return self._compiled[single]


def _describe(ports: Any) -> list[GraphTensor]:
    found = []
    for port in ports:
        names = sorted(port.get_names()) or [port.get_node().get_friendly_name()]
        shape = port.get_partial_shape()
        sizes = tuple(size.get_length() if size.is_static else None for size in shape)
        dtype = port.get_element_type().get_type_name()
        found.append(GraphTensor(names[0], _DTYPES.get(dtype, dtype), sizes))
    return found
