"""State-space operators and mixers: reference data, and properties that it does not show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from carpus.models.ssm import scan_blocks
from carpus.models.ssm.cross_scan import cross_merge, cross_scan
from carpus.models.ssm.decay import decay_scan
from carpus.models.ssm.mamba2 import Mamba2, ssd
from carpus.models.ssm.mamba3 import rotate
from carpus.models.ssm.mamba3_mixer import Mamba3, decay_rate
from carpus.models.ssm.mhc import StreamAdapter, StreamExpand, StreamLayer, StreamMerge, sinkhorn
from carpus.models.ssm.scan import selective_scan, selective_scan_reference
from carpus.runtime.errors import DataError
from tests.goldens.__main__ import main

OWN = Path(__file__).parent / "data" / "goldens"
ROOT = Path(os.environ.get("CARPUS_GOLDENS") or OWN)


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def test_reference_data(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([str(ROOT / "ssm_ops")])
    output = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in output.splitlines() if not line.startswith("  ok"))
    assert all(f"{name} " in output for name in ("selective_scan", "cross_scan", "mamba2_ssd", "mamba3_module"))


def scan_arguments(batch: int = 2, channels: int = 6, groups: int = 2, length: int = 11, dtype=torch.float64):
    make = lambda *shape: torch.randn(*shape, dtype=dtype)  # noqa: E731
    return [
        make(batch, channels, length),
        make(batch, channels, length),
        -torch.rand(channels, 3, dtype=dtype),
        make(batch, groups, 3, length),
        make(batch, groups, 3, length),
        make(channels),
    ]


# many steps in a block; a few, the last block shorter; one at a time with the batch in parts
@pytest.mark.parametrize("elements", [1 << 17, 100, 20])
def test_scan_gradients(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_blocks, "BLOCK_ELEMENTS", elements)
    arguments = [argument.requires_grad_() for argument in scan_arguments()]
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def scan(*values: Tensor) -> tuple[Tensor, Tensor]:
        return selective_scan(*values[:6], delta_bias=values[6])

    assert torch.autograd.gradcheck(scan, [*arguments, bias])
    expected = selective_scan_reference(*arguments, delta_bias=bias)
    for ours, theirs in zip(scan(*arguments, bias), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_scan_gradients_equal_the_reference_in_float32() -> None:
    arguments = scan_arguments(3, 16, 4, 50, torch.float32)
    weights = torch.randn(3, 16, 50)
    gradients = []
    for scan in (selective_scan, selective_scan_reference):
        leaves = [argument.clone().requires_grad_() for argument in arguments]
        y, last = scan(*leaves)
        ((y * weights).sum() + last.sum()).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_scan_that_only_some_inputs_train() -> None:
    arguments = scan_arguments()
    arguments[3].requires_grad_()
    selective_scan(*arguments)[0].sum().backward()
    assert arguments[3].grad is not None
    assert arguments[0].grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scan_of_half_inputs_sums_in_float32(dtype: torch.dtype) -> None:
    arguments = scan_arguments(dtype=torch.float32)
    half = [value.to(dtype) if value.ndim > 2 else value for value in arguments]
    y, last = selective_scan(*half)
    assert y.dtype == dtype
    assert last.dtype == torch.float32
    expected, _ = selective_scan_reference(*(value.float() for value in half))
    torch.testing.assert_close(y, expected.to(dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.__setitem__(1, a[1][:, :, 1:]), "u and delta must both be"),
        (lambda a: a.__setitem__(2, a[2][1:]), "A must be"),
        (lambda a: a.__setitem__(3, a[3][:, :, 1:]), "B and C must both be"),
        (lambda a: a.__setitem__(slice(3, 5), [a[3].repeat(1, 2, 1, 1)] * 2), "cannot be split into 4 equal groups"),
    ],
)
def test_scan_refuses_shapes(change, message: str) -> None:
    arguments = scan_arguments()
    change(arguments)
    for scan in (selective_scan, selective_scan_reference):
        with pytest.raises(DataError, match=message):
            scan(*arguments)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 5), (5, 2), (4, 4)])
def test_cross_merge_is_the_adjoint_of_cross_scan(height: int, width: int) -> None:
    x = torch.randn(2, 3, height, width, dtype=torch.float64)
    ys = torch.randn(2, 4, 3, height * width, dtype=torch.float64)
    merged = cross_merge(ys, height, width).reshape(x.shape)
    torch.testing.assert_close((cross_scan(x) * ys).sum(), (x * merged).sum())


def test_decay_scan_equals_its_definition() -> None:
    batch, length, heads, rank, states, width = 2, 7, 3, 2, 4, 5
    q, k = torch.randn(2, batch, length, heads, rank, states, dtype=torch.float64)
    v = torch.randn(batch, length, heads, rank, width, dtype=torch.float64)
    decay, now, past = torch.rand(3, batch, length, heads, dtype=torch.float64)
    start = torch.randn(batch, heads, width, states, dtype=torch.float64)
    h, outputs = start, []
    write = v.transpose(-1, -2) @ k
    for t in range(length):
        h = torch.exp(-decay[:, t])[..., None, None] * h
        outputs.append(q[:, t] @ (h + now[:, t, :, None, None] * write[:, t]).transpose(-1, -2))
        h = h + past[:, t, :, None, None] * write[:, t]
    for chunk in (1, 3, 7, 64):
        y, last = decay_scan(q, k, v, -decay, now, past, initial_state=start, chunk_size=chunk)
        torch.testing.assert_close(y, torch.stack(outputs, 1))
        torch.testing.assert_close(last, h)
    with pytest.raises(DataError, match="chunk_size"):
        decay_scan(q, k, v, -decay, now, chunk_size=0)


def test_ssd_is_a_selective_scan_with_equal_decays() -> None:
    x, dt = torch.randn(2, 9, 4, 3, dtype=torch.float64), torch.rand(2, 9, 4, dtype=torch.float64)
    decays = -torch.rand(4, dtype=torch.float64)
    write, read = torch.randn(2, 2, 9, 2, 5, dtype=torch.float64)
    y, _ = ssd(x, dt, decays, write, read, chunk_size=4)
    scanned, _ = selective_scan(
        x.flatten(2).transpose(1, 2),
        dt.repeat_interleave(3, 2).transpose(1, 2),
        decays.repeat_interleave(3)[:, None].expand(12, 5),
        write.permute(0, 2, 3, 1),
        read.permute(0, 2, 3, 1),
        delta_softplus=False,
    )
    torch.testing.assert_close(y.flatten(2), scanned.transpose(1, 2))


MIXERS = {
    "mamba2": lambda: Mamba2(16, d_state=8, headdim=8, ngroups=2, chunk_size=4),
    "siso": lambda: Mamba3(16, d_state=8, headdim=8, ngroups=2, chunk_size=4),
    "siso norm": lambda: Mamba3(16, d_state=8, headdim=8, output_norm=True, rope_fraction=1.0, chunk_size=4),
    "mimo": lambda: Mamba3(16, d_state=8, headdim=8, ngroups=2, mimo_rank=3, chunk_size=4),
}


@pytest.mark.parametrize("kind", MIXERS)
def test_streaming_equals_the_sequence(kind: str) -> None:
    mixer = MIXERS[kind]().double()
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    whole, end = mixer(x)
    first, middle = mixer(x[:, :6])
    second, resumed = mixer(x[:, 6:], middle)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    state, steps = mixer.initial_state(2), []
    for t in range(13):
        y, state = mixer.step(x[:, t], state)
        steps.append(y)
    torch.testing.assert_close(torch.stack(steps, 1), whole)
    for stepped, resumed_part, part in zip(state, resumed, end, strict=True):
        torch.testing.assert_close(stepped, part)
        torch.testing.assert_close(resumed_part, part)


@pytest.mark.parametrize("kind", MIXERS)
def test_mixers_are_causal_and_train(kind: str) -> None:
    mixer = MIXERS[kind]()
    x = torch.randn(1, 9, 16, requires_grad=True)
    y, _ = mixer(x)
    y[:, 4].sum().backward()
    assert x.grad is not None
    assert (x.grad[:, 5:] == 0).all()
    assert (x.grad[:, :5].abs().sum(-1) > 0).all()
    mixer.zero_grad()
    mixer(x.detach())[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"headdim": 7}, "multiple of headdim 7"),
        ({"headdim": 8, "ngroups": 3}, "ngroups 3"),
        ({"headdim": 8, "rope_fraction": 0.0}, "rope_fraction"),
        ({"headdim": 8, "mimo_rank": 0}, "mimo_rank must be at least 1"),
    ],
)
def test_mixers_refuse_sizes(options: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Mamba3(16, d_state=8, **options)


def test_rotation_keeps_lengths_and_adds_up() -> None:
    x, a, b = torch.randn(3, 8), torch.randn(3, 2), torch.randn(3, 2)
    for halves in (False, True):
        turned = rotate(rotate(x, a, halves=halves), b, halves=halves)
        torch.testing.assert_close(turned, rotate(x, a + b, halves=halves))
        torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    with pytest.raises(DataError, match="5 angles"):
        rotate(x, torch.zeros(3, 5), halves=False)


def test_decay_rates_are_negative_and_rise_smoothly() -> None:
    rates = decay_rate(torch.linspace(-1e6, 50, 1001, dtype=torch.float64))
    assert (rates <= -1e-4).all()
    assert (rates.diff() <= 0).all()
    assert decay_rate(torch.zeros(1)).item() == -1.0


def test_sinkhorn_is_doubly_stochastic() -> None:
    matrix = sinkhorn(3 * torch.randn(5, 4, 4, dtype=torch.float64), 200)
    for axis in (-1, -2):
        torch.testing.assert_close(matrix.sum(axis), torch.ones(5, 4, dtype=torch.float64))
    with pytest.raises(DataError, match="square"):
        sinkhorn(torch.zeros(2, 3))


def test_streams_keep_their_mean_where_the_core_adds_nothing() -> None:
    class Silent(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x)

    layer = StreamLayer(8, 4, Silent(), iterations=100).double()
    torch.nn.init.normal_(layer.mix)
    x = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    y = layer(x)
    assert not torch.allclose(y, x)
    torch.testing.assert_close(y.mean(-2), x.mean(-2))


def test_streams_start_as_a_plain_residual_layer() -> None:
    mixer = MIXERS["siso"]().double()
    expand, merge = StreamExpand(16, 4).double(), StreamMerge(16, 4).double()
    layer = StreamLayer(16, 4, mixer, adapter_bottleneck=3).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    expected = x + mixer(layer.norm(x))[0] / 4
    torch.testing.assert_close(merge(layer(expand(x))), expected)


def test_streams_step_as_they_run() -> None:
    mixer = MIXERS["mimo"]().double()
    layer = StreamLayer(16, 3, mixer, adapter_bottleneck=2).double()
    for module in layer.modules():
        if isinstance(module, StreamAdapter):
            torch.nn.init.normal_(module.up.weight)
            torch.nn.init.normal_(module.scale)
    x = torch.randn(2, 6, 3, 16, dtype=torch.float64)
    whole, state = layer(x), mixer.initial_state(2)
    for t in range(6):
        y, state = layer.step(x[:, t], state)
        torch.testing.assert_close(y, whole[:, t])
