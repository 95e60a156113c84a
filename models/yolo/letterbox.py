"""How images enter a YOLO detector, and how its boxes return to the image.

Bundles use ``carpus.runtime.spec.Preprocess`` with "letterbox" for a fixed size. This is the published pipeline with
its two further switches: padding to the next multiple of the stride only, and no enlargement of small images.
"""

from __future__ import annotations

import cv2
import numpy as np

from carpus.runtime.errors import DataError
from carpus.runtime.iospec import Postprocess, Preprocess
from carpus.runtime.transform import ImageTransform

__all__ = [
    "PAD_VALUE",
    "fit_letterbox",
    "letterbox_preprocess",
    "letterbox_to_source",
    "yolo_postprocess",
    "yolo_preprocess",
]

PAD_VALUE = 114
"""Grey level 0..255 of the border."""


def yolo_preprocess(input_size: tuple[int, int]) -> Preprocess:
    """The fixed-size letterbox as a bundle carries it: RGB in 0..1, plain bilinear.

    Args:
        input_size: (height, width) [px].
    """
    return Preprocess(size=input_size, resize="letterbox", interpolation="bilinear", pad_value=PAD_VALUE)


def yolo_postprocess(*, evaluation: bool = False) -> Postprocess:
    """How outputs become detections, with the published thresholds.

    Args:
        evaluation: as average precision is measured: every class above 0.001, instead of the best class above 0.25.
    """
    return Postprocess(kind="nms", score_threshold=0.001 if evaluation else 0.25, multi_label=evaluation)


def fit_letterbox(
    source_size: tuple[int, int],
    target_size: tuple[int, int],
    *,
    minimal: bool = False,
    enlarge: bool = True,
    stride: int = 32,
) -> ImageTransform:
    """Sizes and offset of a letterbox.

    Args:
        source_size: (height, width) of the image [px].
        target_size: (height, width) of the network input [px].
        minimal: pad to the next multiple of ``stride`` only, so that the result may be smaller than the target.
        enlarge: an image smaller than the target is enlarged.
        stride: coarsest stride of the network [px].

    Raises:
        DataError: an image without pixels.
    """
    (height, width), (target_height, target_width) = source_size, target_size
    if height < 1 or width < 1:
        raise DataError(f"image size: expected at least 1 x 1 pixels, got {width} x {height}")
    ratio = min(target_height / height, target_width / width)
    if not enlarge:
        ratio = min(ratio, 1.0)
    content = (max(1, round(height * ratio)), max(1, round(width * ratio)))
    border = [target_height - content[0], target_width - content[1]]
    if minimal:
        border = [side % stride for side in border]
    # An odd pixel goes below and to the right.
    top, left = (round(side / 2 - 0.1) for side in border)
    size = (content[0] + border[0], content[1] + border[1])
    return ImageTransform(source_size, size, content, (left, top))


def letterbox_preprocess(
    image: np.ndarray,
    target_size: tuple[int, int],
    *,
    minimal: bool = False,
    enlarge: bool = True,
    stride: int = 32,
) -> tuple[np.ndarray, ImageTransform]:
    """Resize and pad one image.

    Args:
        image: (h, w, 3) uint8 RGB.
        target_size: (height, width) [px].
        minimal: see ``fit_letterbox``.
        enlarge: see ``fit_letterbox``.
        stride: see ``fit_letterbox``.

    Returns:
        (3, H, W) float32 in 0..1, and the letterbox.

    Raises:
        DataError: not an (h, w, 3) uint8 array.
    """
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise DataError(f"image: expected (h, w, 3) uint8, got {image.shape} {image.dtype}")
    fitted = fit_letterbox(
        (image.shape[0], image.shape[1]), target_size, minimal=minimal, enlarge=enlarge, stride=stride
    )
    height, width = fitted.content_size
    left, top = fitted.offset
    content = np.ascontiguousarray(image)
    if content.shape[:2] != fitted.content_size:
        content = cv2.resize(content, (width, height), interpolation=cv2.INTER_LINEAR)
    padded = np.full((*fitted.model_size, 3), PAD_VALUE, np.uint8)
    padded[top : top + height, left : left + width] = content
    return np.ascontiguousarray(padded.transpose(2, 0, 1)).astype(np.float32) / np.float32(255), fitted


def letterbox_to_source(xyxy: np.ndarray, letterbox: ImageTransform) -> np.ndarray:
    """Boxes back to the image, clipped to it.

    One factor serves both axes, as published; it differs from ``ImageTransform.to_source`` by the rounding of the
    resized image to whole pixels.

    Args:
        xyxy: (n, 4) float [px of the network input].
        letterbox: how the image entered.

    Returns:
        (n, 4) float32 xyxy [px of the image].
    """
    height, width = letterbox.source_size
    model_height, model_width = letterbox.model_size
    gain = min(model_height / height, model_width / width)
    left = round((model_width - width * gain) / 2 - 0.1)
    top = round((model_height - height * gain) / 2 - 0.1)
    boxes = (np.asarray(xyxy, np.float32) - np.array([left, top, left, top], np.float32)) / np.float32(gain)
    return np.clip(boxes, 0.0, np.array([width, height, width, height], np.float32)).astype(np.float32)
