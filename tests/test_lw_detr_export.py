"""LW-DETR to a bundle: graph, parity gate, published files as sources."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from carpus.export.families import get_family
from carpus.export.images import procedural_images
from carpus.export.onnx import export_onnx
from carpus.export.pipeline import ExportSource, export_bundle
from carpus.export.source import load_source
from carpus.models.build import build_model
from carpus.models.lw_detr.deploy import deploy
from carpus.runtime.bundle import Bundle
from carpus.runtime.errors import DataError
from carpus.runtime.spec import ClassInfo
from tests.tiny_lw_detr import small_config, small_model


@pytest.mark.slow
@pytest.mark.parametrize("levels", [("P4",), ("P3", "P5")])
def test_the_graph_computes_what_the_module_does(levels) -> None:
    model = small_model(small_config(levels))
    graph = export_onnx(deploy(model), (128, 192))
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    images = torch.randn(3, 3, 128, 192)
    with torch.inference_mode():
        expected = model(images)
    answers = session.run(["pred_logits", "pred_boxes"], {graph.graph.input[0].name: images.numpy()})
    for answer, name in zip(answers, ("pred_logits", "pred_boxes"), strict=True):
        np.testing.assert_allclose(answer, expected[name].numpy(), atol=1e-4)


@pytest.mark.slow
def test_tiny_passes_the_parity_gate(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_model("lw_detr", "tiny", 3, (256, 320)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "class_embed" in name:
                parameter.mul_(0.0 if name.endswith("bias") else 3.0)
    classes = tuple(ClassInfo(name, i) for i, name in enumerate(("cup", "bowl", "box")))
    source = ExportSource(model, "lw_detr", "tiny", (256, 320), classes, "lw_detr-tiny")
    # Half precision swaps ranks of nearly equal random scores, and a rank has learned rows of its own
    done = export_bundle(source, tmp_path / "tiny.carpus", images=procedural_images(2), openvino=("fp32",))
    assert [(record.backend, record.passed) for record in done.parity] == [
        ("onnxruntime", True),
        ("openvino", True),
    ]
    assert all(record.metrics["detections"] > 20 for record in done.parity)
    with Bundle.open(tmp_path / "tiny.carpus") as bundle:
        assert bundle.manifest.family == "lw_detr"
        assert bundle.manifest.preprocess is not None
        assert bundle.manifest.preprocess.mean == (0.485, 0.456, 0.406)


def test_published_coco_weights_name_their_category_ids(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = build_model("lw_detr", "tiny", 91).state_dict()
    torch.save({"model": state}, tmp_path / "tiny.pth")
    source = load_source(tmp_path / "tiny.pth", family="lw_detr", variant="tiny")
    assert source.input_size == (640, 640)
    assert [(source.classes[i].name, source.classes[i].dataset_id) for i in (0, 1, 90)] == [
        ("unused 0", 0),
        ("person", 1),
        ("toothbrush", 90),
    ]
    assert all(torch.equal(value, state[name]) for name, value in source.module.state_dict().items())
    with pytest.raises(DataError, match=r"has no head of classes, so it is not a deimv2 atto"):
        load_source(tmp_path / "tiny.pth", family="deimv2", variant="atto")


def test_other_modules_are_refused() -> None:
    with pytest.raises(DataError, match="exports a module of class LWDETR, got Linear"):
        get_family("lw_detr").deploy(torch.nn.Linear(1, 1))
