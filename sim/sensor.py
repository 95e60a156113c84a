"""What a camera adds to a rendered picture."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from carpus.sim.domains import Domain

__all__ = ["Exposure", "Sensor"]

_GRAIN_SCALE = 32.0  # Standard deviation of the stored grain [grey levels].
_BLUR_FROM = 0.45  # A Gaussian narrower than this leaves a 3x3 kernel without effect [px].
_GAINS = (0.6, 2.5)  # Range of the automatic exposure.


@dataclass(frozen=True)
class Exposure:
    """How one picture is taken.

    Attributes:
        brightness: mean, 0..1, that automatic exposure aims at.
        gamma: exponent of the tone curve.
        blur: standard deviation [px].
        noise: standard deviation of the grain [grey levels].
        grain_at: row and column at which the stored grain is cut out.
    """

    brightness: float
    gamma: float
    blur: float
    noise: float
    grain_at: tuple[int, int]


class Sensor:
    """A camera sensor for pictures of one size: automatic exposure, gamma, slight blur and grain.

    Args:
        size: picture height and width [px].
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self._size = size
        grain = np.random.default_rng(5).standard_normal((size[0] * 2, size[1] * 2, 3), dtype=np.float32)
        self._grain = np.clip(128.0 + _GRAIN_SCALE * grain, 0.0, 255.0).astype(np.uint8)

    def draw(self, domain: Domain, rng: np.random.Generator) -> Exposure:
        """Draw the settings of a picture."""
        brightness, gamma = rng.uniform(*domain.exposure), rng.uniform(0.85, 1.2)
        blur, noise = rng.uniform(0.0, 0.9), rng.uniform(*domain.noise)
        return Exposure(brightness, gamma, blur, noise, self.draw_grain(rng))

    def draw_grain(self, rng: np.random.Generator) -> tuple[int, int]:
        """Draw where the grain is cut out; a new place for every frame of a film."""
        return int(rng.integers(self._size[0])), int(rng.integers(self._size[1]))

    def expose(self, image: NDArray[np.uint8], exposure: Exposure) -> NDArray[np.uint8]:
        """Return the picture ``(height, width, 3) uint8`` as the sensor gives it."""
        mean = max(float(image[::8, ::8].mean()) / 255.0, 1e-3)
        gain = np.clip(exposure.brightness / mean, *_GAINS)
        curve = 255.0 * np.clip(gain * np.arange(256) / 255.0, 0.0, 1.0) ** exposure.gamma
        taken = cv2.LUT(image, (curve + 0.5).astype(np.uint8))
        if exposure.blur > _BLUR_FROM:
            taken = cv2.GaussianBlur(taken, (3, 3), exposure.blur)
        row, column = exposure.grain_at
        grain = self._grain[row : row + image.shape[0], column : column + image.shape[1]]
        weight = exposure.noise / _GRAIN_SCALE
        return np.asarray(cv2.addWeighted(taken, 1.0, grain, weight, -128.0 * weight), np.uint8)
