"""How images enter LW-DETR."""

from __future__ import annotations

from carpus.runtime.spec import Preprocess

__all__ = ["lw_detr_preprocess"]


def lw_detr_preprocess(input_size: tuple[int, int]) -> Preprocess:
    """An antialiased resize that does not keep the aspect ratio, then ImageNet's mean and deviation.

    Args:
        input_size: (height, width) [px].
    """
    return Preprocess(
        size=input_size,
        resize="stretch",
        interpolation="bilinear_antialias",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
