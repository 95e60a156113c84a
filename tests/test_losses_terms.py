"""Boxes, matcher and single loss terms: properties, gradients, processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed, multiprocessing

from carpus.models.deimv2.distribution import decode_edges, distribution_table
from carpus.models.losses import boxes as box_math
from carpus.models.losses import config, criterion, matcher, targets, terms
from carpus.models.losses.boxes import (
    box_cxcywh_to_xyxy,
    box_xyxy_to_cxcywh,
    exact_inverse_sigmoid,
    inverse_sigmoid,
    iou_and_giou,
    paired_iou,
)
from carpus.models.losses.config import CriterionConfig, MatcherConfig
from carpus.models.losses.criterion import DEIMCriterion
from carpus.models.losses.matcher import Assignment, match, matching_cost, union_assignment
from carpus.models.losses.targets import pack_targets
from carpus.models.losses.terms import distribution_loss, distribution_targets, matchability_aware_loss


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread only waits, for seconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("module", [box_math, config, criterion, matcher, targets, terms])
def test_exported_names_exist_and_are_documented(module: object) -> None:
    for name in module.__all__:  # type: ignore[attr-defined]
        value = getattr(module, name)
        if callable(value):
            assert value.__doc__, name


def test_corners_and_centres_are_inverse(rng: torch.Generator) -> None:
    boxes = torch.rand(50, 4, generator=rng)
    torch.testing.assert_close(box_xyxy_to_cxcywh(box_cxcywh_to_xyxy(boxes)), boxes)


def test_inverse_sigmoid_inverts_and_saturates() -> None:
    x = torch.tensor([-0.5, 0.0, 1e-3, 0.5, 0.9, 1.0, 2.0])
    for inverse in (inverse_sigmoid, exact_inverse_sigmoid):
        torch.testing.assert_close(inverse(x).sigmoid(), x.clamp(1e-5, 1 - 1e-5), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("a", "b", "iou", "giou"),
    [
        ([0, 0, 2, 2], [0, 0, 2, 2], 1.0, 1.0),
        ([0, 0, 2, 2], [1, 0, 3, 2], 1 / 3, 1 / 3),
        ([0, 0, 1, 1], [2, 0, 3, 1], 0.0, -1 / 3),
        ([0, 0, 0, 0], [0, 0, 0, 0], 0.0, 0.0),
        ([0, 0, 2, 2], [1, 1, 1, 1], 0.0, 0.0),
    ],
)
def test_iou_of_known_pairs(a: list[float], b: list[float], iou: float, giou: float) -> None:
    values = iou_and_giou(torch.tensor(a, dtype=torch.float32), torch.tensor(b, dtype=torch.float32))
    assert [float(v) for v in values] == pytest.approx([iou, giou])


def test_matchability_loss_has_the_gradient_of_its_definition(rng: torch.Generator) -> None:
    logits = torch.randn(2, 7, 4, generator=rng, dtype=torch.float64).requires_grad_()
    query, labels = torch.tensor([[0, 3, 6], [1, 2, 5]]), torch.tensor([[1, 0, 3], [2, 2, 0]])
    iou = torch.rand(2, 3, generator=rng, dtype=torch.float64)
    factor = torch.tensor([1.0, -2.5], dtype=torch.float64)
    (matchability_aware_loss(logits, query, labels, iou, 1.5) * factor).sum().backward()

    free = logits.detach().clone().requires_grad_()
    goal, weight = torch.zeros_like(free), free.detach().sigmoid() ** 1.5
    for s in range(2):
        for q, c, v in zip(query[s].tolist(), labels[s].tolist(), iou[s].tolist(), strict=True):
            goal[s, q, c], weight[s, q, c] = v**1.5, 1.0
    loss = torch.nn.functional.binary_cross_entropy_with_logits(free, goal, reduction="none") * weight
    (loss.sum((1, 2)) * factor).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, free.grad)


@pytest.mark.parametrize("gamma", [1.5, 2.0])
def test_matchability_loss_is_least_at_the_target_quality(gamma: float) -> None:
    iou = torch.tensor([[0.7]])
    grid = torch.linspace(-4, 4, 801)
    index = torch.zeros(1, 1, dtype=torch.int64)
    values = [float(matchability_aware_loss(x.view(1, 1, 1), index, index, iou, gamma)) for x in grid]
    assert float(grid[int(np.argmin(values))].sigmoid()) == pytest.approx(0.7**gamma, abs=0.01)


def test_distribution_targets_describe_the_target_box(rng: torch.Generator) -> None:
    table = distribution_table()
    reference = torch.cat(
        (torch.rand(40, 2, generator=rng) * 0.4 + 0.3, torch.rand(40, 2, generator=rng) * 0.3 + 0.1), 1
    )
    goal = reference * (1 + 0.15 * (torch.rand(40, 4, generator=rng) - 0.5))
    left, right_share = distribution_targets(reference, goal, table, 4.0)
    distances = table[left] * (1 - right_share) + table[left + 1] * right_share
    torch.testing.assert_close(decode_edges(reference, distances, 4.0), goal, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("factor", "left", "share"), [(100.0, 31, 1.0), (1e-6, 0, 0.0)], ids=["far", "near"])
def test_distribution_targets_end_with_the_table(factor: float, left: int, share: float) -> None:
    reference = torch.tensor([[0.5, 0.5, 0.1, 0.1]])
    shift = torch.tensor([[0.5, 0.5, 0.1 * factor, 0.1 * factor]])
    if factor < 1:  # edges beyond the opposite side: the target lies far to the right
        shift = torch.tensor([[5.0, 5.0, 0.1, 0.1]])
    got_left, got_share = distribution_targets(reference, shift, distribution_table(), 4.0)
    edges = slice(0, 2) if factor < 1 else slice(0, 4)
    assert got_left[0, edges].unique().tolist() == [left]
    assert got_share[0, edges].unique().tolist() == [share]


def test_distribution_loss_is_least_at_its_target() -> None:
    left, share, iou = torch.tensor([[[10]]]), torch.tensor([[[0.25]]]), torch.ones(1, 1)
    corners = torch.zeros(1, 1, 1, 33, requires_grad=True)
    optimizer = torch.optim.Adam([corners], lr=0.2)
    for _ in range(300):
        optimizer.zero_grad()
        distribution_loss(corners, left, share, iou).sum().backward()
        optimizer.step()
    prob = corners.detach().softmax(-1)[0, 0, 0]
    assert [float(prob[10]), float(prob[11])] == pytest.approx([0.75, 0.25], abs=0.01)


def test_cost_of_padding_does_not_reach_the_assignment(rng: torch.Generator) -> None:
    boxes = torch.rand(1, 2, 9, 4, generator=rng) * 0.5 + 0.2
    logits = torch.randn(1, 2, 9, 3, generator=rng)
    objects = [
        {"labels": torch.tensor([0, 1, 2, 2]), "boxes": boxes[0, 0, [8, 1, 3, 5]]},
        {"labels": torch.tensor([1]), "boxes": boxes[0, 1, [4]]},
    ]
    packed = pack_targets(objects, 3, torch.device("cpu"))
    settings = MatcherConfig(cost_class=0.0)
    assert matching_cost(logits, boxes, packed, settings, changed=False).shape == (1, 2, 4, 9)
    found = match(logits, boxes, packed, settings).per_image(0, 9, packed.offsets)
    assert found[0].tolist() == [[1, 3, 5, 8], [1, 2, 3, 0]]
    assert found[1].tolist() == [[4], [0]]


def test_union_takes_the_most_frequent_target_and_breaks_ties_downwards() -> None:
    query = torch.tensor([[0, 1], [0, 1], [0, 2]])
    target = torch.tensor([[0, 1], [1, 0], [1, 0]])
    union = union_assignment(Assignment(query, target))
    assert union.query.tolist() == [[0, 1, 2]]
    assert union.target.tolist() == [[1, 0, 0]]


def test_paired_iou_of_equal_boxes_is_one(rng: torch.Generator) -> None:
    boxes = torch.rand(20, 4, generator=rng) + 0.1
    torch.testing.assert_close(paired_iou(boxes, boxes), torch.ones(20))


def _rank(rank: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    values = DEIMCriterion(CriterionConfig())._normalizers((3, 6)[rank], (0, 1)[rank])
    Path(results, str(rank)).write_text(repr(values))
    distributed.destroy_process_group()


@pytest.mark.slow
def test_normalizers_are_means_over_processes(tmp_path: Path) -> None:
    multiprocessing.spawn(_rank, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["(4.5, 1.0)"] * 2
