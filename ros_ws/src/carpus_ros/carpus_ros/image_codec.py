"""Image messages to arrays and back, without cv_bridge (whose binaries break under numpy 2)."""

from __future__ import annotations

import array
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from carpus.runtime.errors import DataError

__all__ = ["ImageBuffer", "decode_compressed", "decode_image", "encodings"]


@dataclass(frozen=True)
class _Encoding:
    """How an encoding lies in memory: bytes a pixel, and the OpenCV conversion to RGB (None: it is RGB already)."""

    pixel_bytes: int
    conversion: int | None
    channels: int
    two_byte: bool = False


# sensor_msgs/image_encodings. The 8UCx names leave the order of the channels open; cv_bridge reads them as BGR.
_ENCODINGS = {
    "rgb8": _Encoding(3, None, 3),
    "bgr8": _Encoding(3, cv2.COLOR_BGR2RGB, 3),
    "8UC3": _Encoding(3, cv2.COLOR_BGR2RGB, 3),
    "rgba8": _Encoding(4, cv2.COLOR_RGBA2RGB, 4),
    "bgra8": _Encoding(4, cv2.COLOR_BGRA2RGB, 4),
    "8UC4": _Encoding(4, cv2.COLOR_BGRA2RGB, 4),
    "mono8": _Encoding(1, cv2.COLOR_GRAY2RGB, 1),
    "8UC1": _Encoding(1, cv2.COLOR_GRAY2RGB, 1),
    "mono16": _Encoding(2, cv2.COLOR_GRAY2RGB, 1, two_byte=True),
    "yuv422": _Encoding(2, cv2.COLOR_YUV2RGB_UYVY, 2),
    "uyvy": _Encoding(2, cv2.COLOR_YUV2RGB_UYVY, 2),
    "yuv422_yuy2": _Encoding(2, cv2.COLOR_YUV2RGB_YUY2, 2),
    "yuyv": _Encoding(2, cv2.COLOR_YUV2RGB_YUY2, 2),
    "bayer_rggb8": _Encoding(1, cv2.COLOR_BayerRGGB2RGB, 1),
    "bayer_bggr8": _Encoding(1, cv2.COLOR_BayerBGGR2RGB, 1),
    "bayer_gbrg8": _Encoding(1, cv2.COLOR_BayerGBRG2RGB, 1),
    "bayer_grbg8": _Encoding(1, cv2.COLOR_BayerGRBG2RGB, 1),
}


def encodings() -> tuple[str, ...]:
    """Names of the encodings that can be decoded."""
    return tuple(_ENCODINGS)


def decode_image(message: Any) -> np.ndarray:
    """Turn a sensor_msgs/Image into RGB.

    Args:
        message: anything with the fields of sensor_msgs/Image.

    Returns:
        (height, width, 3) uint8 RGB. For rgb8 a view of the message's own data, read-only use.

    Raises:
        DataError: unknown encoding, no pixels, or data too short for the stated size.
    """
    encoding = _ENCODINGS.get(message.encoding)
    if encoding is None:
        raise DataError(
            f"image encoding {message.encoding!r} is not supported; expected one of {', '.join(_ENCODINGS)}"
        )
    height, width, step = message.height, message.width, message.step
    if height < 1 or width < 1:
        raise DataError(f"image of {width} x {height} pixels: expected at least 1 x 1")
    row = width * encoding.pixel_bytes
    if step < row:
        raise DataError(f"image step is {step} bytes: {width} pixels of {message.encoding} need at least {row}")
    data = np.frombuffer(message.data, np.uint8)
    needed = step * (height - 1) + row
    if data.size < needed:
        raise DataError(
            f"image data has {data.size} bytes: {width} x {height} {message.encoding} with step {step} needs {needed}"
        )
    pixels = _rows(data, height, row, step)
    if encoding.two_byte:
        samples = np.ascontiguousarray(pixels).view(">u2" if message.is_bigendian else "<u2")
        pixels = (samples >> 8).astype(np.uint8)
    elif encoding.channels > 1:
        pixels = pixels.reshape(height, width, encoding.channels)
    if encoding.conversion is None:
        return pixels
    if encoding.channels == 2 and width % 2:
        raise DataError(f"image of {width} pixels width: {message.encoding} shares colour between pairs, expected even")
    if message.encoding.startswith("bayer") and min(height, width) < 4:
        raise DataError(f"image of {width} x {height} pixels: {message.encoding} needs at least 4 x 4")
    return cv2.cvtColor(np.ascontiguousarray(pixels), encoding.conversion)


def decode_compressed(message: Any) -> np.ndarray:
    """Turn a sensor_msgs/CompressedImage (JPEG, PNG, WebP ...) into RGB.

    Args:
        message: anything with the fields of sensor_msgs/CompressedImage.

    Returns:
        (height, width, 3) uint8 RGB.

    Raises:
        DataError: depth images, or data that does not decode.
    """
    if "compressedDepth" in message.format:
        raise DataError(f"compressed image of format {message.format!r}: holds depth, expected a colour or grey image")
    data = np.frombuffer(message.data, np.uint8)
    image = None
    if data.size:
        image = cv2.imdecode(data, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    if image is None:
        raise DataError(
            f"compressed image of format {message.format!r}: {data.size} bytes do not decode as JPEG, PNG or WebP"
        )
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)


def _rows(data: np.ndarray, height: int, row: int, step: int) -> np.ndarray:
    """View (height, row) of bytes whose rows start every ``step`` bytes; the last row may lack its padding."""
    if step == row:
        return data[: height * row].reshape(height, row)
    return np.lib.stride_tricks.as_strided(data, (height, row), (step, 1), writeable=False)


class ImageBuffer:
    """Fills rgb8 image messages through one reused ``array.array``, the only type rclpy serializes by plain copy."""

    def __init__(self) -> None:
        self._data = array.array("B")
        self._view = np.empty(0, np.uint8)

    def fill(self, message: Any, rgb: np.ndarray) -> None:
        """Set size, encoding and data of a sensor_msgs/Image; the data is valid until the next call.

        Args:
            message: the sensor_msgs/Image to fill; its header is left alone.
            rgb: (height, width, 3) uint8 RGB.
        """
        if rgb.size != self._view.size:
            self._data = array.array("B", bytes(rgb.size))
            self._view = np.frombuffer(self._data, np.uint8)
        np.copyto(self._view.reshape(rgb.shape), rgb)
        message.height, message.width = rgb.shape[:2]
        message.step = rgb.shape[1] * 3
        message.encoding = "rgb8"
        message.is_bigendian = 0
        message.data = self._data
