"""Image messages to arrays and back: every encoding, compressed images, what is refused."""

from __future__ import annotations

import array

import cv2
import numpy as np
import pytest

from carpus.runtime.errors import DataError
from tests.ros.images import image_message, picture
from tests.ros.workspace import activate

_REASON = activate()
if _REASON is None:
    from carpus_ros.image_codec import ImageBuffer, decode_compressed, decode_image, encodings
    from sensor_msgs.msg import CompressedImage, Image
else:
    pytest.skip(_REASON, allow_module_level=True)
pytestmark = pytest.mark.ros


def _encode(rgb: np.ndarray, encoding: str) -> np.ndarray:
    """Rows of bytes of a picture, made without the code under test."""
    alpha = np.full((*rgb.shape[:2], 1), 9, np.uint8)
    if encoding in ("rgb8",):
        return rgb
    if encoding in ("bgr8", "8UC3"):
        return rgb[:, :, ::-1].copy()
    if encoding == "rgba8":
        return np.concatenate((rgb, alpha), axis=2)
    if encoding in ("bgra8", "8UC4"):
        return np.concatenate((rgb[:, :, ::-1], alpha), axis=2)
    if encoding in ("mono8", "8UC1"):
        return rgb[:, :, 0].copy()
    if encoding == "mono16":
        return rgb[:, :, 0].astype("<u2") * 257
    if encoding.startswith("bayer"):
        pattern = encoding[6:10]
        rows = np.empty(rgb.shape[:2], np.uint8)
        for index, colour in enumerate(pattern):
            at = np.s_[index // 2 :: 2, index % 2 :: 2]
            rows[at] = rgb[:, :, "rgb".index(colour)][at]
        return rows
    # ITU-R BT.601, studio range
    r, g, b = (rgb[:, :, channel].astype(np.float64) for channel in range(3))
    luma = 16 + (65.481 * r + 128.553 * g + 24.966 * b) / 255
    blue = 128 + (-37.797 * r - 74.203 * g + 112.0 * b) / 255
    red = 128 + (112.0 * r - 93.786 * g - 18.214 * b) / 255
    chroma = np.empty_like(luma)
    chroma[:, ::2], chroma[:, 1::2] = blue[:, ::2], red[:, ::2]
    order = (chroma, luma) if encoding in ("yuv422", "uyvy") else (luma, chroma)
    return np.stack(order, axis=-1).round().astype(np.uint8)


_ENCODINGS = """
    rgb8 bgr8 8UC3 rgba8 bgra8 8UC4 mono8 8UC1 mono16 yuv422 uyvy yuv422_yuy2 yuyv
    bayer_rggb8 bayer_bggr8 bayer_gbrg8 bayer_grbg8
""".split()  # noqa: SIM905


def test_the_encodings_listed_here_are_those_supported() -> None:
    assert set(_ENCODINGS) == set(encodings())


@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("encoding", _ENCODINGS)
def test_every_encoding_gives_the_same_picture(encoding: str, padding: int) -> None:
    rgb = picture()
    decoded = decode_image(image_message(_encode(rgb, encoding), encoding, padding=padding))
    assert decoded.dtype == np.uint8
    assert decoded.shape == rgb.shape
    wanted = np.repeat(rgb[:, :, :1], 3, axis=2) if encoding in ("mono8", "8UC1", "mono16") else rgb
    tolerance = 6 if encoding[:3] in ("yuv", "uyv", "yuy") else 8 if encoding.startswith("bayer") else 0
    inner = np.s_[2:-2, 2:-2] if encoding.startswith("bayer") else np.s_[:, :]
    error = np.abs(decoded[inner].astype(int) - wanted[inner])
    assert error.max() <= tolerance


def test_rgb8_is_a_view_of_the_message() -> None:
    message = image_message(picture(), "rgb8")
    message.data = array.array("B", message.data)
    assert np.shares_memory(decode_image(message), np.frombuffer(message.data, np.uint8))


def test_big_endian_grey_and_a_last_row_without_padding() -> None:
    rgb = picture()
    grey = rgb[:, :, 0].astype(">u2") * 257
    assert (decode_image(image_message(grey.astype(">u2"), "mono16", big=True))[:, :, 0] == rgb[:, :, 0]).all()
    message = image_message(_encode(rgb, "rgb8"), "rgb8", padding=5)
    message.data = bytes(message.data)[:-5]
    assert (decode_image(message) == rgb).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"encoding": "32FC1"}, "image encoding '32FC1' is not supported; expected one of rgb8"),
        ({"encoding": ""}, "image encoding '' is not supported"),
        ({"height": 0}, "image of 16 x 0 pixels: expected at least 1 x 1"),
        ({"width": 0}, "image of 0 x 12 pixels"),
        ({"step": 47}, "image step is 47 bytes: 16 pixels of rgb8 need at least 48"),
        ({"data": b""}, "image data has 0 bytes: 16 x 12 rgb8 with step 48 needs 576"),
        ({"data": bytes(575)}, "image data has 575 bytes"),
        ({"height": 4000000000}, "image data has 576 bytes"),
        ({"encoding": "yuyv", "width": 15}, "yuyv shares colour between pairs, expected even"),
        ({"encoding": "bayer_rggb8", "height": 2}, "bayer_rggb8 needs at least 4 x 4"),
    ],
)
def test_bad_images_say_what_is_wrong(changes: dict[str, object], expected: str) -> None:
    message = image_message(picture(), "rgb8")
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(DataError) as caught:
        decode_image(message)
    assert expected in str(caught.value)


def test_compressed_images() -> None:
    rgb = picture(32, 48)
    for suffix, tolerance in ((".png", 0), (".jpg", 6)):
        data = cv2.imencode(suffix, cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR))[1].tobytes()
        decoded = decode_compressed(CompressedImage(format=f"rgb8; {suffix[1:]} compressed bgr8", data=data))
        assert np.abs(decoded.astype(int) - rgb).max() <= tolerance
    for format_name, damaged, expected in (
        ("jpeg", b"", "0 bytes do not decode"),
        ("jpeg", b"no image", "8 bytes do not decode"),
        ("16UC1; compressedDepth png", data, "holds depth"),
    ):
        with pytest.raises(DataError, match=expected):
            decode_compressed(CompressedImage(format=format_name, data=damaged))


def test_image_buffer_survives_a_change_of_size() -> None:
    buffer, message = ImageBuffer(), Image()
    for height, width in ((12, 16), (12, 16), (5, 7)):
        rgb = picture(height, width)
        buffer.fill(message, rgb)
        assert (message.height, message.width, message.step, message.encoding) == (height, width, width * 3, "rgb8")
        assert (decode_image(message) == rgb).all()
