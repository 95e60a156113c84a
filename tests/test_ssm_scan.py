"""The selective scan in blocks: what speed must not change."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from carpus.models.mamba_yolo.ss2d import cross_selective_scan
from carpus.models.ssm import scan_blocks
from carpus.models.ssm.cross_scan import cross_merge, cross_merge_steps, cross_scan, cross_scan_steps
from carpus.models.ssm.scan import selective_scan, selective_scan_reference


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 5), (5, 2), (4, 4)])
def test_scans_of_pixels_equal_scans_of_channels(height: int, width: int) -> None:
    x = torch.randn(3, 2, height, width, dtype=torch.float64, requires_grad=True)
    steps = cross_scan_steps(x.permute(2, 3, 0, 1))
    torch.testing.assert_close(steps.permute(2, 0, 3, 1), cross_scan(x))
    ys = torch.randn(4, height * width, 3, 2, dtype=torch.float64, requires_grad=True)
    merged = cross_merge_steps(ys, height, width)
    torch.testing.assert_close(
        merged.flatten(0, 1).permute(1, 2, 0), cross_merge(ys.permute(2, 0, 3, 1), height, width)
    )
    assert torch.autograd.gradcheck(cross_scan_steps, x.permute(2, 3, 0, 1).detach().requires_grad_())
    assert torch.autograd.gradcheck(lambda y: cross_merge_steps(y, height, width), ys)


def map_arguments() -> list[Tensor]:
    batch, channels, states, rank = 2, 6, 3, 2
    shapes = [
        (batch, channels, 3, 5),
        (4, rank + 2 * states, channels),
        (4, channels, rank),
        (4, channels),
        (4 * channels, states),
        (4 * channels,),
    ]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def directions_one_by_one(x: Tensor, project: Tensor, step: Tensor, bias: Tensor, logs: Tensor, skip: Tensor) -> Tensor:
    """The definition: every direction a plain scan of its own."""
    height, width = x.shape[-2:]
    states, rank = logs.shape[1], step.shape[2]
    outputs = []
    for sequence, w, dt, b, log, d in zip(
        cross_scan(x).unbind(1), project, step, bias, logs.chunk(4), skip.chunk(4), strict=True
    ):
        low, write, read = (w @ sequence).split((rank, states, states), 1)
        y, _ = selective_scan_reference(
            sequence, dt @ low, -log.exp(), write.unsqueeze(1), read.unsqueeze(1), d, delta_bias=b
        )
        outputs.append(y)
    return cross_merge(torch.stack(outputs, 1), height, width)


def test_four_directions_at_once_equal_one_after_the_other() -> None:
    arguments = [argument.requires_grad_() for argument in map_arguments()]
    ours, theirs = cross_selective_scan(*arguments), directions_one_by_one(*arguments)
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn_like(ours)
    expected = torch.autograd.grad((theirs * weights).sum(), arguments)
    for gradient, other in zip(torch.autograd.grad((ours * weights).sum(), arguments), expected, strict=True):
        torch.testing.assert_close(gradient, other)


def test_the_exported_scan_equals_the_fast_one() -> None:
    class Scan(torch.nn.Module):
        def forward(self, *arguments: Tensor) -> Tensor:
            return cross_selective_scan(*arguments)

    arguments = tuple(map_arguments())
    program = torch.export.export(Scan(), arguments)
    torch.testing.assert_close(program.module()(*arguments), cross_selective_scan(*arguments))


# two steps a block and two blocks a segment; a step at a time and the batch in parts; all at once
@pytest.mark.parametrize(("elements", "segment"), [(2 * 3 * 6 * 3, 2), (20, 3), (1 << 18, 8)])
@pytest.mark.parametrize("softplus", [True, False])
def test_blocks_and_segments_change_nothing(
    elements: int, segment: int, softplus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_blocks, "BLOCK_ELEMENTS", elements)
    monkeypatch.setattr(scan_blocks, "SEGMENT_BLOCKS", segment)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    u, delta, write, read, skip, bias = (
        make(3, 6, 13),
        make(3, 6, 13),
        make(3, 2, 3, 13),
        make(3, 2, 3, 13),
        make(6),
        make(6),
    )
    decays = (-torch.rand(6, 3, dtype=torch.float64)).requires_grad_()
    for used in ((skip, bias), (None, None)):
        given = [u, delta, decays, write, read, *(weights for weights in used if weights is not None)]
        results = []
        for scan in (selective_scan, selective_scan_reference):
            y, last = scan(u, delta, decays, write, read, used[0], delta_bias=used[1], delta_softplus=softplus)
            total = (y * torch.linspace(-1, 1, 13, dtype=y.dtype)).sum() + last.square().sum()
            results.append((y, last, *torch.autograd.grad(total, given)))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_decays_that_vanish_leave_exact_results_and_gradients() -> None:
    u, delta = torch.randn(2, 4, 30), torch.linspace(-60, 60, 30).expand(2, 4, 30).clone()
    write, read = torch.randn(2, 2, 1, 3, 30).unbind()
    leaves = [u, delta, -torch.tensor([1e-3, 1.0, 300.0]).expand(4, 3).clone(), write, read]
    results = []
    for scan in (selective_scan, selective_scan_reference):
        arguments = [leaf.clone().requires_grad_() for leaf in leaves]
        y, last = scan(*arguments)
        (y.sum() + last.sum()).backward()
        results.append([y, last, *(argument.grad for argument in arguments)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def test_training_keeps_nothing_of_the_size_of_all_states() -> None:
    length, channels, states = 4096, 32, 16
    arguments = [torch.randn(1, channels, length), torch.randn(1, channels, length), -torch.rand(channels, states)]
    arguments += [torch.randn(1, 1, states, length), torch.randn(1, 1, states, length)]
    sizes = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y, _ = selective_scan(*(argument.requires_grad_() for argument in arguments))
    kept = sum(sizes)
    boundaries = math.ceil(length * channels * states / scan_blocks.BLOCK_ELEMENTS) * channels * states
    assert kept <= 6 * length * channels + boundaries
    assert kept < length * channels * states / 2
    y.sum().backward()
