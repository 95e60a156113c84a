"""ONNX Runtime on the CPU, with inputs and outputs bound to preallocated memory."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from carpus.runtime.backends.base import GraphTensor, check_graph, check_input, resolve_shape, scalar_inputs
from carpus.runtime.bundle import Bundle
from carpus.runtime.errors import BackendError
from carpus.runtime.spec import Artefact

__all__ = ["OnnxRuntimeBackend"]

_LOG = logging.getLogger(__name__)
_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}


class OnnxRuntimeBackend:
    """Runs a bundle's ONNX artefact; see :class:`~carpus.runtime.backends.base.Backend`.

    Args:
        bundle: the open bundle.
        artefact: its ONNX artefact.
        num_threads: threads for one inference, or None for one a physical core.

    Raises:
        BackendError: ONNX Runtime cannot load the file.
        BundleError: the file is altered, or is not the graph that the manifest describes.
    """

    name = "onnxruntime"
    device = "CPU"

    def __init__(self, bundle: Bundle, artefact: Artefact, num_threads: int | None = None) -> None:
        import onnxruntime

        where = f"bundle {str(bundle.path)!r}: {artefact.path!r}"
        self.version: str = onnxruntime.__version__
        self.precision: str = artefact.precision
        self.num_threads = num_threads or 0
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.intra_op_num_threads = self.num_threads
        options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = 3
        # Idle workers would otherwise spin on after a run and take cores from preprocessing and from other nodes.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        model = bundle.read(artefact.files[0])
        try:
            session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise BackendError(f"{where}: ONNX Runtime {self.version} cannot load it ({error})") from error
        check_graph(bundle.manifest, _describe(session.get_inputs()), _describe(session.get_outputs()), where)
        self._where = where
        self._session: Any = session
        self._input = bundle.manifest.inputs[0]
        self._outputs = bundle.manifest.outputs
        self.scalars = scalar_inputs(bundle.manifest)
        preprocess = bundle.manifest.preprocess
        self._size = preprocess.size if preprocess is not None else None
        self._bound: dict[int, tuple[Any, np.ndarray, dict[str, np.ndarray]]] = {}

    def input_buffer(self, batch: int) -> np.ndarray:
        """See :meth:`~carpus.runtime.backends.base.Backend.input_buffer`."""
        return self._bind(batch)[1]

    def infer(self, batch: int) -> dict[str, np.ndarray]:
        """See :meth:`~carpus.runtime.backends.base.Backend.infer`."""
        binding, _, outputs = self._bind(batch)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise BackendError(f"{self._where}: ONNX Runtime failed while running ({error})") from error
        if len(outputs) == len(self._outputs):
            return outputs
        names = [spec.name for spec in self._outputs]
        return dict(zip(names, binding.copy_outputs_to_cpu(), strict=True))

    def run(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        """See :meth:`~carpus.runtime.backends.base.Backend.run`."""
        check_input(tensor, self._input)
        np.copyto(self.input_buffer(len(tensor)), tensor)
        return {name: values.copy() for name, values in self.infer(len(tensor)).items()}

    def close(self) -> None:
        """See :meth:`~carpus.runtime.backends.base.Backend.close`."""
        self._bound.clear()
        self._session = None

    def _bind(self, batch: int) -> tuple[Any, np.ndarray, dict[str, np.ndarray]]:
        if batch in self._bound:
            return self._bound[batch]
        if self._session is None:
            raise BackendError(f"{self._where}: the backend was closed")
        buffer = np.zeros(resolve_shape(self._input, batch, self._size), np.float32)
        binding = self._session.io_binding()
        binding.bind_input(self._input.name, "cpu", 0, np.float32, buffer.shape, buffer.ctypes.data)
        for name, value in self.scalars.items():
            binding.bind_input(name, "cpu", 0, np.float32, value.shape, value.ctypes.data)
        outputs: dict[str, np.ndarray] = {}
        if all(isinstance(size, int) for spec in self._outputs for size in spec.shape[1:]):
            for spec in self._outputs:
                values = np.empty((batch, *(int(size) for size in spec.shape[1:])), spec.dtype)
                binding.bind_output(spec.name, "cpu", 0, values.dtype.type, values.shape, values.ctypes.data)
                outputs[spec.name] = values
        else:
            for spec in self._outputs:
                binding.bind_output(spec.name, "cpu")
        while len(self._bound) >= 4:
            self._bound.pop(next(iter(self._bound)))
        self._bound[batch] = (binding, buffer, outputs)
        return self._bound[batch]


def _describe(tensors: Any) -> list[GraphTensor]:
    return [
        GraphTensor(
            item.name,
            _DTYPES.get(item.type, item.type),
            tuple(size if isinstance(size, int) else None for size in item.shape),
        )
        for item in tensors
    ]
