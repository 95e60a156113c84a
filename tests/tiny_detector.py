"""A detector small enough to read: it finds red, green and blue areas of an image, cell by cell.

The graph averages the image over a grid of cells; the three class logits of a cell are its mean colour, its box is the
cell. It keeps the contract of every Carpus detector (images -> pred_logits, pred_boxes), so bundles of it pass through
the real reader, backends and postprocessing.
"""

from __future__ import annotations

import dataclasses
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from carpus.export.writer import BundleWriter
from carpus.runtime.metadata import manifest_metadata
from carpus.runtime.spec import Artefact, ClassInfo, Manifest, Postprocess, Preprocess, Provenance, TensorSpec

CLASSES = (ClassInfo("red", 3), ClassInfo("grün", 7), ClassInfo("blue", 11))


def tiny_manifest(size: tuple[int, int] = (64, 64), cells: int = 4, batch: int | str = "N") -> Manifest:
    """A draft manifest (no artefacts) of the tiny detector."""
    queries = cells * cells
    return Manifest(
        kind="detector",
        name="tiny",
        family="tiny",
        variant="cells",
        licence="Apache-2.0",
        inputs=(TensorSpec("images", "float32", (batch, 3, *size)),),
        outputs=(
            TensorSpec("pred_logits", "float32", (batch, queries, 3)),
            TensorSpec("pred_boxes", "float32", (batch, queries, 4)),
        ),
        provenance=Provenance(created="2026-01-31T12:00:00+00:00", packages={"onnx": onnx.__version__}),
        artefacts=(),
        preprocess=Preprocess(size),
        postprocess=Postprocess(),
        classes=CLASSES,
    )


def tiny_onnx(manifest: Manifest, *, nan: bool = False) -> bytes:
    """The graph as ONNX bytes; with ``nan`` its logits are 0 / 0 wherever the image is black."""
    assert manifest.preprocess is not None
    height, width = manifest.preprocess.size
    queries = int(manifest.outputs[0].shape[1])
    cells = round(queries**0.5)
    centre = (np.arange(cells, dtype=np.float32) + 0.5) / cells
    grid_y, grid_x = np.meshgrid(centre, centre, indexing="ij")
    boxes = np.stack((grid_x, grid_y, np.full_like(grid_x, 1 / cells), np.full_like(grid_x, 1 / cells)), axis=-1)
    constants = {
        "boxes": boxes.reshape(1, queries, 4),
        "to_rows": np.array([0, 3, queries], np.int64),
        "gain": np.array(20.0, np.float32),
        "bias": np.array(-10.0, np.float32),
        "none": np.array(0.0, np.float32),
        "ends": np.array([1], np.int64),
        "starts": np.array([0], np.int64),
        "axes": np.array([2], np.int64),
    }
    nodes = [
        helper.make_node(
            "AveragePool",
            ["images"],
            ["means"],
            kernel_shape=[height // cells, width // cells],
            strides=[height // cells, width // cells],
        ),
        helper.make_node("Reshape", ["means", "to_rows"], ["planes"]),
        helper.make_node("Transpose", ["planes"], ["colours"], perm=[0, 2, 1]),
        helper.make_node("Mul", ["colours", "gain"], ["scaled"]),
        helper.make_node("Add", ["scaled", "bias"], ["logits"]),
        helper.make_node("Div", ["colours", "colours"], ["ratio"]),
        helper.make_node("Mul", ["logits", "ratio"] if nan else ["logits", "one"], ["pred_logits"]),
        helper.make_node("Slice", ["colours", "starts", "ends", "axes"], ["column"]),
        helper.make_node("Mul", ["column", "none"], ["zero"]),
        helper.make_node("Add", ["boxes", "zero"], ["pred_boxes"]),
    ]
    if not nan:
        constants["one"] = np.array(1.0, np.float32)
        nodes = [node for node in nodes if node.op_type != "Div"]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(spec.name, TensorProto.FLOAT, list(spec.shape)) for spec in manifest.inputs],
        [helper.make_tensor_value_info(spec.name, TensorProto.FLOAT, list(spec.shape)) for spec in manifest.outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, manifest_metadata(manifest))
    onnx.checker.check_model(model)
    return model.SerializeToString()


@cache
def _openvino_files(model: bytes) -> dict[str, bytes]:
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source.onnx"
        source.write_bytes(model)
        openvino.save_model(openvino.convert_model(source), Path(folder) / "model.xml", compress_to_fp16=False)
        return {name: (Path(folder) / name).read_bytes() for name in ("model.xml", "model.bin")}


def write_tiny_bundle(
    path: Path,
    *,
    formats: tuple[str, ...] = ("onnx", "openvino"),
    manifest: Manifest | None = None,
    model: bytes | None = None,
) -> Path:
    """Write a bundle of the tiny detector.

    Args:
        path: target folder or .zip.
        formats: artefacts to put in.
        manifest: draft manifest; the usual one when None.
        model: ONNX bytes; those of the manifest's graph when None.
    """
    manifest = manifest or tiny_manifest()
    model = model or tiny_onnx(manifest)
    with BundleWriter(path) as writer:
        artefacts: list[Artefact] = []
        if "onnx" in formats:
            artefacts.append(writer.add_artefact("onnx", "fp32", {"model.onnx": model}, opset=17))
        if "openvino" in formats:
            (writer.staging / "openvino").mkdir()
            for name, data in _openvino_files(model).items():
                (writer.staging / "openvino" / name).write_bytes(data)
            files = dict.fromkeys(("openvino/model.xml", "openvino/model.bin"))
            artefacts.append(writer.add_artefact("openvino", "fp32", files))
        writer.finish(dataclasses.replace(manifest, artefacts=tuple(artefacts)))
    return path


def coloured_image(height: int = 96, width: int = 160) -> np.ndarray:
    """(height, width, 3) uint8 RGB, black, with a red top left, a green top right and a blue bottom left quarter."""
    image = np.zeros((height, width, 3), np.uint8)
    image[: height // 2, : width // 2, 0] = 255
    image[: height // 2, width // 2 :, 1] = 200
    image[height // 2 :, : width // 2, 2] = 170
    return image
