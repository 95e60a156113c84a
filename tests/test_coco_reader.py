"""COCO files: what is read, what is refused, and with which words."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpus.models.data.coco import CategoryMap, locate_split
from carpus.models.data.coco_reader import load_coco
from carpus.runtime.errors import DataError
from tests.toy_coco import document, write_split


def annotation(annotation_id: int, bbox: object, **fields: Any) -> dict[str, Any]:
    return {"id": annotation_id, "image_id": 1, "category_id": 7, "bbox": bbox, **fields}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_split(tmp_path, 2, seed=0)
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    file = folder / "annotations.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    changed = change(content)
    file.write_text(json.dumps(content if changed is None else changed, ensure_ascii=False), encoding="utf-8")
    return file


def with_boxes(folder: Path, *annotations: dict[str, Any]) -> Path:
    return rewrite(folder, lambda content: content.update(annotations=list(annotations)))


def test_categories_become_contiguous_in_order_of_their_ids(folder: Path) -> None:
    dataset = load_coco(folder / "annotations.json")
    assert dataset.categories == CategoryMap(("grün", "rot", "青"), (3, 7, 90))
    raw = json.loads((folder / "annotations.json").read_text(encoding="utf-8"))
    first = [a for a in raw["annotations"] if a["image_id"] == 1]
    assert dataset.images[0].labels.tolist() == [{3: 0, 7: 1, 90: 2}[a["category_id"]] for a in first]
    x, y, w, h = first[0]["bbox"]
    np.testing.assert_array_equal(dataset.images[0].boxes[0], np.float32([x, y, x + w, y + h]))


def test_validation_classes_follow_the_training_classes_by_name(folder: Path) -> None:
    other = CategoryMap(("青", "extra", "rot", "grün"), (1, 2, 3, 4))
    dataset = load_coco(folder / "annotations.json", categories=other)
    own = load_coco(folder / "annotations.json")
    renamed = [other.names.index(own.categories.names[label]) for label in own.images[0].labels]
    assert dataset.images[0].labels.tolist() == renamed
    with pytest.raises(DataError, match=r"class\(es\) '青' are not among the model's"):
        load_coco(folder / "annotations.json", categories=CategoryMap(("rot", "grün"), (1, 2)))


def test_crowd_is_kept_for_evaluation_and_left_out_of_training(folder: Path) -> None:
    file = with_boxes(folder, annotation(1, [5, 5, 20, 20]), annotation(2, [40, 40, 20, 20], iscrowd=1))
    image = load_coco(file).images[0]
    assert image.crowd.tolist() == [False, True]
    boxes, labels = image.training_targets()
    np.testing.assert_array_equal(boxes, [[5, 5, 25, 25]])
    assert labels.tolist() == [1]


def test_images_without_objects_are_kept(folder: Path) -> None:
    dataset = load_coco(with_boxes(folder))
    assert [len(image.boxes) for image in dataset] == [0, 0]
    assert dataset.images[0].boxes.shape == (0, 4)


def test_boxes_over_the_edge_are_clipped_and_not_bad(folder: Path) -> None:
    dataset = load_coco(with_boxes(folder, annotation(1, [-10, -5, 30, 20]), annotation(2, [150, 110, 90, 90])))
    np.testing.assert_array_equal(dataset.images[0].boxes, [[0, 0, 20, 15], [150, 110, 160, 120]])
    assert dataset.bad_boxes == ()


BAD_BOXES = [
    ([10, 10, 0, 5], "has no area"),
    ([10, 10, 5, -1], "has no area"),
    ([float("nan"), 10, 5, 5], "is not finite"),
    ([10, 10, float("inf"), 5], "is not finite"),
    ([160, 10, 5, 5], "lies outside the 160 x 120 image"),
    ([10, -50, 5, 50], "lies outside the 160 x 120 image"),
    ([10, 10, 5], "is not four numbers"),
    (["10", 10, 5, 5], "is not four numbers"),
    (None, "has no bbox"),
]


@pytest.mark.parametrize(("bbox", "reason"), BAD_BOXES)
def test_bad_boxes_are_listed_and_dropped_or_refused(folder: Path, bbox: object, reason: str) -> None:
    file = with_boxes(folder, annotation(17, bbox), annotation(18, [1, 1, 20, 20]))
    dataset = load_coco(file)
    assert dataset.images[0].annotation_ids == (18,)
    (bad,) = dataset.bad_boxes
    assert (bad.annotations, bad.annotation_id, bad.image) == (file, 17, "0000.png")
    assert reason in bad.reason
    with pytest.raises(DataError) as caught:
        load_coco(file, bad_boxes="refuse")
    message = str(caught.value)
    assert message.startswith(f"{file}: 1 unusable box(es): annotation 17 of '0000.png'")
    assert reason in message
    assert "bad_boxes='drop'" in message


def test_many_bad_boxes_are_counted(folder: Path) -> None:
    file = with_boxes(folder, *(annotation(i, [1, 1, 0, 0]) for i in range(1, 26)))
    with pytest.raises(DataError, match=r"25 unusable box\(es\).*annotation 10 of .*; \.\.\.") as caught:
        load_coco(file, bad_boxes="refuse")
    assert "annotation 11 of" not in str(caught.value)


def replaced(key: str, index: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content[key][index].update(fields)


def without(key: str, index: int, field: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        del content[key][index][field]

    return change


def doubled(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content[key].append(copy.deepcopy(content[key][0]))


WRONG_FILES = [
    (lambda content: [content], "top level is a list; expected images, annotations and categories"),
    (lambda content: content.pop("annotations") and None, "field 'annotations' is missing"),
    (lambda content: content.update(images={}), "field 'images' is a dict; expected a list"),
    (lambda content: content.update(categories=[]), "categories: is empty"),
    (lambda content: content.update(images=[], annotations=[]), "images: is empty"),
    (lambda content: content["images"].insert(0, 5), r"images\[0\]: is a int; expected an object"),
    (doubled("images"), r"images\[2\].id: duplicate image id 1 \(already '0000.png'\)"),
    (doubled("annotations"), r"duplicate annotation id 1"),
    (doubled("categories"), r"categories\[3\].id: duplicate category id 7 \(already 'rot'\)"),
    (replaced("categories", 0, name="grün"), r"categories\[1\].name: duplicate category name 'grün'"),
    (replaced("categories", 0, id="7"), r"categories\[0\].id: is '7'; expected int"),
    (replaced("categories", 0, id=True), r"categories\[0\].id: is True; expected int"),
    (replaced("annotations", 0, image_id=99), r"annotations\[0\].image_id: annotation 1 refers to unknown image 99"),
    (replaced("annotations", 0, category_id=5), r"unknown category 5; known ids: 3, 7, 90"),
    (replaced("annotations", 0, iscrowd=2), r"annotations\[0\].iscrowd: is 2; expected 0 or 1"),
    (replaced("images", 1, file_name="gone.png"), r"images\[1\].file_name: image file .*gone.png does not exist"),
    (replaced("images", 0, width=0), r"images\[0\].width: is 0; expected a positive number of pixels"),
    (replaced("images", 0, height=1.5), r"images\[0\].height: is 1.5; expected int"),
    (without("images", 0, "file_name"), r"images\[0\].file_name: is missing"),
    (without("annotations", 0, "category_id"), r"annotations\[0\].category_id: is missing"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_FILES)
def test_wrong_files_are_refused_by_file_and_field(
    folder: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    file = rewrite(folder, change)
    with pytest.raises(DataError, match=message) as caught:
        load_coco(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"images": [', "is not valid JSON: line 1, column 13"),
        (b"\xff\xfe{}", r"is not UTF-8 text \(byte 0\)"),
        (None, "does not exist"),
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "annotations.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_coco(file)


def test_splits_are_found_by_folder_root_or_file(tmp_path: Path) -> None:
    file = write_split(tmp_path / "train", 1, seed=0)
    images = tmp_path / "train" / "images"
    assert locate_split(tmp_path, "train") == (file, images)
    assert locate_split(tmp_path / "train", "train") == (file, images)
    assert locate_split(file) == (file, images)
    with pytest.raises(DataError, match=r"No dataset at .*: .*annotations.json does not exist"):
        locate_split(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"Image folder .* does not exist"):
        locate_split(file, image_dir=tmp_path / "none")


def test_subset_is_spread_over_the_file(tmp_path: Path) -> None:
    dataset = load_coco(write_split(tmp_path, 9, seed=0))
    assert [image.image_id for image in dataset.subset(3)] == [1, 5, 9]
    assert dataset.subset(20) is dataset


def test_document_fixture_has_scattered_ids() -> None:
    assert [c["id"] for c in document([], [])["categories"]] == [7, 3, 90]
