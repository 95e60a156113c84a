"""ResNet encoders of LW-DETR: sizes, ImageNet weights, training, deployment, export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from carpus.export.images import procedural_images
from carpus.export.pipeline import ExportSource, export_bundle
from carpus.models.build import FAMILIES, build_model
from carpus.models.counting import shapes_only
from carpus.models.lw_detr.config import LWDETRConfig, ResNetConfig, get_config
from carpus.models.lw_detr.criterion import LWDETRCriterion, LWDETRCriterionConfig
from carpus.models.lw_detr.deploy import deploy
from carpus.models.lw_detr.model import LWDETR
from carpus.models.lw_detr.optimizer import parameter_groups
from carpus.models.lw_detr.resnet import ResNet
from carpus.runtime.errors import DataError
from carpus.runtime.spec import ClassInfo
from tests.tiny_lw_detr import small_config, small_model

# torchvision's documented parameters and multiply-accumulates [1e9] at 224 x 224, less its classifier of 1000 classes
TORCHVISION = {
    "resnet18": (11_689_512 - 513 * 1000, 1.814 - 512e3 / 1e9),
    "resnet50": (25_557_032 - 2049 * 1000, 4.089 - 2048e3 / 1e9),
}


def encoder_of(variant: str) -> ResNet:
    return ResNet(get_config(variant).encoder)  # type: ignore[arg-type]


def resnet_config(frozen: bool = False, bottleneck: bool = False) -> LWDETRConfig:
    encoder = ResNetConfig((1, 1, 1, 1), bottleneck=bottleneck, frozen_norms=frozen, frozen_stem=frozen)
    return replace(small_config(), encoder=encoder, input_size=(128, 160))


def imagenet_state(variant: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """A state as torchvision saves it."""
    torch.manual_seed(seed)
    encoder = encoder_of(variant)
    state = {
        name: torch.rand_like(value) if value.is_floating_point() else value + 7
        for name, value in encoder.state_dict().items()
    }
    return {**state, "fc.weight": torch.randn(1000, encoder.out_channels[-1]), "fc.bias": torch.randn(1000)}


@pytest.mark.parametrize("variant", TORCHVISION)
def test_encoders_have_torchvisions_size_and_cost(variant: str) -> None:
    parameters, macs = TORCHVISION[variant]
    encoder = encoder_of(variant).eval().requires_grad_(False)
    assert sum(p.numel() for p in encoder.parameters()) == parameters
    with FlopCounterMode(display=False) as counter:
        maps = encoder(torch.zeros(1, 3, 224, 224))
    assert counter.get_total_flops() / 2e9 == pytest.approx(macs, abs=0.001)
    assert [tuple(m.shape[2:]) for m in maps] == [(14, 14)] * 3
    assert tuple(m.shape[1] for m in maps) == encoder.out_channels


def test_names_are_torchvisions() -> None:
    names = set(encoder_of("resnet50").state_dict())
    for name in ("conv1.weight", "bn1.running_var", "layer1.0.downsample.0.weight", "layer1.0.downsample.1.bias"):
        assert name in names
    assert "layer3.5.bn3.num_batches_tracked" in names
    assert "layer2.1.downsample.0.weight" not in names
    assert "layer1.0.downsample.0.weight" not in encoder_of("resnet18").state_dict()


@pytest.mark.parametrize("bottleneck", [False, True])
def test_a_block_computes_its_formula(bottleneck: bool) -> None:
    model = small_model(resnet_config(bottleneck=bottleneck))
    block: Any = model.backbone[0].encoder.layer2[0]
    x = torch.randn(2, block.conv1.in_channels, 12, 16)
    norm = nn.functional.batch_norm

    def apply(name: str, y: torch.Tensor) -> torch.Tensor:
        conv, bn = getattr(block, name), getattr(block, name.replace("conv", "bn"))
        y = nn.functional.conv2d(y, conv.weight, None, conv.stride, conv.padding)
        return norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias, eps=1e-5)

    y = x
    names = ["conv1", "conv2", "conv3"][: 3 if bottleneck else 2]
    for name in names:
        y = apply(name, torch.relu(y) if name != "conv1" else y)
    conv, bn = block.downsample
    shortcut = norm(
        nn.functional.conv2d(x, conv.weight, None, 2), bn.running_mean, bn.running_var, bn.weight, bn.bias, eps=1e-5
    )
    with torch.inference_mode():
        torch.testing.assert_close(block(x), torch.relu(shortcut + y))
    # the stride is in the 3x3 convolution
    assert [getattr(block, name).stride[0] for name in names] == ([1, 2, 1] if bottleneck else [2, 1])


@pytest.mark.parametrize("variant", TORCHVISION)
def test_imagenet_weights_fill_the_encoder(variant: str, tmp_path: Path) -> None:
    state = imagenet_state(variant)
    torch.save(state, tmp_path / "imagenet.pth")
    model = build_model("lw_detr", variant, 4, (128, 128))
    line = FAMILIES["lw_detr"].start_from(model, tmp_path / "imagenet.pth")
    assert "not used: fc.weight, fc.bias" in line
    own = model.get_submodule("backbone.0.encoder").state_dict()
    assert set(own) == set(state) - {"fc.weight", "fc.bias"}
    assert all(torch.equal(value, state[name]) for name, value in own.items())


def test_other_imagenet_weights_are_refused(tmp_path: Path) -> None:
    state = imagenet_state("resnet18")
    torch.save(state, tmp_path / "r18.pth")
    for variant, message in (
        ("resnet50", r"does not fit the ResNet of LW-DETR.*resnet50 its resnet50"),
        ("tiny", "holds a ResNet, and this LW-DETR has none"),
    ):
        model = build_model("lw_detr", variant, 4, (128, 128))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(DataError, match=message):
            FAMILIES["lw_detr"].start_from(model, tmp_path / "r18.pth")
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    del state["layer4.1.conv2.weight"]
    torch.save(state, tmp_path / "cut.pth")
    with pytest.raises(DataError, match=r"missing.*layer4\.1\.conv2\.weight"):
        FAMILIES["lw_detr"].start_from(build_model("lw_detr", "resnet18", 4, (128, 128)), tmp_path / "cut.pth")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_training_step(frozen: bool) -> None:
    torch.manual_seed(0)
    config = resnet_config(frozen)
    model = LWDETR(config).train()
    criterion = LWDETRCriterion(LWDETRCriterionConfig(config.num_classes, config.decoder.num_groups))
    groups = parameter_groups(model, config.encoder.depth, config.optimizer)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [parameters[n] for n in g.names], "lr": 1e-3, "weight_decay": g.weight_decay} for g in groups]
    )
    images = torch.randn(2, 3, 128, 160)
    targets = [
        {"labels": torch.tensor([1, 3]), "boxes": torch.tensor([[0.3, 0.4, 0.2, 0.3], [0.7, 0.6, 0.3, 0.2]])}
    ] * 2
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = sum(criterion(model(images), targets).values())
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    assert losses[-1] < losses[0]
    after = model.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    encoder = {name.removeprefix("backbone.0.encoder.") for name in changed if name.startswith("backbone.0.encoder.")}
    assert {"layer1.0.conv1.weight", "layer4.0.conv2.weight"} <= encoder
    assert ("conv1.weight" in encoder) != frozen
    assert any("bn" in name for name in encoder) != frozen


def test_published_rates() -> None:
    with shapes_only():
        model = build_model("lw_detr", "resnet18", 91)
    config = get_config("resnet18")
    groups = parameter_groups(model, config.encoder.depth, config.optimizer)
    rates = {name: (group.lr, group.weight_decay) for group in groups for name in group.names}
    assert len(rates) == len(list(model.named_parameters()))
    encoder = "backbone.0.encoder."
    assert rates[f"{encoder}layer1.0.conv1.weight"] == pytest.approx((1e-5, 1e-4))
    for name in ("bn1.weight", "layer4.1.bn2.bias", "layer2.0.downsample.1.weight"):
        assert rates[encoder + name] == pytest.approx((1e-5, 0.0))
    assert rates["transformer.decoder.norm.weight"] == rates["class_embed.weight"] == (1e-4, 1e-4)


@pytest.mark.parametrize("bottleneck", [False, True])
def test_the_deployed_form_has_no_norms_and_the_same_outputs(bottleneck: bool) -> None:
    model = small_model(resnet_config(bottleneck=bottleneck))
    slim = deploy(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in slim.modules())
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    images = torch.randn(2, 3, 128, 160)
    with torch.inference_mode():
        expected, got = model(images), slim(images)
    for name in ("pred_logits", "pred_boxes"):
        torch.testing.assert_close(got[name], expected[name], atol=2e-4, rtol=1e-4)


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(DataError, match="multiples of 32 px, got \\(640, 600\\)"):
        get_config("resnet18").with_input_size(640, 600)
    with pytest.raises(DataError, match="four numbers of at least 1"):
        ResNetConfig((2, 2, 2, 0), bottleneck=False)


@pytest.mark.slow
def test_resnet18_passes_the_parity_gate(tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = (256, 320)
    config = get_config("resnet18", 3).with_input_size(*size)
    # Every rank has learned rows of its own, and 300 random scores lie too close for their ranks to survive rounding
    model = LWDETR(replace(config, decoder=replace(config.decoder, num_queries=50))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "class_embed" in name:
                parameter.mul_(0.0 if name.endswith("bias") else 3.0)
    classes = tuple(ClassInfo(name, i) for i, name in enumerate(("cup", "bowl", "box")))
    source = ExportSource(model, "lw_detr", "resnet18", size, classes, "lw_detr-resnet18")
    done = export_bundle(source, tmp_path / "r.carpus", images=procedural_images(2), openvino=("fp32",))
    assert [(record.backend, record.passed) for record in done.parity] == [("onnxruntime", True), ("openvino", True)]
    assert all(record.metrics["detections"] > 20 for record in done.parity)
