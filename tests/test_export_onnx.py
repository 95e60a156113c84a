"""The graph that export writes: what it is made of, and that its batch is dynamic on every runtime."""

from __future__ import annotations

import ast
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
from torch import Tensor, nn

from carpus.export.onnx import INPUT, IR_VERSION, OPSET, OUTPUTS, export_onnx, with_metadata
from carpus.models.deimv2.layers import RMSNorm
from carpus.runtime.errors import BackendError
from carpus.runtime.parity import Answer, compare, make_answer
from carpus.runtime.spec import Postprocess, Preprocess
from carpus.runtime.thresholds import PARITY
from tests.tiny_deimv2 import SIZE, tiny_bundle, tiny_model

ROOT = str(Path(__file__).resolve().parent.parent)


class Toy(nn.Module):
    """The smallest module with the contract: a normalised mean colour as logits, a fixed box."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.unused = nn.Linear(5, 5)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        mean = images.mean((2, 3))
        boxes = torch.full((1, 1, 4), 0.5).expand(len(images), 1, 4)
        return {"pred_logits": self.norm(mean)[:, None], "pred_boxes": boxes + 0.0 * mean[:, :1, None]}


class Branching(Toy):
    def forward(self, images: Tensor) -> dict[str, Tensor]:
        if images.mean() > 0.5:
            images = images * 2.0
        return super().forward(images)


class DataSized(Toy):
    def forward(self, images: Tensor) -> dict[str, Tensor]:
        found = super().forward(images)
        return {**found, "pred_logits": found["pred_logits"] + images.flatten().nonzero().float().sum()}


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return onnx.load(tiny_bundle() / "model.onnx")


def test_versions_and_names(model: onnx.ModelProto) -> None:
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)] == [("", 18)]
    assert model.ir_version == IR_VERSION <= 10
    assert [value.name for value in model.graph.input] == [INPUT] == ["images"]
    assert [value.name for value in model.graph.output] == list(OUTPUTS) == ["pred_logits", "pred_boxes"]
    shape = [size.dim_param or size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim]
    assert shape == ["N", 3, *SIZE]
    onnx.checker.check_model(model, full_check=True)


def test_lean(model: onnx.ModelProto) -> None:
    kinds = {node.op_type for node in model.graph.node}
    assert not kinds & {"Shape", "Size", "BatchNormalization", "Identity", "Dropout", "Constant", "If", "Loop"}
    inputs = {value.name for value in model.graph.input}
    weights = {tensor.name for tensor in model.graph.initializer}
    assert not inputs & weights
    used = {name for node in model.graph.node for name in node.input} | {value.name for value in model.graph.output}
    assert weights <= used
    # Nothing that depends on weights alone is left to be computed at run time.
    constant = [node.name for node in model.graph.node if set(node.input) - {""} <= weights]
    assert constant == []
    assert not any("denoising" in name for name in weights)


def test_runtime_finds_the_rms_norms(tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(tiny_bundle() / "model.onnx", options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node]
    norms = [module for module in tiny_model().modules() if isinstance(module, RMSNorm)]
    assert kinds.count("SimplifiedLayerNormalization") == len(norms) == 3
    assert "Reciprocal" not in kinds


def test_no_trace_of_the_machine() -> None:
    for file in tiny_bundle().rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert ROOT.encode() not in content, file.name
            assert b"site-packages" not in content, file.name
            assert b"stack_trace" not in content, file.name


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_batch_is_dynamic(batch: int) -> None:
    images = np.random.default_rng(batch).random((batch, 3, *SIZE), np.float32)
    with torch.inference_mode():
        expected = tiny_model()(torch.from_numpy(images))
    session = onnxruntime.InferenceSession(tiny_bundle() / "model.onnx", providers=["CPUExecutionProvider"])
    compiled = openvino.Core().compile_model(
        tiny_bundle() / "openvino" / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    from_openvino = compiled({INPUT: images})
    from_onnxruntime = dict(zip(OUTPUTS, session.run(list(OUTPUTS), {INPUT: images}), strict=True))
    transform = Preprocess(SIZE).transform(SIZE)

    def answer(outputs: Any, index: int) -> Answer:
        logits, boxes = (np.asarray(outputs[name])[index] for name in OUTPUTS)
        return make_answer(logits, boxes, transform, Postprocess(), ("a", "b", "c"))

    for outputs in (from_onnxruntime, from_openvino):
        assert [outputs[name].shape for name in OUTPUTS] == [(batch, 75, 3), (batch, 75, 4)]
        for index in range(batch):
            errors = compare(answer(expected, index), answer(outputs, index), PARITY["fp32"])
            assert errors.max_box_px <= PARITY["fp32"].max_box_px
            assert errors.max_score <= PARITY["fp32"].max_score


def test_metadata_of_onnx_and_openvino(model: onnx.ModelProto) -> None:
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert ast.literal_eval(metadata["names"]) == {0: "cup", 1: "Becher ü", 2: "杯"}
    assert (metadata["task"], metadata["stride"], metadata["imgsz"], metadata["batch"]) == (
        "detect",
        "32",
        "[96, 160]",
        "1",
    )
    assert json.loads(metadata["carpus.preprocess"])["size"] == list(SIZE)
    assert json.loads(metadata["carpus.classes"])[2] == {"name": "杯", "dataset_id": 90}
    for folder in ("openvino", "openvino-fp16"):
        network = openvino.Core().read_model(tiny_bundle() / folder / "model.xml")
        assert network.get_rt_info(["model_info", "names"]).astype(str) == metadata["names"]
        assert network.get_rt_info(["model_info", "task"]).astype(str) == "detect"
        assert json.loads(network.get_rt_info(["model_info", "carpus", "family"]).astype(str)) == "deimv2"


def test_half_precision_file_is_half_as_large() -> None:
    full = (tiny_bundle() / "openvino" / "model.bin").stat().st_size
    half = (tiny_bundle() / "openvino-fp16" / "model.bin").stat().st_size
    assert 0.45 < half / full < 0.65


def test_layer_norm_is_native_and_logs_stay_as_they_were() -> None:
    level = logging.getLogger("torch").level
    found = export_onnx(Toy(), (32, 64))
    kinds = [node.op_type for node in found.graph.node]
    assert kinds.count("LayerNormalization") == 1
    assert not any("unused" in tensor.name for tensor in found.graph.initializer)
    assert logging.getLogger("torch").level == level
    stamped = onnx.load_from_string(with_metadata(with_metadata_twice(found), {"b": "ü"}))
    assert {entry.key: entry.value for entry in stamped.metadata_props} == {"b": "ü"}


def with_metadata_twice(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.load_from_string(with_metadata(model, {"a": "1"}))


def test_module_that_branches_on_data_is_refused() -> None:
    with pytest.raises(BackendError, match=r"torch .* cannot export this network to ONNX"):
        export_onnx(Branching(), (32, 64))


def test_sizes_that_depend_on_data_are_refused() -> None:
    with pytest.raises(BackendError, match=r"still computes shapes at run time \(NonZero"):
        export_onnx(DataSized(), (32, 64))
