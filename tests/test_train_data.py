"""Batches: the same for any number of workers, resumable, and divided among processes without loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from carpus.models.data.augment_config import AugmentConfig
from carpus.models.data.coco_reader import load_coco
from carpus.models.data.loader import Batch, BatchPlan, training_batches
from carpus.models.data.progressive import ProgressiveAugmenter, size_at
from carpus.models.data.store import ImageStore
from carpus.runtime.errors import DataError
from tests.toy_coco import write_split

STRONG = AugmentConfig(strong_from=0, mosaic_until=9, strong_until=9)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    return ImageStore(load_coco(write_split(tmp_path_factory.mktemp("toy"), 10, seed=0)))


def batches(store: ImageStore, plan: BatchPlan, **options: int) -> Iterator[Batch]:
    return training_batches(store, ProgressiveAugmenter(STRONG, (64, 96)), plan, **{"epochs": 2, **options})


def same(left: Batch, right: Batch) -> bool:
    return (
        left.samples == right.samples
        and torch.equal(left.images, right.images)
        and all(
            torch.equal(a["boxes"], b["boxes"]) and torch.equal(a["labels"], b["labels"])
            for a, b in zip(left.targets, right.targets, strict=True)
        )
    )


def test_batches_do_not_depend_on_workers(store: ImageStore) -> None:
    plan = BatchPlan(len(store), 3, seed=5)
    alone = list(batches(store, plan, workers=0))
    assert len(alone) == 2 * plan.batches_per_epoch == 6
    for workers in (1, 2):
        helped = list(batches(store, plan, workers=workers))
        assert all(same(a, b) for a, b in zip(alone, helped, strict=True))


def test_training_goes_on_after_any_batch(store: ImageStore) -> None:
    plan = BatchPlan(len(store), 3, seed=5)
    whole = list(batches(store, plan, workers=0))
    rest = list(batches(store, plan, workers=0, first_epoch=1, first_batch=1))
    assert len(rest) == 2
    assert all(same(a, b) for a, b in zip(whole[4:], rest, strict=True))
    assert list(batches(store, plan, workers=0, first_epoch=1, first_batch=3)) == []


def test_seed_and_epoch_change_order_and_augmentation(store: ImageStore) -> None:
    first = list(batches(store, BatchPlan(len(store), 3, seed=5), workers=0))
    other = list(batches(store, BatchPlan(len(store), 3, seed=6), workers=0))
    assert [b.samples for b in first[:3]] != [b.samples for b in first[3:]]
    assert [b.samples for b in first] != [b.samples for b in other]


def test_batch_is_what_the_model_takes(store: ImageStore) -> None:
    batch = next(batches(store, BatchPlan(len(store), 4, seed=0), workers=0))
    images = batch.nchw()
    assert images.shape == (4, 3, 64, 96)
    assert images.is_contiguous()
    assert 0.0 <= images.min() < images.max() <= 1.0
    last = batch.nchw(channels_last=True)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, last)
    for target in batch.targets:
        assert target["boxes"].dtype == torch.float32
        assert target["labels"].dtype == torch.int64
        assert target["boxes"].shape == (len(target["labels"]), 4)


@pytest.mark.parametrize(("samples", "batch"), [(10, 3), (10, 10), (7, 2), (2, 8)])
def test_two_processes_see_what_one_sees(samples: int, batch: int) -> None:
    one = BatchPlan(samples, 2 * batch, seed=1).epoch(3)
    two = [BatchPlan(samples, batch, seed=1, rank=rank, world_size=2).epoch(3) for rank in (0, 1)]
    assert one.shape[0] == two[0].shape[0] >= 1
    for step in range(len(one)):
        assert sorted(one[step]) == sorted(np.concatenate([two[0][step], two[1][step]]))


def test_every_image_comes_once_an_epoch() -> None:
    assert sorted(BatchPlan(12, 3, seed=0).epoch(0).ravel()) == list(range(12))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0, "batch_size": 1}, "has no images"),
        ({"num_samples": 1, "batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"num_samples": 1, "batch_size": 1, "rank": 2, "world_size": 2}, "rank 2 is not below world_size 2"),
    ],
)
def test_impossible_plans_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        BatchPlan(seed=0, **arguments)


def test_store_shrinks_images_and_boxes_together(tmp_path: Path) -> None:
    dataset = load_coco(write_split(tmp_path, 3, seed=0, size=(120, 160)))
    store = ImageStore(dataset, short_side=60)
    assert store.fill() == 3
    for index, record in enumerate(dataset):
        sample = store[index]
        assert sample.image.shape == (60, 80, 3)
        np.testing.assert_allclose(sample.boxes, record.boxes / 2)
        assert not sample.image.flags.writeable


def test_store_keeps_to_its_budget_and_still_serves_all(tmp_path: Path) -> None:
    dataset = load_coco(write_split(tmp_path, 4, seed=0))
    small = ImageStore(dataset, budget_gb=2.5 * 120 * 160 * 3 / 1e9)
    assert small.fill() == 2
    full = ImageStore(dataset)
    assert full.fill() == 4
    for index in range(4):
        np.testing.assert_array_equal(small[index].image, full[index].image)


def test_image_of_another_size_than_annotated_is_refused(tmp_path: Path) -> None:
    file = write_split(tmp_path, 1, seed=0)
    content = json.loads(file.read_text(encoding="utf-8"))
    content["images"][0]["width"] = 200
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=r"0000.png is 160 x 120 .* but the annotations say 200 x 120"):
        _ = ImageStore(load_coco(file))[0]


def test_input_grows_with_the_epochs(store: ImageStore) -> None:
    scales = ((0, 0.6), (2, 0.8), (4, 1.0))
    assert [size_at(epoch, (320, 320), scales)[0] for epoch in range(5)] == [192, 192, 256, 256, 320]
    assert size_at(3, (320, 640), ()) == (320, 640)
    augmenter = ProgressiveAugmenter(STRONG, (128, 128), ((0, 0.5), (1, 1.0)))
    found = training_batches(store, augmenter, BatchPlan(len(store), 10, seed=0), epochs=2, workers=0)
    assert [tuple(batch.images.shape[1:3]) for batch in found] == [(64, 64), (128, 128)]
