"""Pictures and image messages for the tests of the nodes."""

from __future__ import annotations

from typing import Any

import numpy as np


def image_message(pixels: np.ndarray, encoding: str, *, padding: int = 0, big: bool = False) -> Any:
    """An image message of (height, row bytes) uint8 rows, each followed by some padding."""
    from sensor_msgs.msg import Image

    rows = np.pad(pixels.reshape(len(pixels), -1).view(np.uint8), ((0, 0), (0, padding)), constant_values=77)
    width = {"mono16": 2, "rgb8": 3, "bgr8": 3, "8UC3": 3, "rgba8": 4, "bgra8": 4, "8UC4": 4}
    per_pixel = width.get(encoding, 2 if "yuv" in encoding or encoding in ("uyvy", "yuyv") else 1)
    message = Image(height=len(pixels), width=(rows.shape[1] - padding) // per_pixel, step=rows.shape[1])
    message.encoding, message.is_bigendian = encoding, int(big)
    message.data = rows.tobytes()
    return message


def picture(height: int = 12, width: int = 16) -> np.ndarray:
    """Smooth in colour, so that chroma subsampling and demosaicing keep it."""
    y, x = np.mgrid[:height, :width]
    return np.stack((60 + 4 * x, 90 + 5 * y, 150 - 3 * x), axis=-1).astype(np.uint8)
