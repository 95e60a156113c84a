"""DEIMv2 S to X: transformer, adapter, backbone files, preprocessing, and the way to a bundle."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from carpus.export.families import get_family
from carpus.export.images import procedural_images
from carpus.export.pipeline import ExportSource, export_bundle
from carpus.models.build import build_criterion
from carpus.models.deimv2.backbone_checkpoint import is_transformer_only, load_transformer
from carpus.models.deimv2.checkpoint import load_into
from carpus.models.deimv2.config import DEIMv2Config, EncoderConfig, get_config
from carpus.models.deimv2.deploy import deploy
from carpus.models.deimv2.model import DEIMv2
from carpus.models.deimv2.rope import RotaryEmbedding, rotate
from carpus.models.deimv2.vit_config import ViTConfig
from carpus.models.engine_step import DetectionLoss, resized
from carpus.models.predict import IMAGENET_MEAN, IMAGENET_STD
from carpus.models.recipe_table import get_recipe
from carpus.models.train_families import TRAIN_FAMILIES
from carpus.runtime.bundle import Bundle
from carpus.runtime.errors import DataError
from carpus.runtime.spec import ClassInfo

SIZE = (96, 128)


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def small_config(variant: str) -> DEIMv2Config:
    """A variant with two heads, four blocks, one decoder layer and an input that is not square."""
    config = get_config(variant, 3).with_input_size(*SIZE)
    assert isinstance(config.backbone, ViTConfig)
    vit = replace(
        config.backbone,
        dim=128,
        num_heads=2,
        ffn_dim=96,
        depth=4,
        take_blocks=(1, 2, 3),
        map_channels=32,
        detail_channels=4,
        layer_scale=None if config.backbone.layer_scale is None else 0.7,
    )
    decoder = replace(config.decoder, num_queries=40, ffn_dim=32, num_layers=2, num_heads=4)
    encoder = EncoderConfig("hybrid", 0.5, 1, 32, 4, branch_convs=False)
    return replace(config, hidden_dim=32, backbone=vit, encoder=encoder, decoder=decoder)


def small(variant: str) -> DEIMv2:
    """With random weights and statistics, so that no part is at its neutral start."""
    model = DEIMv2(small_config(variant))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith(("running_mean", "bias")):
                tensor.normal_(0.0, 0.1)
            elif tensor.is_floating_point() and tensor.dim() > 1 and "anchors" not in name:
                tensor.normal_(0.0, 1.0 / math.sqrt(tensor[0].numel()))
    return model.eval()


@pytest.mark.parametrize("variant", ["s", "x"])
@pytest.mark.parametrize("fuse", ["all", "official"])
def test_deployed_form_computes_the_same(variant: str, fuse: str) -> None:
    model = small(variant).double()
    fused = deploy(model, fuse=fuse)
    images = torch.randn(2, 3, *SIZE, dtype=torch.float64)
    with torch.inference_mode():
        a, b = model(images), fused(images)
    torch.testing.assert_close(a["pred_boxes"], b["pred_boxes"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a["pred_logits"], b["pred_logits"], rtol=1e-6, atol=1e-6)
    assert any(isinstance(module, nn.BatchNorm2d) for module in fused.modules()) == (fuse == "official")
    again = deploy(fused, fuse=fuse)
    assert all(torch.equal(fused.state_dict()[name], tensor) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("variant", ["s", "l", "x"])
def test_every_parameter_gets_a_gradient(variant: str) -> None:
    model = small(variant).train()
    criterion = build_criterion("deimv2", variant, 3)
    recipe = replace(get_recipe("tabletop", "deimv2", variant), num_denoising=4)
    extras = TRAIN_FAMILIES["deimv2"].extras(model, recipe)
    loss = DetectionLoss(model, criterion, extras=extras, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    target = {"labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.3, 0.4]])}
    losses = loss(torch.rand(2, 3, *SIZE), [target, target], 0, torch.Generator().manual_seed(0))
    sum(losses.values()).backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []
    assert all(torch.isfinite(value) for value in losses.values())


def test_rotation_keeps_lengths_and_depends_on_distance() -> None:
    rope = RotaryEmbedding(16, (6, 6), prefix_tokens=1).double()
    sin, cos = rope(6, 6)
    assert sin[0].abs().max() == 0
    assert (cos[0] == 1).all()
    q, k = torch.randn(16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    rotated = rotate(q.expand(37, 16), sin, cos)
    torch.testing.assert_close(rotated.norm(dim=-1), q.norm().expand(37))
    # two pairs of patches one row and two columns apart
    scores = rotated @ rotate(k.expand(37, 16), sin, cos).T
    torch.testing.assert_close(scores[1 + 0 * 6 + 0, 1 + 1 * 6 + 2], scores[1 + 3 * 6 + 2, 1 + 4 * 6 + 4])


def test_rescaled_coordinates_in_training_only() -> None:
    rope = RotaryEmbedding(16, (4, 4), prefix_tokens=0, rescale=2.0)
    assert not torch.equal(rope.train()(4, 4)[0], rope(4, 4)[0])
    assert torch.equal(rope.eval()(4, 4)[0], rope(4, 4)[0])
    angles = rope._angles(4, 4)
    factor = torch.asin(rope.train()(4, 4)[0][5, 7]) / angles[5, 7]
    assert 0.5 <= float(factor) <= 2.0


def test_other_blocks() -> None:
    assert get_config("s").with_take_blocks((5, 8, 11)).backbone.take_blocks == (5, 8, 11)  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"three ascending indices in 0\.\.11, got \(5, 8, 12\)"):
        get_config("s").with_take_blocks((5, 8, 12))
    with pytest.raises(DataError, match="atto has no transformer"):
        get_config("atto").with_take_blocks((5, 8, 11))


@pytest.mark.parametrize("prefix", ["", "_model.", "module.backbone.dinov3."])
def test_backbone_file_fills_the_transformer(prefix: str, tmp_path: Path) -> None:
    source, target = small("s"), small("s")
    vit = source.backbone.dinov3._model.state_dict()  # type: ignore[union-attr]
    del vit["rope_embed.periods"]
    torch.save(
        {**{prefix + name: tensor for name, tensor in vit.items()}, f"{prefix}head.weight": torch.ones(2)},
        tmp_path / "vit.pt",
    )
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    message = load_into(target, tmp_path / "vit.pt")
    kept = prefix.removeprefix("module.")
    assert f"({len(vit)} entries: blocks, cls_token, patch_embed; not used: {kept}head.weight)" in message
    for name, tensor in target.state_dict().items():
        inner = name.removeprefix("backbone.dinov3._model.")
        assert torch.equal(tensor, vit.get(inner, before[name])), name


def test_wrong_backbone_files() -> None:
    state = {name: t.clone() for name, t in small("l").backbone.dinov3.state_dict().items()}
    assert is_transformer_only(state)
    assert not is_transformer_only(small("l").state_dict())
    used = load_transformer(small("l"), state, "file").fit.copied
    assert len(used) == len(state)
    with pytest.raises(DataError, match="holds a vision transformer, and DEIMv2 n has none"):
        load_transformer(DEIMv2(get_config("n")), state, "file")
    with pytest.raises(DataError, match=r"left over: blocks\.0\.mlp\.fc1"):
        load_transformer(small("x"), state, "file")
    state["blocks.1.attn.qkv.bias_mask"].fill_(math.nan)
    message = r"1 contradictory: blocks\.1\.attn\.qkv\.bias_mask has values that are not finite"
    with pytest.raises(DataError, match=message):
        load_transformer(small("l"), state, "file")
    del state["blocks.1.attn.qkv.bias_mask"]
    with pytest.raises(DataError, match=r"1 missing: blocks\.1\.attn\.qkv\.bias_mask"):
        load_transformer(small("l"), state, "file")


def test_preprocessing_follows_the_backbone() -> None:
    preprocess = get_family("deimv2").preprocess
    normalised, plain = preprocess(small("s"), SIZE), preprocess(DEIMv2(get_config("atto", 3)), (320, 320))
    assert (normalised.mean, normalised.std) == (IMAGENET_MEAN, IMAGENET_STD)
    assert (plain.mean, plain.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def test_training_sees_what_preprocessing_makes() -> None:
    seen = []

    class Probe(nn.Module):
        def forward(self, images):
            seen.append(images)
            return {}

    loss = DetectionLoss(Probe(), lambda *_: {}, mean=IMAGENET_MEAN, std=IMAGENET_STD)  # type: ignore[arg-type]
    picture = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    loss(torch.from_numpy(picture).permute(2, 0, 1)[None] / 255.0, [], 0, torch.Generator())
    expected, _ = get_family("deimv2").preprocess(small("s"), SIZE)(picture)
    np.testing.assert_allclose(seen[0].numpy(), expected.reshape(1, 3, *SIZE), atol=1e-5)


def test_multi_scale_sizes() -> None:
    rng = np.random.default_rng(0)
    sizes = [tuple(resized(torch.zeros(1, 1, 640, 640), 3, rng).shape[2:]) for _ in range(400)]
    assert {side for side, _ in sizes} == set(range(480, 801, 32))
    assert all(a == b for a, b in sizes)
    assert 0.15 < sum(side == 640 for side, _ in sizes) / 400 < 0.32
    assert get_recipe("official", "deimv2", "l").multi_scale_repeat == 3


def test_recipe_lengths_are_the_published_ones() -> None:
    recipes = [get_recipe("official", "deimv2", variant) for variant in ("s", "m", "l", "x")]
    assert [recipe.epochs for recipe in recipes] == [132, 102, 68, 58]
    assert [recipe.flat_epochs for recipe in recipes] == [64, 49, 34, 29]
    assert [recipe.ema_restart_epoch for recipe in recipes] == [120, 90, 60, 50]


@pytest.mark.slow
def test_s_passes_the_parity_gate(tmp_path: Path) -> None:
    # the whole variant, on a smaller input; scores near 0.5 so that there is something to compare
    model = DEIMv2(get_config("s", 3).with_input_size(256, 320))
    with torch.no_grad():
        for head in model.decoder.dec_score_head:
            head.weight.normal_(0.0, 0.3)  # type: ignore[operator]
            head.bias.zero_()  # type: ignore[operator]
    classes = tuple(ClassInfo(name, index) for index, name in enumerate(("a", "b", "c")))
    source = ExportSource(model.eval(), "deimv2", "s", (256, 320), classes, name="s")
    exported = export_bundle(source, tmp_path / "s.carpus", images=procedural_images(2), openvino=())
    with Bundle.open(exported.path) as bundle:
        assert bundle.manifest.preprocess.mean == IMAGENET_MEAN
        assert [record.passed for record in bundle.manifest.parity] == [True]
        assert bundle.manifest.parity[0].metrics["detections"] > 50
