"""Networks of the YOLO families through the gate, and experts that are not computed in their graphs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
import openvino
import pytest
import torch
from torch import Tensor, nn

from benchmarks.exports import run
from carpus.export.families import EXPORT_FAMILIES, get_family
from carpus.models.build import FAMILIES, build_model
from carpus.models.mamba_yolo.config import get_config as find_mamba
from carpus.models.mamba_yolo.ss2d import SS2D
from carpus.models.yolo_master.config import get_config
from carpus.models.yolo_master.deploy import BranchedExperts, GatheredExperts
from carpus.models.yolo_master.moe import build_moe

SIZE = (12, 20)


def test_every_family_that_is_built_is_exported() -> None:
    assert set(EXPORT_FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "variant"), [("yolo_master", "v0_1-n"), ("yolo_master", "paper-n"), ("mamba_yolo", "T")]
)
def test_deployed_forms_compute_the_same_without_norms_of_convolutions(family: str, variant: str) -> None:
    torch.manual_seed(0)
    model = build_model(family, variant, 3, (64, 96)).eval()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        nn.init.uniform_(norm.running_mean, -0.2, 0.2)  # type: ignore[arg-type]
        nn.init.uniform_(norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    deployed = get_family(family).deploy(model)
    images = torch.rand(2, 3, 64, 96)
    with torch.inference_mode():
        before, after = model(images), deployed(images)
    for name, values in before.items():
        torch.testing.assert_close(after[name], values, rtol=1e-4, atol=1e-4)
    left = [name for name, module in deployed.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(name.split(".")[-2] == "norm" for name in left), left  # the norms of sums, which follow no convolution
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == len(norms)


class _Answer(nn.Module):
    """The layer's output alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, images: Tensor) -> Tensor:
        answer = self.layer(images)
        return answer if isinstance(answer, Tensor) else answer[0]


def runtimes(layer: nn.Module, channels: int) -> dict[str, Any]:
    """A layer's exported graph on each runtime."""
    example = torch.zeros(2, channels, *SIZE)
    with torch.no_grad():
        program = torch.onnx.export(
            _Answer(layer).eval(),
            (example,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("N", min=1, max=64)},),
            input_names=["images"],
            opset_version=18,
            verbose=False,
        )
    assert program is not None
    model = onnx_ir.serde.serialize_model(program.model).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    core = openvino.Core()
    network = core.read_model(model)
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(network, "CPU", options)
    network.reshape([1, channels, *SIZE])
    single = core.compile_model(network, "CPU", options)
    return {
        "onnxruntime": lambda images: session.run(None, {"images": images})[0],
        "openvino": lambda images: compiled([images])[0],
        "openvino, one image": lambda images: np.concatenate([single([image[None]])[0].copy() for image in images]),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "form"), [("paper-n", BranchedExperts), ("v0_1-n", GatheredExperts)])
def test_experts_that_are_not_chosen_are_not_computed(variant: str, form: Any) -> None:
    """Such experts get weights that are not numbers: a product with a routing weight of zero would show them."""
    torch.manual_seed(0)
    config = get_config(variant).moe
    layer = build_moe(16, config.num_experts[0], config).eval()
    for values in layer.parameters():
        nn.init.normal_(values, 0.0, 0.5)
    images = torch.randn(1, 16, *SIZE)
    with torch.inference_mode():
        expected = layer(images)[0].numpy()
        chosen = layer.routing(images).chosen
    assert chosen is not None
    assert 0 < chosen.shape[1] < len(layer.experts)
    broken = copy.deepcopy(layer)
    for index, expert in enumerate(broken.experts):
        if index not in chosen[0].tolist():
            for values in expert.parameters():
                nn.init.constant_(values, float("nan"))
    for name, answer in runtimes(form(broken), 16).items():
        np.testing.assert_allclose(answer(images.numpy()), expected, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_images_of_a_batch_choose_for_themselves() -> None:
    torch.manual_seed(1)
    config = get_config("paper-n").moe
    layer = build_moe(16, config.num_experts[0], config).eval()
    for values in layer.parameters():
        nn.init.normal_(values, 0.0, 0.5)
    images = torch.randn(8, 16, *SIZE) * torch.linspace(-3, 3, 8).reshape(-1, 1, 1, 1) + torch.randn(8, 16, 1, 1)
    with torch.inference_mode():
        expected = layer(images)[0].numpy()
        chosen = layer.routing(images).chosen
    assert len({tuple(sorted(row)) for row in chosen.tolist()}) > 1
    for name, answer in runtimes(BranchedExperts(copy.deepcopy(layer)), 16).items():
        np.testing.assert_allclose(answer(images.numpy()), expected, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["T", "mamba3-T"])
def test_scans_take_any_batch(variant: str) -> None:
    torch.manual_seed(0)
    layer = SS2D(16, find_mamba(variant).scan).eval()
    answers = runtimes(layer, 16)
    for batch in (1, 3):
        images = torch.randn(batch, 16, *SIZE)
        with torch.inference_mode():
            expected = layer(images).numpy()
        for name, answer in answers.items():
            np.testing.assert_allclose(answer(images.numpy()), expected, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "variant"),
    [("yolo_master", "esmoe-n"), ("yolo_master", "v0_1-n"), ("yolo_master", "paper-n"), ("mamba_yolo", "T")],
)
def test_smallest_variants_pass_the_gate(family: str, variant: str) -> None:
    row = run(family, variant, (96, 160), pictures=2)
    assert row["error"] == ""
    assert [(record["backend"], record["precision"], record["passed"]) for record in row["records"]] == [
        ("onnxruntime", "fp32", True),
        ("openvino", "fp32", True),
        ("openvino", "fp16", True),
    ]
    assert all(record["suppression_differs"] == 0 for record in row["records"])
    assert all(record["detections"] > 0 for record in row["records"])
    assert row["score_apart"] > 5e-4  # several times what the gate lets pass
