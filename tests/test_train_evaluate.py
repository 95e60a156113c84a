"""Average precision of detections whose score is known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from carpus.models.build import build_model
from carpus.models.data.coco import CocoDataset, CocoImage
from carpus.models.data.coco_reader import load_coco
from carpus.models.evaluate import evaluate_coco, evaluate_detections
from carpus.models.predict import ModelDetector, deimv2_preprocess
from carpus.runtime.detections import Detections
from carpus.runtime.errors import DataError
from carpus.runtime.spec import Postprocess
from tests.toy_coco import write_split


@pytest.fixture
def dataset(tmp_path: Path) -> CocoDataset:
    return load_coco(write_split(tmp_path, 6, seed=3))


def truth(dataset: CocoDataset, image: CocoImage, shift: float = 0.0) -> Detections:
    keep = ~image.crowd
    boxes = image.boxes[keep] + np.float32(shift)
    names, size = dataset.categories.names, (image.height, image.width)
    return Detections(boxes, np.full(len(boxes), 0.9), image.labels[keep], names, size)


def test_the_truth_itself_scores_one(dataset: CocoDataset) -> None:
    metrics = evaluate_detections(dataset, [truth(dataset, image) for image in dataset])
    assert metrics.ap == pytest.approx(1.0)
    assert metrics.ap50 == pytest.approx(1.0)
    assert set(metrics.per_class) == {"rot", "grün", "青"}
    assert all(value == pytest.approx(1.0) for value in metrics.per_class.values())
    assert metrics.images == 6


def test_shifted_boxes_lose_at_high_overlap_only(dataset: CocoDataset) -> None:
    metrics = evaluate_detections(dataset, [truth(dataset, image, shift=3.0) for image in dataset])
    assert metrics.ap50 == pytest.approx(1.0)
    assert 0.0 < metrics.ap < 0.95
    assert metrics.ap75 < 1.0


def test_no_detections_score_zero(dataset: CocoDataset) -> None:
    names = dataset.categories.names
    metrics = evaluate_detections(dataset, [Detections.empty(names, (i.height, i.width)) for i in dataset])
    assert metrics.ap == 0.0


def test_detections_on_crowd_count_neither_way(tmp_path: Path) -> None:
    file = write_split(tmp_path, 4, seed=3)
    content = json.loads(file.read_text(encoding="utf-8"))
    bystander = {**content["annotations"][0], "id": 999, "bbox": [0, 0, 10, 10], "area": 100, "iscrowd": 1}
    content["annotations"].append(bystander)
    file.write_text(json.dumps(content), encoding="utf-8")
    dataset = load_coco(file)
    detections = [truth(dataset, image) for image in dataset]
    label = dataset.categories.class_ids()[bystander["category_id"]]
    first = detections[0]
    with_crowd = Detections(
        np.concatenate([first.xyxy, [[0, 0, 10, 10]]]),
        np.concatenate([first.score, [0.99]]),
        np.concatenate([first.class_id, [label]]),
        first.class_names,
        first.image_size,
    )
    assert evaluate_detections(dataset, [with_crowd, *detections[1:]]).ap == pytest.approx(1.0)
    elsewhere = Detections(
        with_crowd.xyxy + np.float32([[60, 60, 60, 60]] * len(with_crowd)) * (with_crowd.score > 0.95)[:, None],
        with_crowd.score,
        with_crowd.class_id,
        first.class_names,
        first.image_size,
    )
    assert evaluate_detections(dataset, [elsewhere, *detections[1:]]).ap < 0.999


def test_classes_without_objects_are_left_open(tmp_path: Path) -> None:
    file = write_split(tmp_path, 3, seed=0)
    content = json.loads(file.read_text(encoding="utf-8"))
    content["categories"].append({"id": 500, "name": "ghost"})
    file.write_text(json.dumps(content), encoding="utf-8")
    dataset = load_coco(file)
    metrics = evaluate_detections(dataset, [truth(dataset, image) for image in dataset])
    assert math.isnan(metrics.per_class["ghost"])
    assert metrics.ap == pytest.approx(1.0)
    plain = metrics.as_dict()
    assert plain["per_class"]["ghost"] is None
    json.dumps(plain, allow_nan=False)


def test_evaluation_runs_a_detector_over_all_images(dataset: CocoDataset) -> None:
    seen: list[int] = []
    told: list[tuple[int, int]] = []
    records = iter(dataset)

    def predict(images: Sequence[NDArray[np.uint8]]) -> list[Detections]:
        seen.append(len(images))
        return [truth(dataset, next(records)) for _ in images]

    metrics = evaluate_coco(predict, dataset, batch_size=4, progress=lambda done, total: told.append((done, total)))
    assert metrics.ap == pytest.approx(1.0)
    assert (seen, told) == ([4, 2], [(4, 6), (6, 6)])


def test_a_dataset_without_objects_is_refused(dataset: CocoDataset) -> None:
    def bare(image: CocoImage) -> CocoImage:
        return replace(image, crowd=np.ones_like(image.crowd))

    crowds = replace(dataset, images=tuple(map(bare, dataset.images)))
    with pytest.raises(
        DataError, match=r"annotations.json: none of the 6 images has an object .* nothing to score against"
    ):
        crowds.require_objects("score against")
    dataset.require_objects("score against")


def test_answers_that_do_not_fit_are_refused(dataset: CocoDataset) -> None:
    detections = [truth(dataset, image) for image in dataset]
    with pytest.raises(DataError, match=r"5 detection results for 6 images of .*annotations.json"):
        evaluate_detections(dataset, detections[:-1])
    with pytest.raises(DataError, match=r"7 detection results for 6 images"):
        evaluate_detections(dataset, [*detections, detections[0]])
    with pytest.raises(DataError, match=r"gave 0 results for 8 images|gave 0 results for 6 images"):
        evaluate_coco(lambda images: [], dataset)
    alien = Detections([[0, 0, 5, 5]], [0.5], [3], ("a", "b", "c", "d"), (120, 160))
    with pytest.raises(DataError, match=r"detection of class 3, but the dataset has 3 classes"):
        evaluate_detections(dataset, [alien, *detections[1:]])


def test_a_model_detects_in_pixels_of_each_source_image() -> None:
    torch.manual_seed(0)
    model = build_model("deimv2", "atto", 3, (160, 160)).train()
    detector = ModelDetector(
        model, ("a", "b", "c"), deimv2_preprocess((160, 160)), Postprocess(top_k=50, score_threshold=0.0)
    )
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (h, w, 3), dtype=np.uint8) for h, w in ((100, 200), (160, 160), (50, 30))]
    found = detector(images)
    assert [f.image_size for f in found] == [(100, 200), (160, 160), (50, 30)]
    assert [len(f) for f in found] == [50, 50, 50]
    assert all(
        (f.xyxy <= [w, h, w, h]).all() for f, (h, w) in zip(found, ((100, 200), (160, 160), (50, 30)), strict=True)
    )
    assert model.training
    alone = detector([images[2]])[0]
    np.testing.assert_allclose(alone.score, found[2].score, atol=1e-5)
