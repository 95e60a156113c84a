"""Any picture, however it comes, as uint8 RGB (height, width, 3)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

import cv2
import numpy as np

from carpus.runtime.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

__all__ = ["ImageLike", "load_image"]

ImageLike = Union[str, "os.PathLike[str]", np.ndarray, "PILImage"]
"""A path, an array or a PIL image."""

_LARGEST_FILE_PIXELS = 1 << 28
_DAMAGED = "cannot be decoded, it may be cut short or damaged"


def load_image(image: ImageLike, *, color: Literal["rgb", "bgr"] = "rgb") -> np.ndarray:
    """Turn a picture into uint8 RGB (height, width, 3).

    Files and PIL images: EXIF rotation is applied, palettes and CMYK are converted, 16-bit grey is scaled to 8, of an
    animation the first frame is taken, transparency is dropped (the colour stays, nothing is blended). Arrays: uint8
    of shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4); other types are refused because their range is not known.

    Args:
        image: path (any Unicode), numpy array or PIL image.
        color: channel order of an array; OpenCV reads "bgr". Not used for files and PIL images.

    Returns:
        (height, width, 3) uint8. A fitting array is returned as it is, without a copy.

    Raises:
        DataError: the picture is missing, unreadable or of a kind that cannot be used; the message says what to do.
    """
    if color not in ("rgb", "bgr"):
        raise DataError(f"color: expected 'rgb' or 'bgr', got {color!r}")
    if isinstance(image, np.ndarray):
        return _from_array(image, color)
    if isinstance(image, (str, os.PathLike)):
        return _from_file(Path(image))
    if type(image).__module__.partition(".")[0] == "PIL" or _is_pil(image):
        return _from_pil(image, "PIL image")
    raise DataError(
        f"image: expected a path, a numpy array or a PIL image, got {type(image).__module__}.{type(image).__name__}; "
        "convert it with numpy.asarray(...)"
    )


def _is_pil(image: Any) -> bool:
    from PIL import Image

    return isinstance(image, Image.Image)


def _from_array(array: np.ndarray, color: str) -> np.ndarray:
    if array.dtype != np.uint8:
        raise DataError(_dtype_message(array))
    if array.ndim == 3 and array.shape[2] == 3 and array.size:
        return array if color == "rgb" else array[:, :, ::-1]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        hint = ""
        if array.ndim == 3 and array.shape[0] in (1, 3, 4):
            hint = "; this one looks channels-first: array.transpose(1, 2, 0)"
        elif array.ndim == 4:
            hint = "; give a batch as a list of images"
        raise DataError(
            f"image array: expected shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), got {array.shape}{hint}"
        )
    if array.size == 0:
        raise DataError(f"image array: expected at least 1 x 1 pixels, got shape {array.shape}")
    packed = np.ascontiguousarray(array)
    if array.ndim == 2 or array.shape[2] == 1:
        return cv2.cvtColor(packed, cv2.COLOR_GRAY2RGB)
    return cv2.cvtColor(packed, cv2.COLOR_RGBA2RGB if color == "rgb" else cv2.COLOR_BGRA2RGB)


def _dtype_message(array: np.ndarray) -> str:
    message = f"image array: expected dtype uint8 with values 0..255, got {array.dtype} of shape {array.shape}"
    if array.dtype.kind == "f" and array.size:
        if not np.isfinite(array).all():
            return message + "; it holds NaN or infinity"
        if array.min() >= 0.0 and array.max() <= 1.0:
            return message + "; for values 0..1 give (array * 255).round().astype(numpy.uint8)"
        return message + f"; its values run from {array.min():.4g} to {array.max():.4g}: scale to 0..255 and convert"
    if array.dtype == np.uint16:
        return message + "; for 16-bit values give (array >> 8).astype(numpy.uint8)"
    return message + "; convert with array.astype(numpy.uint8) where the values are 0..255"


def _from_file(path: Path) -> np.ndarray:
    if path.is_dir():
        raise DataError(f"image {str(path)!r}: is a directory; give a file, or list the directory's files")
    if not path.exists():
        raise DataError(f"image {str(path)!r}: no such file")
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            if image.width * image.height > _LARGEST_FILE_PIXELS:
                raise DataError(
                    f"image {str(path)!r}: {image.width} x {image.height} pixels, more than the {_LARGEST_FILE_PIXELS} "
                    "allowed for a file; decode it yourself and give the array"
                )
            return _from_pil(image, f"image {str(path)!r}")
    except UnidentifiedImageError:
        raise DataError(
            f"image {str(path)!r}: not an image file that Pillow can read ({path.stat().st_size} bytes)"
        ) from None
    except Image.DecompressionBombError as error:
        raise DataError(f"image {str(path)!r}: {error}") from None
    except OSError as error:
        reason = "cannot be read" if error.errno else _DAMAGED
        raise DataError(f"image {str(path)!r}: {reason} ({error})") from None


def _from_pil(image: Any, where: str) -> np.ndarray:
    from PIL import ImageOps

    try:
        image.seek(0)
        image.load()
        upright = ImageOps.exif_transpose(image) or image
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise DataError(f"{where}: {_DAMAGED} ({error})") from None
    if upright.width < 1 or upright.height < 1:
        raise DataError(f"{where}: expected at least 1 x 1 pixels, got {upright.width} x {upright.height}")
    if upright.mode.startswith("I"):
        grey = np.asarray(upright)
        if grey.min() < 0 or grey.max() > 65535:
            raise DataError(f"{where}: grey values run from {grey.min()} to {grey.max()}; expected 16-bit, 0..65535")
        return _from_array((grey // 257).astype(np.uint8), "rgb")
    if upright.mode == "F":
        raise DataError(
            f"{where}: holds floating-point grey of unknown range; scale it to 0..255 and give a uint8 array"
        )
    if upright.mode == "P" and "transparency" in upright.info:
        upright = upright.convert("RGBA")
    if upright.mode in ("RGBA", "RGBa", "RGBX"):
        return np.ascontiguousarray(np.asarray(upright.convert("RGBA"))[:, :, :3])
    return np.array(upright.convert("RGB"))
