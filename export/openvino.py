"""An ONNX graph as OpenVINO IR."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from carpus.runtime.errors import BackendError

__all__ = ["export_openvino"]


def export_openvino(
    model: bytes, metadata: Mapping[str, str], precision: Literal["fp32", "fp16"] = "fp32"
) -> tuple[bytes, bytes]:
    """Convert a model.

    Args:
        model: the ONNX file's bytes.
        metadata: key and value strings, written to ``rt_info/model_info``.
        precision: how the weights are stored; the runtime decides on the arithmetic.

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
        with tempfile.TemporaryDirectory(prefix="carpus-openvino-") as folder:
            path = Path(folder) / "model.xml"
            openvino.save_model(network, path, compress_to_fp16=precision == "fp16")
            return path.read_bytes(), path.with_suffix(".bin").read_bytes()
    except RuntimeError as error:
        raise BackendError(f"OpenVINO {openvino.__version__} cannot convert the graph: {error}") from error


def _rename_unnamed(network: Any) -> None:
    """Number operations without a name of their own within the graph.

    OpenVINO numbers them by a counter of the process, so that the same graph would give another file the second time.
    """
    for index, operation in enumerate(network.get_ordered_ops()):
        if re.fullmatch(rf"{operation.get_type_name()}_\d+", operation.get_friendly_name()):
            operation.set_friendly_name(f"{operation.get_type_name()}_n{index}")
