"""Finding inputs, videos, drawing and result files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from carpus.runtime.detections import Detections
from carpus.runtime.draw import annotate, class_colour
from carpus.runtime.errors import DataError
from carpus.runtime.media import find_media
from carpus.runtime.results import coco_results, detections_record, read_coco_image_ids, write_json
from carpus.runtime.video import VideoReader, VideoWriter
from tests.tiny_detector import CLASSES


def two_detections(height: int = 60, width: int = 100) -> Detections:
    boxes = np.array([[10, 20, 40.126, 50], [60, 5, 90, 30]])
    return Detections(boxes, np.array([0.75, 0.5]), np.array([1, 0]), ("red", "grün", "blue"), (height, width))


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def test_media_of_folders_files_and_patterns(tmp_path: Path) -> None:
    touch(tmp_path, "b/2.JPG", "b/1.png", "b/deep/3.webp", "b/film.mp4", "b/notes.txt", "c/1.png", "odd[1].png")
    names = [item.name for item in find_media([tmp_path / "b"])]
    assert names == ["1.png", "2.JPG", "deep/3.webp", "film.mp4"]
    assert [item.name for item in find_media([tmp_path / "b"], recursive=False)] == ["1.png", "2.JPG", "film.mp4"]
    assert [item.video for item in find_media([tmp_path / "b"])] == [False, False, False, True]
    assert [item.name for item in find_media([f"{tmp_path}/*/1.png"])] == ["1.png", "1_2.png"]
    assert len(find_media([f"{tmp_path}/**/*.png"])) == 3
    assert [item.name for item in find_media([tmp_path / "odd[1].png"])] == ["odd[1].png"]
    again = find_media([tmp_path / "b" / "1.png", tmp_path / "b", tmp_path / "c"])
    assert [item.name for item in again] == ["1.png", "2.JPG", "deep/3.webp", "film.mp4", "1_2.png"]
    assert len({item.path for item in again}) == 5


def test_media_that_is_not_there(tmp_path: Path) -> None:
    touch(tmp_path, "notes.txt", "empty/notes.txt")
    for given, message in (
        ("none.png", "no such file"),
        ("*.png", "no image or video matches the pattern"),
        ("empty", "the folder holds no image and no video"),
        ("notes.txt", "neither an image"),
    ):
        with pytest.raises(DataError, match=message):
            find_media([tmp_path / given])


def test_record_and_coco_results() -> None:
    found = two_detections()
    record = detections_record(found, "größe.png", frame=3)
    assert json.loads(json.dumps(record)) == {
        "image": "größe.png",
        "width": 100,
        "height": 60,
        "frame": 3,
        "detections": [
            {"class": "grün", "class_id": 1, "score": 0.75, "xyxy": [10.0, 20.0, 40.13, 50.0]},
            {"class": "red", "class_id": 0, "score": 0.5, "xyxy": [60.0, 5.0, 90.0, 30.0]},
        ],
    }
    results = coco_results(found, 42, CLASSES)
    assert [(item["image_id"], item["category_id"]) for item in results] == [(42, 7), (42, 3)]
    np.testing.assert_allclose(results[0]["bbox"], [10, 20, 30.126, 30], atol=1e-4)
    assert coco_results(Detections.empty(("red",), (4, 4)), 1, CLASSES) == []


def test_coco_image_ids(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(
        '{"images": [{"file_name": "a.jpg", "id": 9}, {"file_name": "größe.jpg", "id": 4}]}', encoding="utf-8"
    )
    assert read_coco_image_ids(path) == {"a.jpg": 9, "größe.jpg": 4}
    for text in ("{", "[]", '{"images": [{"id": 1}]}', '{"images": 3}'):
        path.write_text(text)
        with pytest.raises(DataError, match="expected JSON with images, each with file_name and id"):
            read_coco_image_ids(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_coco_image_ids(tmp_path / "none.json")


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    write_json(path, {"name": "größe"})
    with pytest.raises(TypeError):
        write_json(path, {"name": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"name": "größe"}
    assert [item.name for item in path.parent.iterdir()] == ["a.json"]


def test_boxes_are_drawn_where_they_are() -> None:
    image = np.zeros((240, 400, 3), np.uint8)
    found = Detections(np.array([[100, 80, 200, 160]]), np.array([0.9]), np.array([2]), ("a", "b", "目 c"), (240, 400))
    drawn = annotate(image, found)
    assert not image.any()
    for y, x in ((80, 150), (159, 150), (120, 100), (120, 199)):
        assert tuple(drawn[y, x]) == class_colour(2)
    assert not drawn[82:158, 102:198].any()
    assert drawn[60:80, 100:160].any()
    assert not annotate(image, found, scores=False)[165:].any()
    np.testing.assert_array_equal(annotate(image, Detections.empty(("a",), (240, 400))), image)


EDGES = [[0, 0, 0, 0], [0.99, 0.99, 1, 1], [-0.1, -0.1, 1.5, 1.5], [0, 0, 1, 1], [0.97, 0, 1, 0.02]]


@pytest.mark.parametrize("box", EDGES)
@pytest.mark.parametrize("size", [(240, 400), (1, 1), (1, 4000), (7, 5)])
def test_drawing_at_the_edge_works(box: list[float], size: tuple[int, int]) -> None:
    corners = np.array([box]) * (size[1], size[0], size[1], size[0])
    found = Detections(corners, np.array([0.9]), np.array([0]), ("a" * 200,), size)
    assert annotate(np.zeros((*size, 3), np.uint8), found).any()


def test_drawing_refuses_another_image() -> None:
    with pytest.raises(DataError, match="is 100 x 50, the detections are of one of 100 x 60"):
        annotate(np.zeros((50, 100, 3), np.uint8), two_detections())
    with pytest.raises(DataError, match=r"expected \(h, w, 3\) uint8, got float64"):
        annotate(np.zeros((60, 100, 3)), two_detections())


def test_class_colours_differ() -> None:
    colours = np.array([class_colour(index) for index in range(12)], int)
    apart = np.abs(colours[:, None] - colours[None]).sum(axis=2) + np.eye(12, dtype=int) * 999
    assert apart.min() > 40
    assert class_colour(3) == class_colour(3)


@pytest.mark.parametrize("size", [(48, 64), (47, 63)])
def test_videos_come_back_as_written(tmp_path: Path, size: tuple[int, int]) -> None:
    pytest.importorskip("av", reason="writing video needs PyAV")
    colours = [(200, 40, 40), (40, 200, 40), (40, 40, 200)] * 3
    path = tmp_path / "größe.mp4"
    with VideoWriter(path, 25) as writer:
        for colour in colours:
            writer.write(np.full((*size, 3), colour, np.uint8))
    assert [item.name for item in tmp_path.iterdir()] == ["größe.mp4"]
    calls: list[tuple[int, int | None]] = []
    with VideoReader(path, lambda done, count: calls.append((done, count))) as reader:
        frames = list(reader)
        assert reader.fps == pytest.approx(25)
        assert reader.count == 9
    assert calls == [(index + 1, 9) for index in range(9)]
    for frame, colour in zip(frames, colours, strict=True):
        assert frame.shape[0] - size[0] in (0, 1)
        assert np.abs(frame.reshape(-1, 3).mean(axis=0) - colour).max() < 12


def test_an_interrupted_video_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="writing video needs PyAV")

    def write(error: type[BaseException]) -> None:
        with VideoWriter(tmp_path / "a.mp4", 25) as writer:
            writer.write(np.zeros((48, 64, 3), np.uint8))
            raise error

    with pytest.raises(KeyboardInterrupt):
        write(KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []
    with VideoWriter(tmp_path / "a.mp4", 25) as writer:
        writer.write(np.zeros((48, 64, 3), np.uint8))
        with pytest.raises(DataError, match=r"expected shape \(48, 64, 3\) as the first frame has"):
            writer.write(np.zeros((48, 66, 3), np.uint8))
        with pytest.raises(DataError, match="got float32"):
            writer.write(np.zeros((48, 64, 3), np.float32))
    with pytest.raises(DataError, match="no frame was written"), VideoWriter(tmp_path / "b.mp4", 25):
        pass


def test_wrong_videos_say_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    for name, message in (("none.mp4", "no such file"), (".", "is a directory"), ("text.mp4", "OpenCV cannot read it")):
        with pytest.raises(DataError, match=message):
            VideoReader(tmp_path / name)


def test_names_in_any_script_are_drawn() -> None:
    """With a system font where there is one; a character that no font has never stops a run."""
    names = ("目 größe \U0001f600",)
    found = Detections(np.array([[5, 40, 90, 90]]), np.array([0.5]), np.array([0]), names, (100, 200))
    drawn = annotate(np.zeros((100, 200, 3), np.uint8), found)
    assert drawn.shape == (100, 200, 3)
    assert drawn[25:40].any()
