"""An ONNX graph as OpenVINO IR."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from carpus.runtime.errors import BackendError

__all__ = ["export_openvino"]


def export_openvino(
    model: bytes,
    metadata: Mapping[str, str],
    precision: Literal["fp32", "fp16"] = "fp32",
    *,
    exact: Sequence[np.ndarray] = (),
) -> tuple[bytes, bytes]:
    """Convert a model.

    Args:
        model: the ONNX file's bytes.
        metadata: key and value strings, written to ``rt_info/model_info``.
        precision: how the weights are stored; the runtime decides on the arithmetic.
        exact: weights that stay float32 whatever the precision.

    Returns:
        The bytes of the .xml and of the .bin file. They hold no path of this machine.

    Raises:
        BackendError: OpenVINO is not installed or cannot convert the graph.
    """
    try:
        import openvino
    except ModuleNotFoundError:
        raise BackendError(
            "OpenVINO is not installed, which writes the openvino artefacts; pip install 'carpus[export]', or export "
            "with --precision onnx"
        ) from None
    try:
        # From memory: converting a file would write its path into the IR.
        network = openvino.Core().read_model(model)
        _rename_unnamed(network)
        for key, value in metadata.items():
            network.set_rt_info(value, ["model_info", *key.split(".")])
        if precision == "fp16" and exact:
            _halve_weights(network, exact)
        with tempfile.TemporaryDirectory(prefix="carpus-openvino-") as folder:
            path = Path(folder) / "model.xml"
            openvino.save_model(network, path, compress_to_fp16=precision == "fp16" and not exact)
            return path.read_bytes(), path.with_suffix(".bin").read_bytes()
    except RuntimeError as error:
        raise BackendError(f"OpenVINO {openvino.__version__} cannot convert the graph: {error}") from error


def _halve_weights(network: Any, exact: Sequence[np.ndarray]) -> None:
    """Store float32 constants in 16 bits, except some: OpenVINO's own switch for it knows no exceptions.

    Constants are told by their values, as a converter may rename and transpose them.
    """
    from openvino import opset13

    for constant in network.get_ordered_ops():
        if constant.get_type_name() != "Constant" or constant.get_element_type().get_type_name() != "f32":
            continue
        values = constant.data
        halved = values.astype(np.float16)
        if not np.isfinite(halved).all() or any(_same_weights(values, weights) for weights in exact):
            continue
        stored = opset13.constant(halved)
        stored.set_friendly_name(constant.get_friendly_name())
        used = opset13.convert(stored, "f32")
        used.set_friendly_name(f"{constant.get_friendly_name()}/float32")
        for target in constant.output(0).get_target_inputs():
            target.replace_source_output(used.output(0))


def _same_weights(one: np.ndarray, other: np.ndarray) -> bool:
    if one.size != other.size:
        return False
    flat = one.reshape(-1)
    return bool(np.array_equal(flat, other.reshape(-1)) or np.array_equal(flat, other.T.reshape(-1)))


def _rename_unnamed(network: Any) -> None:
    """Number operations without a name of their own within the graph.

    OpenVINO numbers them by a counter of the process, so that the same graph would give another file the second time.
    """
    for index, operation in enumerate(network.get_ordered_ops()):
        if re.fullmatch(rf"{operation.get_type_name()}_\d+", operation.get_friendly_name()):
            operation.set_friendly_name(f"{operation.get_type_name()}_n{index}")
