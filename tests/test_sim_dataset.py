"""The dataset writer: valid COCO, same seed same bytes, resumable, and refusals by name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import cv2
import pytest

pytest.importorskip("mujoco", reason="the simulation needs mujoco (pip install 'carpus[sim]')")

from carpus.cli.sim import SimDataset, SimPreview
from carpus.runtime.errors import BackendError, DataError
from carpus.sim.coco import CROWD_VISIBILITY
from carpus.sim.dataset import generate_dataset
from carpus.sim.objects import CLASSES
from tests.opengl import skip_without_opengl

SIZE = (96, 128)


def _generate(root: Path, num_images: int = 4, split: str = "train", **options: Any) -> Path:
    options = {"seed": 3, "size": SIZE, "robot": "primitive"} | options
    try:
        return generate_dataset(root, split, num_images, **options)
    except BackendError as error:
        skip_without_opengl(error)


def _digest(folder: Path) -> dict[str, str]:
    """Hash of every file that a user sees."""
    files = [folder / "annotations.json", *sorted((folder / "images").iterdir())]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished")
    _generate(root)
    return root / "train"


def test_the_annotations_are_valid_coco(finished: Path) -> None:
    document = json.loads((finished / "annotations.json").read_text())
    assert [category["name"] for category in document["categories"]] == list(CLASSES)
    assert [category["id"] for category in document["categories"]] == list(range(1, len(CLASSES) + 1))
    assert [image["id"] for image in document["images"]] == [1, 2, 3, 4]
    ids = [annotation["id"] for annotation in document["annotations"]]
    assert ids == list(range(1, len(ids) + 1))
    assert len(ids) > 4
    for image in document["images"]:
        picture = cv2.imread(str(finished / "images" / image["file_name"]))
        assert picture.shape == (image["height"], image["width"], 3) == (*SIZE, 3)
        assert image["camera_matrix"][0][2] == SIZE[1] / 2
    for annotation in document["annotations"]:
        x, y, w, h = annotation["bbox"]
        assert annotation["image_id"] in {1, 2, 3, 4}
        assert 1 <= annotation["category_id"] <= len(CLASSES)
        assert x >= 0
        assert y >= 0
        assert w > 0
        assert h > 0
        assert x + w <= SIZE[1]
        assert y + h <= SIZE[0]
        assert 0 < annotation["area"] <= w * h
        assert 0.0 <= annotation["visibility"] <= 1.0
        assert annotation["visibility"] >= CROWD_VISIBILITY or annotation["iscrowd"] == 1
        assert annotation["amodal_bbox"][2] >= w - 2


def test_pycocotools_compatible_reader_accepts_it(finished: Path) -> None:
    coco = pytest.importorskip("faster_coco_eval", reason="reads the file as a user would").COCO
    loaded = coco(str(finished / "annotations.json"))
    assert len(loaded.getImgIds()) == 4
    assert loaded.getAnnIds(imgIds=[1])


def test_same_seed_same_bytes_and_another_seed_others(finished: Path, tmp_path: Path) -> None:
    _generate(tmp_path / "again")
    assert _digest(tmp_path / "again" / "train") == _digest(finished)
    _generate(tmp_path / "other", seed=4)
    assert _digest(tmp_path / "other" / "train") != _digest(finished)


def test_splits_differ_from_the_first_picture_on(finished: Path, tmp_path: Path) -> None:
    _generate(tmp_path, 1, "site")
    assert (tmp_path / "site/images/000000.jpg").read_bytes() != (finished / "images/000000.jpg").read_bytes()


class _Interrupted(Exception):
    pass


def test_an_interrupted_run_is_taken_up_again(finished: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise _Interrupted

    with pytest.raises(_Interrupted):
        _generate(tmp_path, progress=stop)
    split = tmp_path / "train"
    assert not (split / "annotations.json").exists(), "annotations only of finished data sets"
    assert len(list((split / "images").iterdir())) == 2
    # What a kill in mid-write leaves behind: a torn record, and an image shorter than its record says.
    with (split / "records.jsonl").open("a") as stream:
        stream.write('{"index": 2, "bytes"')
    (split / "images/000001.jpg").write_bytes(b"torn")
    seen: list[tuple[int, int]] = []
    _generate(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert _digest(split) == _digest(finished)


def test_a_finished_split_is_left_alone_and_can_grow(finished: Path, tmp_path: Path) -> None:
    _generate(tmp_path, 2)
    stamp = (tmp_path / "train/annotations.json").stat().st_mtime_ns
    _generate(tmp_path, 2)
    assert (tmp_path / "train/annotations.json").stat().st_mtime_ns == stamp
    _generate(tmp_path, 4)
    assert _digest(tmp_path / "train") == _digest(finished)


@pytest.mark.slow
def test_the_number_of_processes_does_not_matter(finished: Path, tmp_path: Path) -> None:
    _generate(tmp_path, workers=2)
    assert _digest(tmp_path / "train") == _digest(finished)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 9}, r"generator\.json: seed is 3 in this folder, but 9 was asked for; choose another output folder"),
        ({"size": (96, 96)}, r"generator\.json: width is 128 in this folder, but 96 was asked for"),
        ({"quality": 50}, r"generator\.json: quality is 92 in this folder, but 50 was asked for"),
        ({"robot": "gr1t2"}, r"generator\.json: robot is 'primitive' in this folder, but 'gr1t2' was asked for"),
        ({"num_images": 3}, r"holds 4 images already, but num_images is 3; ask for at least as many"),
    ],
)
def test_a_changed_configuration_is_refused_by_name(finished: Path, change: dict[str, Any], message: str) -> None:
    before = _digest(finished)
    with pytest.raises(DataError, match=message):
        _generate(finished.parent, **change)
    assert _digest(finished) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_images": 0}, r"num_images is 0; expected 1 or more"),
        ({"workers": 0}, r"workers is 0; expected 1 or more"),
        ({"seed": -1}, r"seed is -1; expected 0 or more"),
        ({"quality": 101}, r"JPEG quality is 101; expected 1\.\.100"),
        ({"size": (0, 128)}, r"picture size 0x128 .*16\.\.4096"),
        ({"split": "val"}, r"unknown domain 'val'; expected one of train, heldout, site"),
        ({"robot": "atlas"}, r"unknown robot 'atlas'; expected one of gr1t2, primitive"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _generate(tmp_path, **change)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match=r"taken.*cannot make the folder"):
        _generate(tmp_path / "taken")


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/annotations.json").write_text("{}")
    with pytest.raises(DataError, match=r"train: holds annotations\.json but no generator\.json"):
        _generate(tmp_path)
    assert (tmp_path / "train/annotations.json").read_text() == "{}"
    (tmp_path / "train/annotations.json").unlink()
    (tmp_path / "train/generator.json").write_text("{not json")
    with pytest.raises(DataError, match=r"generator\.json: not valid JSON"):
        _generate(tmp_path)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"seed": 3, "robot": "primitive", "height": SIZE[0], "width": SIZE[1]}
    try:
        assert SimDataset(tmp_path / "data", train=1, heldout=1, site=0, **options).run() == 0
    except BackendError as error:
        skip_without_opengl(error)
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "data/train/annotations.json"),
        str(tmp_path / "data/heldout/annotations.json"),
    ]
    assert not (tmp_path / "data/site").exists()
    assert SimPreview(tmp_path / "sheet.png", rows=1, columns=2, **options).run() == 0
    assert cv2.imread(str(tmp_path / "sheet.png")).shape == (SIZE[0], 2 * SIZE[1], 3)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (SimDataset(Path("x"), train=0, heldout=0), r"nothing to render: --train, --heldout and --site are all 0"),
        (SimDataset(Path("x"), train=-1), r"--train is -1; expected 0 or more"),
        (SimPreview(Path("x.png"), rows=0), r"--rows is 0 and --columns is 4; expected 1 or more each"),
    ],
)
def test_wrong_command_lines(command: SimDataset | SimPreview, message: str) -> None:
    with pytest.raises(DataError, match=message):
        command.run()
