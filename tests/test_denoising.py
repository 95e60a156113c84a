"""Denoising queries: layout, noise bounds, masks, repeatability."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from carpus.models.deimv2.denoising import DenoisingDraws, attention_mask, make_denoising
from carpus.models.losses.boxes import box_cxcywh_to_xyxy
from carpus.runtime.errors import DataError

CLASSES, QUERIES = 7, 10


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread only waits, for seconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_targets(counts: list[int]) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [
        {
            "labels": torch.randint(0, CLASSES, (n,), generator=g),
            "boxes": torch.cat(
                (torch.rand(n, 2, generator=g) * 0.2 + 0.4, torch.rand(n, 2, generator=g) * 0.2 + 0.1), 1
            ),
        }
        for n in counts
    ]


def make(counts: list[int], seed: int = 0, **options: Any):  # type: ignore[no-untyped-def]
    settings: dict[str, Any] = {"num_denoising": 20, **options}
    generator = torch.Generator().manual_seed(seed)
    return make_denoising(
        make_targets(counts), num_classes=CLASSES, num_queries=QUERIES, generator=generator, **settings
    )


@pytest.mark.parametrize(
    ("counts", "num_denoising", "groups", "length"),
    [([3, 5], 20, 4, 40), ([1], 100, 100, 200), ([0, 4, 2], 100, 25, 200), ([30, 1], 20, 1, 60)],
)
def test_layout(counts: list[int], num_denoising: int, groups: int, length: int) -> None:
    made = make(counts, num_denoising=num_denoising)
    assert (made.num_groups, made.split) == (groups, (length, QUERIES))
    assert made.class_ids.shape == (len(counts), length)
    assert made.bbox_unact.shape == (len(counts), length, 4)
    assert [len(index) for index in made.positive_idx] == [count * groups for count in counts]
    assert torch.isfinite(made.bbox_unact).all()


@pytest.mark.parametrize(("counts", "num_denoising"), [([0, 0], 100), ([], 100), ([3], 0)])
def test_nothing_to_restore(counts: list[int], num_denoising: int) -> None:
    assert make(counts, num_denoising=num_denoising) is None


def test_padding_has_the_padding_class_and_real_slots_do_not() -> None:
    made = make([3, 5], label_noise_ratio=1.0)
    slot = torch.arange(40) % 5
    assert (made.class_ids[0, slot >= 3] == CLASSES).all()
    assert (made.class_ids[0, slot < 3] < CLASSES).all()
    assert (made.class_ids[1] < CLASSES).all()


def test_without_noise_the_positives_are_the_targets() -> None:
    objects = make_targets([3, 5])
    made = make([3, 5], label_noise_ratio=0.0, box_noise_scale=0.0)
    for i, target in enumerate(objects):
        repeated = target["boxes"].repeat(made.num_groups, 1)
        torch.testing.assert_close(made.bbox_unact[i, made.positive_idx[i]].sigmoid(), repeated)
        assert made.class_ids[i, made.positive_idx[i]].tolist() == target["labels"].tolist() * made.num_groups


def test_positives_move_by_less_than_half_their_size_and_negatives_by_more() -> None:
    objects = make_targets([5])
    made = make([5], num_denoising=200)
    corners = box_cxcywh_to_xyxy(made.bbox_unact[0].sigmoid())
    target = objects[0]["boxes"].repeat(2 * made.num_groups, 1)
    moved = (corners - box_cxcywh_to_xyxy(target)).abs() / (target[:, 2:].repeat(1, 2) / 2)
    positive = (torch.arange(len(moved)) % 10) < 5
    assert float(moved[positive].max()) <= 1.001
    # Negative corners may cross; the smaller coordinate of a crossed pair is then the other edge.
    centres_and_sizes = made.bbox_unact[0].sigmoid()
    change = (centres_and_sizes - target).abs().sum(1)
    assert float(change[~positive].mean()) > 2 * float(change[positive].mean())


def test_half_of_the_label_noise_ratio_is_redrawn() -> None:
    made = make([5], num_denoising=2000)
    original = make_targets([5])[0]["labels"].repeat(2 * made.num_groups)
    changed = float((made.class_ids[0] != original).float().mean())
    assert changed == pytest.approx(0.25 * (1 - 1 / CLASSES), abs=0.03)


def test_the_mask_hides_groups_from_each_other_and_from_matching() -> None:
    mask = attention_mask(num_groups=3, group_size=4, num_queries=5)
    assert mask.shape == (17, 17)
    for row in range(17):
        for column in range(17):
            hidden = column < 12 and (row >= 12 or row // 4 != column // 4)
            assert bool(mask[row, column]) is hidden


def test_the_same_seed_gives_the_same_queries_and_leaves_the_global_state_alone() -> None:
    state = torch.get_rng_state()
    first, second, other = make([3, 5], seed=1), make([3, 5], seed=1), make([3, 5], seed=2)
    assert torch.equal(first.bbox_unact, second.bbox_unact)
    assert torch.equal(first.class_ids, second.class_ids)
    assert not torch.equal(first.bbox_unact, other.bbox_unact)
    assert torch.equal(state, torch.get_rng_state())


def test_draws_of_another_shape_are_refused() -> None:
    draws = DenoisingDraws.sample(2, 12, CLASSES, torch.device("cpu"), None)
    with pytest.raises(DataError, match=r"box_uniform has shape \(2, 12, 4\), expected \(2, 40, 4\)"):
        make_denoising(make_targets([3, 5]), num_classes=CLASSES, num_queries=QUERIES, num_denoising=20, draws=draws)
