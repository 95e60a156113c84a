"""LW-DETR: layout of tokens, groups, padding, the exported form, rates, wrong input."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from carpus.models.build import build_criterion, build_model
from carpus.models.lw_detr.config import VARIANTS, DecoderConfig, ViTConfig, get_config
from carpus.models.lw_detr.decoder import reparameterised, sine_embedding
from carpus.models.lw_detr.deploy import deploy
from carpus.models.lw_detr.model import LWDETR
from carpus.models.lw_detr.optimizer import parameter_groups
from carpus.models.lw_detr.vit import DropPath, from_window_major, to_window_major
from carpus.runtime.errors import DataError
from tests.goldens.__main__ import main
from tests.tiny_lw_detr import small_config, small_model

ROOT = Path(os.environ.get("CARPUS_GOLDENS") or Path(__file__).parent / "data" / "goldens") / "lw_detr"


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(path, id=path.name, marks=[] if path.name == "tiny" else [pytest.mark.slow])
        for path in sorted(ROOT.glob("*"))
        if (path / "schema.json").is_file()
    ],
)
def test_reference_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([str(folder)])
    output = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in output.splitlines() if not line.startswith("  ok"))
    assert "goldens passed" in output


def test_there_is_reference_data() -> None:
    assert (ROOT / "tiny" / "schema.json").is_file()


def test_window_major_order() -> None:
    x = torch.arange(2 * 8 * 12, dtype=torch.float32).reshape(2, 8, 12, 1)
    windows = to_window_major(x, 4)
    assert windows.shape == (32, 6, 1)
    assert windows[0, :, 0].tolist() == [0, 1, 2, 12, 13, 14]
    assert windows[1, :, 0].tolist() == [3, 4, 5, 15, 16, 17]
    assert torch.equal(from_window_major(windows, 4, 8, 12), x.permute(0, 3, 1, 2))


def test_global_attention_does_not_depend_on_the_order_of_tokens() -> None:
    block = small_model().backbone[0].encoder.blocks[1]
    x = torch.randn(1, 8, 12, 24)
    ours = from_window_major(block(to_window_major(x, 4)), 4, 8, 12)
    single = replace(small_config().encoder, window_grid=1)
    plain = type(block)(single, 1, 0.0)
    plain.load_state_dict(block.state_dict())
    theirs = from_window_major(plain(to_window_major(x, 1)), 1, 8, 12)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_windows_do_not_see_each_other() -> None:
    block = small_model().backbone[0].encoder.blocks[0]
    x = torch.randn(16, 6, 24)
    other = x.clone()
    other[5] += 1.0
    same = (block(x) == block(other)).flatten(1).all(1)
    assert [i for i, equal in enumerate(same.tolist()) if not equal] == [5]


def test_reparameterised_boxes() -> None:
    reference = torch.tensor([0.4, 0.6, 0.2, 0.1])
    assert torch.equal(reparameterised(torch.zeros(4), reference), reference)
    moved = reparameterised(torch.tensor([1.0, -2.0, 0.0, 0.5]), reference)
    torch.testing.assert_close(moved, torch.tensor([0.6, 0.4, 0.2, 0.1 * 1.6487213]))


def test_sine_embedding_order() -> None:
    embedding = sine_embedding(torch.tensor([0.25, 0.5, 0.0, 0.0]), 8)
    assert embedding.shape == (32,)
    torch.testing.assert_close(embedding[:2], torch.tensor([0.0, -1.0]), atol=1e-6, rtol=0)  # y = 0.5
    torch.testing.assert_close(embedding[8:10], torch.tensor([1.0, 0.0]), atol=1e-6, rtol=0)  # x = 0.25


def test_groups_do_not_see_each_other() -> None:
    model = small_model().train()
    images = torch.randn(2, 3, 128, 192)
    first = model(images)["main"]["pred_logits"]
    with torch.no_grad():
        model.query_feat.weight[10:20] += 1.0  # the second group
    second = model(images)["main"]["pred_logits"]
    changed = (first - second).abs().amax((0, 2)) > 1e-6
    assert first.shape == (2, 30, 4)
    assert changed.tolist() == [False] * 10 + [True] * 10 + [False] * 10


def test_eval_uses_the_first_group_and_a_record_changes_nothing() -> None:
    model = small_model(small_config(("P3", "P5")))
    images = torch.randn(1, 3, 128, 192)
    with torch.inference_mode():
        plain = model(images)
        names: list[str] = []
        recorded = model(images, record=lambda name, tensor: names.append(name))
        slim = deploy(model, fuse=False)(images)
    for key, value in plain.items():
        assert torch.equal(value, recorded[key])
        assert torch.equal(value, slim[key])
    assert {"vit.blocks.1", "projector.sampling.1.0", "enc.topk_index", "aux.0.pred_boxes"} <= set(names)


def test_deployed_form_gives_the_same_and_leaves_the_model() -> None:
    model = small_model(small_config(("P3", "P5")))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.randn(2, 3, 128, 192)
    fused = deploy(model)
    with torch.inference_mode():
        for key, value in model(images).items():
            torch.testing.assert_close(fused(images)[key], value, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in fused.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_empty_mask_changes_nothing_and_padding_does() -> None:
    model = small_model()
    images = torch.randn(2, 3, 128, 192)
    mask = torch.zeros(2, 128, 192, dtype=torch.bool)
    with torch.inference_mode():
        plain = model(images)
        unmasked = model(images, mask=mask)
        mask[0, :, 128:] = True
        padded = model(images, mask=mask)
    for key, value in plain.items():
        torch.testing.assert_close(unmasked[key], value, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(padded[key][0], value[0], atol=1e-3)
        torch.testing.assert_close(padded[key][1], value[1], rtol=1e-5, atol=1e-6)


def test_training_gives_every_parameter_a_gradient() -> None:
    model = small_model(small_config(("P3", "P4", "P5"), drop_path=0.1)).train()
    sets = model(torch.randn(2, 3, 128, 192))
    assert list(sets) == ["main", "aux_0", "enc"]
    sum(value.square().sum() for values in sets.values() for value in values.values()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_drop_path_keeps_the_mean() -> None:
    torch.manual_seed(0)
    drop = DropPath(0.25).train()
    out = drop(torch.ones(4000, 2))
    assert set(out.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}
    assert torch.equal(out[:, 0], out[:, 1])
    assert abs(float(out.mean()) - 1.0) < 0.05
    assert torch.equal(drop.eval()(torch.ones(3)), torch.ones(3))


def test_rates_fall_from_the_last_block_to_the_first() -> None:
    config = get_config("large")
    with torch.device("meta"):
        groups = parameter_groups(LWDETR(config), config.encoder.depth, config.optimizer)
    rates = {name: group.lr for group in groups for name in group.names}
    first, last = (rates[f"backbone.0.encoder.blocks.{i}.attn.qkv.weight"] for i in (0, 9))
    assert first / last == pytest.approx(0.7**9)
    assert last == pytest.approx(1.5e-4 * 0.7 * 0.25)
    assert rates["transformer.decoder.norm.weight"] == pytest.approx(5e-5)
    assert rates["backbone.0.projector.stages.0.1.weight"] == 1e-4


def test_families_build_lw_detr() -> None:
    model = build_model("lw_detr", "tiny", 3, (256, 320))
    assert isinstance(model, LWDETR)
    assert (model.config.num_classes, model.config.input_size) == (3, (256, 320))
    criterion = build_criterion("lw_detr", "tiny", 3)
    assert (criterion.config.num_classes, criterion.config.num_groups) == (3, 13)
    assert VARIANTS["tiny"].with_num_groups(1).decoder.num_groups == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_config("huge"), "known variants: tiny, small, medium, large, xlarge"),
        (lambda: get_config("tiny").with_input_size(640, 600), "multiples of 64 px, got \\(640, 600\\)"),
        (lambda: get_config("tiny", 0), "num_classes must be at least 1"),
        (lambda: replace(small_config(), levels=("P2",)), "levels must be of P3, P4, P5"),  # type: ignore[arg-type]
        (lambda: ViTConfig(25, 2, (0,), (1,)), "multiple of num_heads 12, got 25"),
        (lambda: ViTConfig(24, 2, (2,), (1,)), r"must name blocks in 0..1, got \[2\]"),
        (lambda: ViTConfig(24, 2, (0,), (1,), drop_path=1.0), "drop_path must be in 0..1"),
        (lambda: DecoderConfig(32, 4, 4, 2, 0), "num_queries must be at least 1"),
        (lambda: small_model()(torch.zeros(1, 3, 100, 128)), "multiples of 64 px, got \\(1, 3, 100, 128\\)"),
        (lambda: small_model()(torch.zeros(1, 3, 64, 64), mask=torch.zeros(1, 64, 64)), "mask must be bool"),
        (lambda: build_model("lw_detr", "tiny", 2)(torch.zeros(1, 3, 64, 64)), "selects 100 queries"),
    ],
)
def test_wrong_input(call, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()
