"""A torch detector used as the runtime uses a bundle: source images in, `Detections` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from carpus.runtime.detections import Detections
from carpus.runtime.postprocess import postprocess
from carpus.runtime.preprocess import Preprocessor
from carpus.runtime.spec import Postprocess, Preprocess

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "ModelDetector", "deimv2_preprocess"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and deviation of ImageNet's red, green and blue, in 0..1."""


def deimv2_preprocess(input_size: tuple[int, int], *, normalise: bool = False) -> Preprocess:
    """How images enter a DEIMv2: a plain antialiased resize, values in 0..1.

    Args:
        input_size: (height, width) [px].
        normalise: remove ImageNet's mean and deviation: `DEIMv2Config.imagenet_normalisation`, true for S to X.
    """
    plain = Preprocess(size=input_size, resize="stretch", interpolation="bilinear_antialias")
    return replace(plain, mean=IMAGENET_MEAN, std=IMAGENET_STD) if normalise else plain


class ModelDetector:
    """Runs a detector module in eval mode through the project's pre- and postprocessing."""

    def __init__(
        self,
        model: nn.Module,
        class_names: Sequence[str],
        preprocess: Preprocess,
        postprocess: Postprocess | None = None,
        *,
        device: torch.device | None = None,
        channels_last: bool = False,
    ) -> None:
        """
        Args:
            model: gives ``pred_logits`` (B, Q, C) and ``pred_boxes`` (B, Q, 4); a call leaves its mode as it was.
            class_names: names of its classes.
            preprocess: how images enter it.
            postprocess: how its outputs become detections; None keeps the 300 best, whatever their score.
            device: where the model is.
            channels_last: memory format of the input.
        """
        self._model = model
        self._preprocessor = Preprocessor(preprocess)
        self._postprocess = Postprocess(score_threshold=0.0) if postprocess is None else postprocess
        self._class_names = tuple(class_names)
        self._device = device if device is not None else torch.device("cpu")
        self._channels_last = channels_last

    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> list[Detections]:
        """Detects objects in images (H, W, 3) uint8 RGB, each of its own size."""
        tensor, transforms = self._preprocessor(list(images))
        batch = torch.from_numpy(tensor).to(self._device)
        if self._channels_last:
            batch = batch.contiguous(memory_format=torch.channels_last)
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.inference_mode():
                outputs = self._model(batch)
        finally:
            self._model.train(was_training)
        logits = outputs["pred_logits"].float().cpu().numpy()
        boxes = outputs["pred_boxes"].float().cpu().numpy()
        return [
            postprocess(logits[index], boxes[index], transform, self._postprocess, self._class_names)
            for index, transform in enumerate(transforms)
        ]
