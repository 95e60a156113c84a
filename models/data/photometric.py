"""Random change of colours as a single affine map of RGB, so that an image is touched once.

Brightness, contrast, saturation, hue and channel order are each affine in RGB (hue as a rotation about the grey axis
of YIQ), hence so is any sequence of them. Against applying them one after another the only difference is that values
are clipped once, at the end.
"""

from __future__ import annotations

import math

import cv2
import numpy as np
from numpy.typing import NDArray

from carpus.models.data.augment_config import AugmentConfig

__all__ = ["apply_colour", "photometric_distort"]

_LUMA = np.array([0.299, 0.587, 0.114])
_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
_FROM_YIQ = np.linalg.inv(_TO_YIQ)


def _hue_matrix(turn: float) -> NDArray[np.float64]:
    c, s = math.cos(2 * math.pi * turn), math.sin(2 * math.pi * turn)
    return _FROM_YIQ @ np.array([[1.0, 0.0, 0.0], [0.0, c, -s], [0.0, s, c]]) @ _TO_YIQ


def photometric_distort(
    mean_rgb: NDArray[np.float64], config: AugmentConfig, rng: np.random.Generator
) -> NDArray[np.float64] | None:
    """Draw a colour change.

    Args:
        mean_rgb: `(3,)` mean colour of the image, on which contrast is centred.
        config: probabilities and ranges.
        rng: source of randomness.

    Returns:
        `(3, 4)` map of (r, g, b, 1), or None when nothing changes.
    """
    active = rng.random(5) < config.photometric_prob
    matrix, offset = np.eye(3), np.zeros(3)

    def scale_contrast() -> None:
        nonlocal matrix, offset
        factor = rng.uniform(*config.contrast)
        grey = _LUMA @ (matrix @ mean_rgb + offset)
        matrix, offset = factor * matrix, factor * offset + (1 - factor) * grey

    contrast_first = bool(active[4])
    swap = rng.random() < config.channel_swap_prob
    if active[0]:
        matrix = matrix * rng.uniform(*config.brightness)
    if active[1] and contrast_first:
        scale_contrast()
    if active[2]:
        factor = rng.uniform(*config.saturation)
        saturate = factor * np.eye(3) + (1 - factor) * _LUMA[None, :]
        matrix, offset = saturate @ matrix, saturate @ offset
    if active[3]:
        rotate = _hue_matrix(rng.uniform(*config.hue))
        matrix, offset = rotate @ matrix, rotate @ offset
    if active[1] and not contrast_first:
        scale_contrast()
    if swap:
        order = rng.permutation(3)
        matrix, offset = matrix[order], offset[order]
    if not active[:4].any() and not swap:
        return None
    return np.concatenate((matrix, offset[:, None]), axis=1)


def apply_colour(image: NDArray[np.uint8], colour: NDArray[np.float64] | None) -> NDArray[np.uint8]:
    """Apply a `(3, 4)` colour map to a `(H, W, 3)` uint8 image, rounding and clipping; None returns it unchanged."""
    if colour is None:
        return image
    return np.asarray(cv2.transform(image, colour), dtype=np.uint8)
