"""The same picture however it comes, and plain words for what is none."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from carpus.runtime.errors import DataError
from carpus.runtime.image import load_image


@pytest.fixture(scope="module")
def picture() -> np.ndarray:
    """(40, 64, 3) uint8 RGB, different in every corner and channel."""
    y, x = np.mgrid[0:40, 0:64]
    return np.stack((x * 4 % 256, y * 6 % 256, (x + y) * 2 % 256), axis=-1).astype(np.uint8)


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tiff", "größe 目 .png", "a.webp", "a.PNG", "a.ppm"])
def test_lossless_files_are_read_exactly(tmp_path: Path, picture: np.ndarray, name: str) -> None:
    path = tmp_path / name
    options = {"lossless": True} if name.endswith("webp") else {}
    Image.fromarray(picture).save(path, **options)
    for given in (path, str(path)):
        np.testing.assert_array_equal(load_image(given), picture)


def test_jpeg_is_close(tmp_path: Path, picture: np.ndarray) -> None:
    Image.fromarray(picture).save(tmp_path / "a.jpg", quality=98, subsampling=0)
    assert np.abs(load_image(tmp_path / "a.jpg").astype(int) - picture).mean() < 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(tmp_path: Path, picture: np.ndarray, orientation: int) -> None:
    stored = {
        1: picture,
        2: picture[:, ::-1],
        3: picture[::-1, ::-1],
        4: picture[::-1],
        5: picture.transpose(1, 0, 2),
        6: np.rot90(picture, 1),
        7: picture[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(picture, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "a.png"
    Image.fromarray(np.ascontiguousarray(stored)).save(path, exif=exif)
    np.testing.assert_array_equal(load_image(path), picture)
    with Image.open(path) as image:
        np.testing.assert_array_equal(load_image(image), picture)


def test_arrays_in_every_layout(picture: np.ndarray) -> None:
    alpha = np.full((40, 64, 1), 7, np.uint8)
    rgba = np.concatenate((picture, alpha), axis=2)
    bgra = np.concatenate((picture[:, :, ::-1], alpha), axis=2)
    bottom_up = picture[::-1].copy()
    assert load_image(picture) is picture
    np.testing.assert_array_equal(load_image(rgba), picture)
    np.testing.assert_array_equal(load_image(bgra, color="bgr"), picture)
    np.testing.assert_array_equal(load_image(picture[:, :, ::-1], color="bgr"), picture)
    np.testing.assert_array_equal(load_image(bottom_up[::-1]), picture)
    np.testing.assert_array_equal(load_image(rgba[::-1, ::2]), picture[::-1, ::2])
    np.testing.assert_array_equal(load_image(np.asfortranarray(picture)), picture)
    grey = picture[:, :, 0]
    for given in (grey, grey[:, :, None]):
        for color in ("rgb", "bgr"):
            np.testing.assert_array_equal(load_image(given, color=color), np.stack([grey] * 3, axis=-1))


def test_pil_modes(picture: np.ndarray) -> None:
    image = Image.fromarray(picture)
    grey = np.asarray(image.convert("L"))
    palette = image.quantize(16)
    cases = [
        (image, picture),
        (image.convert("L"), np.stack([grey] * 3, axis=-1)),
        (image.convert("1"), np.stack([np.asarray(image.convert("1")) * np.uint8(255)] * 3, axis=-1)),
        (palette, np.asarray(palette.convert("RGB"))),
        (image.convert("CMYK"), np.asarray(image.convert("CMYK").convert("RGB"))),
        (image.convert("YCbCr"), np.asarray(image.convert("YCbCr").convert("RGB"))),
    ]
    transparent = Image.fromarray(np.dstack((picture, np.zeros((40, 64), np.uint8))))
    cases.append((transparent, picture))
    for given, expected in cases:
        np.testing.assert_array_equal(load_image(given), expected)


def test_transparent_palette_keeps_its_colours(tmp_path: Path) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    image.save(tmp_path / "a.png", transparency=1)
    assert (load_image(tmp_path / "a.png") == (200, 100, 50)).all()


def test_sixteen_bit_grey_is_scaled(tmp_path: Path) -> None:
    grey = np.linspace(0, 65535, 64 * 32).astype(np.uint16).reshape(32, 64)
    for name in ("a.png", "a.tiff"):
        Image.fromarray(grey).save(tmp_path / name)
        np.testing.assert_array_equal(load_image(tmp_path / name)[:, :, 1], (grey // 257).astype(np.uint8))


def test_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert (load_image(tmp_path / "a.gif") == (255, 0, 0)).all()
    with Image.open(tmp_path / "a.gif") as image:
        image.seek(1)
        assert (load_image(image) == (255, 0, 0)).all()


ARRAYS = [
    (np.zeros((4, 4, 3), np.float32), "(array * 255).round()"),
    (np.full((4, 4, 3), 200.0), "values run from 200 to 200"),
    (np.full((4, 4, 3), np.nan, np.float32), "holds NaN or infinity"),
    (np.zeros((4, 4, 3), np.uint16), "array >> 8"),
    (np.zeros((4, 4, 3), np.int64), "expected dtype uint8 with values 0..255, got int64"),
    (np.zeros((4, 4), bool), "got bool"),
    (np.zeros((3, 40, 64), np.uint8), "channels-first: array.transpose(1, 2, 0)"),
    (np.zeros((1, 4, 4, 3), np.uint8), "give a batch as a list"),
    (np.zeros((4, 4, 2), np.uint8), "got (4, 4, 2)"),
    (np.zeros(4, np.uint8), "got (4,)"),
    (np.zeros((0, 4, 3), np.uint8), "at least 1 x 1 pixels"),
    (np.zeros((4, 0), np.uint8), "at least 1 x 1 pixels"),
]


@pytest.mark.parametrize(("array", "message"), ARRAYS)
def test_wrong_arrays_say_what_is_wrong(array: np.ndarray, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_image(array)
    assert message in str(caught.value)


def test_wrong_files_say_what_is_wrong(tmp_path: Path, picture: np.ndarray) -> None:
    Image.fromarray(picture).save(tmp_path / "whole.jpg")
    data = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty.png").write_bytes(b"")
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    (tmp_path / "cut.png").write_bytes(buffer.getvalue()[: len(buffer.getvalue()) * 3 // 4])
    for name, message in (
        ("none.png", "no such file"),
        (".", "is a directory"),
        ("text.png", "not an image file that Pillow can read (12 bytes)"),
        ("empty.png", "not an image file that Pillow can read (0 bytes)"),
        ("cut.jpg", "cut short or damaged"),
        ("cut.png", "cut short or damaged"),
    ):
        with pytest.raises(DataError) as caught:
            load_image(tmp_path / name)
        assert message in str(caught.value)
        assert repr(str(tmp_path / name)) in str(caught.value)


@pytest.mark.parametrize("given", [None, 3, b"bytes", [[1, 2], [3, 4]]])
def test_other_things_are_no_images(given: object) -> None:
    with pytest.raises(DataError, match="expected a path, a numpy array or a PIL image, got"):
        load_image(given)  # type: ignore[arg-type]


def test_unknown_channel_order(picture: np.ndarray) -> None:
    with pytest.raises(DataError, match="expected 'rgb' or 'bgr', got 'RGB'"):
        load_image(picture, color="RGB")  # type: ignore[arg-type]


def test_float_pil_images_are_refused() -> None:
    with pytest.raises(DataError, match="floating-point grey of unknown range"):
        load_image(Image.fromarray(np.zeros((4, 4), np.float32)))
