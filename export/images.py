"""Pictures for parity checks: none is square, so that a mixed-up width and height cannot pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from carpus.runtime.errors import DataError
from carpus.runtime.image import load_image

__all__ = ["ParityImage", "folder_images", "procedural_images", "shrink"]

_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
_SIZES = ((480, 640), (640, 427), (360, 640), (333, 500), (400, 711), (97, 401), (600, 240), (256, 321))


@dataclass(frozen=True)
class ParityImage:
    """A named picture.

    Attributes:
        name: for messages.
        pixels: (H, W, 3) uint8 RGB, H != W.
    """

    name: str
    pixels: np.ndarray


def folder_images(folder: Path, count: int) -> list[ParityImage]:
    """Pictures spread evenly over a folder and all below it; square ones are cut to 4:3.

    Args:
        folder: a folder of images, or a data set's split.
        count: most pictures to return.

    Raises:
        DataError: no such folder, no picture in it, or one that cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"images {str(folder)!r}: no such folder; give a folder with images")
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())
    if not files:
        raise DataError(f"images {str(folder)!r}: no image in it; looked for {', '.join(sorted(_SUFFIXES))}")
    chosen = sorted({round(float(index)) for index in np.linspace(0, len(files) - 1, min(count, len(files)))})
    return [
        ParityImage(files[index].relative_to(folder).as_posix(), _not_square(load_image(files[index])))
        for index in chosen
    ]


def procedural_images(count: int, seed: int = 0) -> list[ParityImage]:
    """Pictures with the statistics of photographs: a 1/f background, shaded shapes, sharp edges, fine texture.

    Args:
        count: how many; sizes repeat after eight.
        seed: the same seed gives the same pictures.
    """
    images = []
    for index in range(count):
        rng = np.random.default_rng((seed, index))
        height, width = _SIZES[index % len(_SIZES)]
        images.append(ParityImage(f"procedural {index}", _draw(rng, height, width)))
    return images


def shrink(image: ParityImage, longest: int) -> ParityImage:
    """The picture with its longer side at most ``longest`` px; still not square."""
    height, width = image.pixels.shape[:2]
    if max(height, width) <= longest:
        return image
    ratio = longest / max(height, width)
    size = max(round(width * ratio), 1), max(round(height * ratio), 1)
    pixels = _not_square(cv2.resize(image.pixels, size, interpolation=cv2.INTER_AREA))
    return ParityImage(f"{image.name}, shrunk", pixels)


def _not_square(pixels: np.ndarray) -> np.ndarray:
    height, width = pixels.shape[:2]
    if height != width or height < 2:
        return np.ascontiguousarray(pixels)
    kept = max(height * 3 // 4, 1)
    top = (height - kept) // 2
    return np.ascontiguousarray(pixels[top : top + kept])


def _draw(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    canvas = _background(rng, height, width)
    y = np.arange(height, dtype=np.float32)[:, None]
    x = np.arange(width, dtype=np.float32)[None]
    for _ in range(int(rng.integers(6, 12))):
        colour = rng.uniform(0, 255, 3).astype(np.float32)
        centre = float(rng.uniform(0, width)), float(rng.uniform(0, height))
        radii = (rng.uniform(0.03, 0.25, 2) * min(height, width)).tolist()
        angle = float(rng.uniform(0, 180))
        mask = np.zeros((height, width), np.float32)
        if rng.random() < 0.5:
            box = cv2.boxPoints((centre, (2 * radii[0], 2 * radii[1]), angle))
            cv2.fillConvexPoly(mask, np.round(box * 16).astype(np.int32), 1.0, cv2.LINE_8, 4)
        else:
            at, axes = [round(value * 16) for value in centre], [round(value * 16) for value in radii]
            cv2.ellipse(mask, at, axes, angle, 0, 360, 1.0, -1, cv2.LINE_8, 4)
        slope = rng.uniform(-0.4, 0.4, 2) / max(radii)
        shade = np.clip(1.0 + (x - centre[0]) * slope[0] + (y - centre[1]) * slope[1], 0.3, 1.6)
        inside = mask > 0
        grain = 6.0 * rng.standard_normal((height, width), np.float32)
        canvas[inside] = colour * shade.astype(np.float32)[inside][:, None] + grain[inside][:, None]
    canvas += 2.0 * rng.standard_normal(canvas.shape, np.float32)
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8)


def _background(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """(H, W, 3) float32 around mid-grey, with a 1/f amplitude spectrum and partly shared between the channels."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    planes = []
    for _ in range(4):
        spectrum = np.fft.rfft2(rng.normal(size=(height, width))) / frequency
        plane = np.fft.irfft2(spectrum, s=(height, width))
        planes.append(plane / plane.std())
    shared = planes[3][..., None]
    return (rng.uniform(80, 170, 3) + 40.0 * (0.8 * shared + 0.4 * np.stack(planes[:3], -1))).astype(np.float32)
