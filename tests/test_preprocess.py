"""Preprocessing: equal to Pillow, and boxes return to the source by construction."""

from __future__ import annotations

import dataclasses

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from carpus.runtime.antialias import PolyphaseResizer, pillow_resize
from carpus.runtime.errors import BundleError, DataError
from carpus.runtime.preprocess import Preprocessor
from carpus.runtime.spec import Preprocess
from carpus.runtime.transform import ImageTransform

SIZES = [
    ((480, 640), (320, 320)),
    ((480, 640), (640, 640)),
    ((480, 640), (240, 320)),
    ((720, 1280), (320, 320)),
    ((960, 960), (320, 320)),
    ((376, 1280), (320, 320)),
    ((170, 320), (320, 320)),
    ((2000, 320), (320, 320)),
    ((424, 848), (320, 424)),
]


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_polyphase_resize_is_within_one_level_of_pillow(source: tuple[int, int], target: tuple[int, int]) -> None:
    image = noise(*source)
    resizer = PolyphaseResizer.plan(source, target)
    assert resizer is not None
    scale = np.array([1.0, 0.5, 0.25], np.float32)
    expected = pillow_resize(image, target).transpose(2, 0, 1).astype(np.float32)
    for _ in range(2):  # scratch buffers of the first run must not leak into the second
        out = np.full((3, *target), np.nan, np.float32)
        resizer(image, out, scale)
        assert np.abs(out / scale[:, None, None] - expected).max() <= 1.001
    assert np.abs(out / scale[:, None, None] - expected).mean() < 0.5


@settings(max_examples=40, deadline=None)
@given(
    st.integers(160, 400), st.integers(160, 400), st.integers(1, 4), st.integers(160, 400), st.integers(0, 2**31 - 1)
)
def test_polyphase_resize_of_any_size_it_takes(height: int, width: int, step: int, rows: int, seed: int) -> None:
    source, target = (height, width * step), (rows, width)
    resizer = PolyphaseResizer.plan(source, target)
    if resizer is None:
        return
    image = noise(*source, seed)
    out = np.full((3, *target), np.nan, np.float32)
    resizer(image, out, np.ones(3, np.float32))
    assert np.abs(out - pillow_resize(image, target).transpose(2, 0, 1)).max() <= 1.001


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 4000), (4000, 1), (3, 2), (479, 641), (480, 640), (320, 320), (4320, 7680)]
)
def test_antialias_is_pillows_for_any_image_size(size: tuple[int, int]) -> None:
    image = noise(*size)
    tensor, _ = Preprocess((320, 320))(image)
    expected = np.asarray(Image.fromarray(image).resize((320, 320), Image.Resampling.BILINEAR))
    assert tensor.shape == (1, 3, 320, 320)
    assert np.abs(tensor[0].transpose(1, 2, 0) * 255 - expected).max() <= 1.001


@pytest.mark.parametrize(("name", "flag"), [("bilinear", cv2.INTER_LINEAR), ("area", cv2.INTER_AREA)])
def test_opencv_interpolations(name: str, flag: int) -> None:
    image = noise(123, 77)
    tensor, _ = Preprocess((64, 48), interpolation=name)(image)
    np.testing.assert_allclose(
        tensor[0].transpose(1, 2, 0), cv2.resize(image, (48, 64), interpolation=flag) / 255, atol=1e-6
    )


def test_normalisation_and_channel_order() -> None:
    image = noise(32, 48)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    expected = ((image / 255.0 - mean) / std).transpose(2, 0, 1)
    rgb, _ = Preprocess((32, 48), mean=mean, std=std)(image)
    np.testing.assert_allclose(rgb[0], expected, atol=1e-6)
    bgr, _ = Preprocess((32, 48), mean=mean, std=std, color="bgr")(image)
    np.testing.assert_allclose(bgr[0], ((image[:, :, ::-1] / 255.0 - mean) / std).transpose(2, 0, 1), atol=1e-6)


@pytest.mark.parametrize("interpolation", ["bilinear_antialias", "bilinear"])
def test_bgr_model_sees_swapped_channels_after_a_resize(interpolation: str) -> None:
    image = noise(480, 640)
    rgb, _ = Preprocess((320, 320), interpolation=interpolation, mean=(0.1, 0.2, 0.3))(image)
    bgr, _ = Preprocess((320, 320), interpolation=interpolation, mean=(0.3, 0.2, 0.1), color="bgr")(image)
    np.testing.assert_array_equal(rgb[:, ::-1], bgr)


def test_array_declared_bgr_gives_the_same_tensor() -> None:
    image = noise(480, 640)
    spec = Preprocess((320, 320))
    np.testing.assert_array_equal(spec(image)[0], spec(image[:, :, ::-1].copy(), color="bgr")[0])


def test_letterbox_pads_evenly_with_the_normalised_grey() -> None:
    spec = Preprocess((320, 320), resize="letterbox", mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.5), pad_value=114)
    tensor, (transform,) = spec(np.full((480, 640, 3), 255, np.uint8))
    grey = (114 / 255 - np.array([0.1, 0.2, 0.3])) / 0.5
    white = (1 - np.array([0.1, 0.2, 0.3])) / 0.5
    assert transform.offset == (0, 40)
    assert transform.content_size == (240, 320)
    for rows, value in ((slice(0, 40), grey), (slice(40, 280), white), (slice(280, 320), grey)):
        np.testing.assert_allclose(
            tensor[0, :, rows], np.broadcast_to(value[:, None, None], tensor[0, :, rows].shape), atol=1e-6
        )


def test_buffer_is_reused_and_leaves_no_trace_of_the_last_image() -> None:
    spec = Preprocess((64, 64), resize="letterbox")
    run = Preprocessor(spec)
    out = np.full((1, 3, 64, 64), np.nan, np.float32)
    tall, wide = noise(200, 50, 1), noise(50, 200, 2)
    result, _ = run(tall, out)
    assert result is out
    run(wide, out)
    np.testing.assert_array_equal(out, spec(wide)[0])
    run(tall, out)
    np.testing.assert_array_equal(out, spec(tall)[0])


def test_identity_size_copies_pixels_exactly_and_accepts_views() -> None:
    image = noise(80, 120)[8:72, 10:106]
    tensor, _ = Preprocess((64, 96))(image)
    np.testing.assert_allclose(tensor[0].transpose(1, 2, 0), image / 255, atol=1e-7)
    flipped = noise(64, 96)[::-1, ::-1]
    np.testing.assert_allclose(Preprocess((64, 96))(flipped)[0][0].transpose(1, 2, 0), flipped / 255, atol=1e-7)


@pytest.mark.parametrize("step", [(1, 1), (2, 1), (1, 2)])
def test_strided_views_resize_as_their_copies(step: tuple[int, int]) -> None:
    view = noise(960, 1280)[:: step[0], :: step[1]]
    spec = Preprocess((320, 320))
    np.testing.assert_array_equal(spec(view)[0], spec(view.copy())[0])


def test_batch_of_different_sizes_is_each_alone() -> None:
    spec = Preprocess((96, 96))
    images = [noise(480, 640), noise(31, 17), noise(96, 96)]
    tensor, transforms = spec(images)
    assert [item.source_size for item in transforms] == [(480, 640), (31, 17), (96, 96)]
    for index, image in enumerate(images):
        np.testing.assert_array_equal(tensor[index], spec(image)[0][0])


sizes = st.tuples(st.integers(1, 5000), st.integers(1, 5000))


@settings(max_examples=200, deadline=None)
@given(sizes, st.tuples(st.integers(8, 1024), st.integers(8, 1024)), st.sampled_from(["stretch", "letterbox"]))
def test_boxes_return_to_the_source(source: tuple[int, int], model: tuple[int, int], resize: str) -> None:
    transform = Preprocess(model, resize=resize).transform(source)
    height, width = source
    boxes = np.array([[0, 0, width, height], [0.25 * width, 0.1 * height, 0.5 * width, 0.9 * height]], np.float64)
    inside = transform.to_model(boxes)
    np.testing.assert_allclose(transform.to_source(inside), boxes, rtol=1e-12, atol=1e-9)
    assert (inside >= -1e-9).all()
    assert (inside[:, [0, 2]] <= model[1] + 1e-9).all()
    assert (inside[:, [1, 3]] <= model[0] + 1e-9).all()


@pytest.mark.parametrize("resize", ["stretch", "letterbox"])
def test_transform_says_where_the_pixels_went(resize: str) -> None:
    """The centre of a bright square, found in the model's input, maps back to where it was drawn."""
    image = np.zeros((480, 640, 3), np.uint8)
    image[100:180, 400:480] = 255
    tensor, (transform,) = Preprocess((320, 320), resize=resize, pad_value=0)(image)
    weight = tensor[0, 0].astype(np.float64)
    y, x = (np.mgrid[0:320, 0:320] + 0.5) * weight
    centre = np.array([x.sum(), y.sum(), x.sum(), y.sum()]) / weight.sum()
    np.testing.assert_allclose(transform.to_source(centre), [440, 140, 440, 140], atol=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": (0, 320)}, "Preprocess.size"),
        ({"size": (320,)}, "expected a list of 2 items"),
        ({"size": [320, 320]}, "expected a list of 2 items"),
        ({"resize": "crop"}, "one of 'stretch', 'letterbox'"),
        ({"interpolation": "cubic"}, "'bilinear_antialias'"),
        ({"scale": 0.0}, "Preprocess.scale"),
        ({"scale": float("nan")}, "a finite number"),
        ({"std": (1.0, 0.0, 1.0)}, "Preprocess.std"),
        ({"pad_value": 256}, "0..255"),
        ({"pad_value": True}, "an integer"),
        ({"color": "hsv"}, "'rgb', 'bgr'"),
    ],
)
def test_wrong_specs_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(BundleError, match=message.replace(".", r"\.")):
        dataclasses.replace(Preprocess((320, 320)), **change)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.empty((1, 3, 64, 64), np.float64), "got float64"),
        (np.empty((2, 3, 64, 64), np.float32), r"of shape \(1, 3, 64, 64\)"),
        (np.empty((1, 3, 64, 128), np.float32)[..., ::2], "not contiguous"),
    ],
)
def test_wrong_output_buffers_are_refused(out: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Preprocess((64, 64))(noise(8, 8), out)


def test_wrong_boxes_are_refused() -> None:
    with pytest.raises(DataError, match=r"expected shape \(\.\.\., 4\)"):
        ImageTransform.fit(Preprocess((64, 64)), (10, 10)).to_source(np.zeros((3, 5)))
    with pytest.raises(DataError, match="at least 1 x 1"):
        Preprocess((64, 64)).transform((0, 10))
