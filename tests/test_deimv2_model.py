"""DEIMv2: properties that reference data does not show."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from carpus.models.build import build_criterion, build_model
from carpus.models.deimv2.config import VARIANTS, DEIMv2Config, get_config
from carpus.models.deimv2.deformable import DeformableAttention
from carpus.models.deimv2.denoising import attention_mask, make_denoising
from carpus.models.deimv2.deploy import deploy
from carpus.models.deimv2.distribution import decode_edges, distribution_table
from carpus.models.deimv2.hgnetv2 import ConvBNAct, LearnableAffine
from carpus.models.deimv2.layers import QueryGroups, SelfAttention, attend_groups, inverse_sigmoid
from carpus.models.deimv2.model import DEIMv2, make_anchors
from carpus.runtime.errors import DataError

SIZE = (160, 192)


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def small(variant: str = "atto", num_classes: int = 5) -> DEIMv2:
    return DEIMv2(get_config(variant, num_classes).with_input_size(*SIZE))


def stirred(model: DEIMv2) -> DEIMv2:
    """Random weights and statistics everywhere, so that no part is at its neutral start; some scales negative."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith(("running_mean", "lab.bias")):
                tensor.normal_(0.0, 0.1)
            elif name.endswith("lab.scale"):
                tensor.uniform_(-1.0, 1.5)
            elif tensor.is_floating_point() and tensor.dim() > 1 and "anchors" not in name:
                tensor.normal_(0.0, 1.2 / math.sqrt(tensor[0].numel()))
    return model


def targets(counts: tuple[int, ...], num_classes: int = 5) -> list[dict[str, Tensor]]:
    return [
        {
            "labels": torch.randint(0, num_classes, (n,)),
            "boxes": torch.cat([torch.rand(n, 2) * 0.6 + 0.2, torch.rand(n, 2) * 0.2 + 0.05], 1),
        }
        for n in counts
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_eval_outputs(variant: str) -> None:
    height = 640 if variant == "n" else 320
    model = build_model("deimv2", variant, 3, (height, height)).eval()
    with torch.inference_mode():
        outputs = model(torch.rand(2, 3, height, height))
    queries = VARIANTS[variant].decoder.num_queries
    assert {name: tuple(value.shape) for name, value in outputs.items()} == {
        "pred_logits": (2, queries, 3),
        "pred_boxes": (2, queries, 4),
    }
    assert all(torch.isfinite(value).all() for value in outputs.values())


def test_training_outputs_and_gradients() -> None:
    model, criterion = small().train(), build_criterion("deimv2", "atto", 5)
    truth = targets((2, 0, 3))
    outputs = model(torch.rand(3, 3, *SIZE), truth)
    sets = {"main", "aux_0", "aux_1", "pre", "enc_0", "dn_0", "dn_1", "dn_2", "dn_pre"}
    assert {name for name, value in outputs.items() if isinstance(value, dict)} == sets
    assert set(outputs) - sets == {"ref_points", "dn_ref_points", "dn_meta"}
    num_dn = outputs["dn_meta"].split[0]
    for name in sets:
        count = num_dn if name.startswith("dn") else 100
        assert outputs[name]["pred_logits"].shape == (3, count, 5)
        assert outputs[name]["pred_boxes"].shape == (3, count, 4)
        assert ("pred_corners" in outputs[name]) == (name not in ("pre", "enc_0", "dn_pre"))
    assert not outputs["ref_points"].requires_grad
    torch.stack(list(criterion(outputs, truth, 0).values())).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
    assert float(model.decoder.denoising_class_embed.weight.grad[-1].abs().max()) == 0.0


def test_no_objects_means_no_denoising() -> None:
    model = small().train()
    outputs = model(torch.rand(2, 3, *SIZE), targets((0, 0)))
    assert not [name for name in outputs if name.startswith("dn")]


def test_denoising_does_not_leak_into_matching() -> None:
    model = stirred(small()).train()
    images, truth = torch.rand(2, 3, *SIZE), targets((3, 1))
    denoising = make_denoising(truth, num_classes=5, num_queries=100)
    with torch.no_grad():
        plain, noised = model(images), model(images, truth, denoising)
    torch.testing.assert_close(plain["main"]["pred_logits"], noised["main"]["pred_logits"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain["main"]["pred_boxes"], noised["main"]["pred_boxes"], rtol=1e-4, atol=1e-5)


def test_fresh_network_is_unsure_and_starts_at_its_anchors() -> None:
    model = small().eval()
    with torch.inference_mode():
        outputs = model(torch.rand(1, 3, *SIZE))
    assert 0.002 < float(outputs["pred_logits"].sigmoid().mean()) < 0.05
    sides = outputs["pred_boxes"][0, :, 2:]
    # zero bbox heads: every box is its anchor, of side 0.05 or 0.1
    assert torch.minimum((sides - 0.05).abs(), (sides - 0.1).abs()).max() < 1e-4


def test_same_seed_same_weights() -> None:
    torch.manual_seed(3)
    first = small().state_dict()
    torch.manual_seed(3)
    second = small().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("size", [(320, 320), (192, 256)])
def test_other_input_sizes(size: tuple[int, int]) -> None:
    model = stirred(small()).eval()
    fitted = DEIMv2(model.config.with_input_size(*size)).eval()
    state = {k: v for k, v in model.state_dict().items() if k not in ("decoder.anchors", "decoder.valid_mask")}
    fitted.load_state_dict(state, strict=False)
    images = torch.rand(1, 3, *size)
    with torch.inference_mode():
        a, b = model(images), fitted(images)
    torch.testing.assert_close(a["pred_boxes"], b["pred_boxes"])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 64, 64), r"must be \(B, 3, H, W\) with H and W multiples of 32 px, got \(3, 64, 64\)"),
        ((1, 1, 64, 64), "got"),
        ((1, 3, 65, 64), "multiples of 32"),
        ((1, 3, 64, 64), "gives 20 positions, fewer than the 100 queries"),
    ],
)
def test_wrong_inputs(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        small().eval()(torch.zeros(shape))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: build_model("yolo", "n", 3),
            r"unknown model family 'yolo' \(did you mean 'yolo_master' or 'mamba_yolo'\?\); known families: deimv2",
        ),
        (
            lambda: build_model("deimv2", "xl", 3),
            r"unknown deimv2 variant 'xl' \(did you mean 'l' or 'x'\?\); known variants: atto, femto, pico, n, s",
        ),
        (lambda: build_criterion("deimv2", "xl", 3), "unknown deimv2 variant 'xl'"),
        (lambda: get_config("tall"), "unknown DEIMv2 variant 'tall'; known variants: atto, femto, pico, n, s, m, l, x"),
        (lambda: build_model("deimv2", "atto", 0), "num_classes must be at least 1, got 0"),
        (lambda: build_model("deimv2", "atto", 3, (100, 64)), r"multiples of 32 px, got \(100, 64\)"),
    ],
)
def test_wrong_configurations(build, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build()


@pytest.mark.parametrize("variant", ["atto", "n"])
@pytest.mark.parametrize("fuse", ["all", "official"])
def test_deployed_form_computes_the_same(variant: str, fuse: str) -> None:
    config: DEIMv2Config = get_config(variant, 5).with_input_size(320, 352 if variant == "atto" else 640)
    # float64, so that equally good positions rank the same in both
    model = stirred(DEIMv2(config)).double().eval()
    before = copy.deepcopy(model.state_dict())
    fused = deploy(model, fuse=fuse)
    images = torch.rand(1, 3, *config.input_size, dtype=torch.float64)
    with torch.inference_mode():
        a, b = model(images), fused(images)
    torch.testing.assert_close(a["pred_boxes"], b["pred_boxes"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a["pred_logits"], b["pred_logits"], rtol=1e-6, atol=1e-6)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    norms = [m for m in fused.modules() if isinstance(m, nn.BatchNorm2d | LearnableAffine)]
    assert bool(norms) == (fuse == "official")


def test_fusing_twice_changes_nothing() -> None:
    once = deploy(stirred(small()))
    twice = deploy(once)
    assert all(torch.equal(once.state_dict()[name], tensor) for name, tensor in twice.state_dict().items())


@pytest.mark.parametrize("scale", [1.3, -0.7, 0.0])
def test_fast_training_path_equals_the_plain_one(scale: float) -> None:
    fast = ConvBNAct(3, 8, 3).double().train()
    with torch.no_grad():
        fast.lab.scale.fill_(scale)
        fast.lab.bias.fill_(-0.2)
        fast.bn.bias.uniform_(-1, 1)
    plain = copy.deepcopy(fast)
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    y = fast(x)
    z = plain.lab(torch.relu(plain.bn(plain.conv(x))))
    torch.testing.assert_close(y, z)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    (z * weights).sum().backward()
    for (name, a), (_, b) in zip(fast.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    for (name, a), (_, b) in zip(fast.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("training", [True, False])
def test_self_attention_is_multihead_attention(training: bool) -> None:
    ours, torchs = SelfAttention(32, 4), nn.MultiheadAttention(32, 4, batch_first=True)
    torchs.load_state_dict(ours.state_dict())
    x, pos = torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    expected, _ = torchs(x + pos, x + pos, x)
    torch.testing.assert_close(ours.train(training)(x, pos), expected, rtol=1e-4, atol=1e-5)


def test_grouped_attention_is_masked_attention() -> None:
    groups, rest = QueryGroups(count=12, groups=3), 5
    q, k, v = (torch.randn(2, 4, 12 + rest, 8) for _ in range(3))
    blocked = attention_mask(3, 4, rest)
    scores = (q @ k.transpose(-1, -2)).masked_fill(blocked, -math.inf)
    torch.testing.assert_close(attend_groups(q, k, v, groups), scores.softmax(-1) @ v, rtol=1e-4, atol=1e-5)


def test_deformable_attention_by_hand() -> None:
    attention = DeformableAttention(8, 2, (2, 1)).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0.0, 0.3)
    query = torch.randn(1, 3, 8, dtype=torch.float64)
    boxes = torch.rand(1, 3, 4, dtype=torch.float64) * 0.5 + 0.2
    maps = [torch.randn(1, 8, 6, 5, dtype=torch.float64), torch.randn(1, 8, 3, 3, dtype=torch.float64)]
    with torch.no_grad():
        got = attention(query, boxes, maps)

    offsets = attention.sampling_offsets(query).detach().reshape(3, 2, 3, 2)
    weights = attention.attention_weights(query).detach().reshape(3, 2, 3).softmax(-1)
    expected = torch.zeros(3, 2, 4, dtype=torch.float64)
    for n in range(3):
        for head in range(2):
            for point, (level, share) in enumerate(((0, 2), (0, 2), (1, 1))):
                values = maps[level][0, head * 4 : head * 4 + 4]
                height, width = values.shape[1:]
                place = boxes[0, n, :2] + offsets[n, head, point] / share * boxes[0, n, 2:] * 0.5
                px, py = float(place[0]) * width - 0.5, float(place[1]) * height - 0.5
                for x in (math.floor(px), math.floor(px) + 1):
                    for y in (math.floor(py), math.floor(py) + 1):
                        if 0 <= x < width and 0 <= y < height:
                            share_xy = (1 - abs(px - x)) * (1 - abs(py - y))
                            expected[n, head] += weights[n, head, point] * share_xy * values[:, y, x]
    torch.testing.assert_close(got[0], expected.reshape(3, 8))


def test_distribution_table_and_edges() -> None:
    table = distribution_table()
    assert table.shape == (33,)
    assert table[[0, 16, 32]].tolist() == [-4.0, 0.0, 4.0]
    assert (table.diff() > 0).all()
    torch.testing.assert_close(table, -table.flip(0))
    boxes = torch.rand(7, 4) + 0.1
    torch.testing.assert_close(decode_edges(boxes, torch.zeros(7, 4), 4.0), boxes)
    # one unit of the right edge is a quarter of the width
    moved = decode_edges(torch.tensor([0.5, 0.5, 0.4, 0.2]), torch.tensor([0.0, 0.0, 1.0, 0.0]), 4.0)
    torch.testing.assert_close(moved, torch.tensor([0.55, 0.5, 0.5, 0.2]))


def test_anchors() -> None:
    anchors, valid = make_anchors([(4, 8), (2, 4)])
    assert anchors.shape == (1, 40, 4)
    assert valid.all()
    torch.testing.assert_close(anchors[0, 9].sigmoid(), torch.tensor([1.5 / 8, 1.5 / 4, 0.05, 0.05]))
    torch.testing.assert_close(anchors[0, 32].sigmoid(), torch.tensor([0.125, 0.25, 0.1, 0.1]))
    edge, invalid = make_anchors([(80, 80)])
    assert int((~invalid).sum()) == 80 * 80 - 78 * 78
    assert torch.isinf(edge[0, 0]).all()


def test_inverse_sigmoid() -> None:
    x = torch.tensor([0.0, 1e-7, 0.3, 1.0])
    torch.testing.assert_close(inverse_sigmoid(x)[2].sigmoid(), x[2])
    assert torch.isfinite(inverse_sigmoid(x)).all()
