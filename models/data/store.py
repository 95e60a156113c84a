"""Decoded training images kept in memory.

Decoding a JPEG costs as much as augmenting it, and it would be paid every epoch. The store decodes each image once,
shrinks it to what training can use, and keeps as many as its budget allows; the rest is decoded on demand. It is filled
before worker processes are forked, so that they share its pages.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from carpus.models.data.coco import CocoDataset, CocoImage
from carpus.runtime.errors import DataError
from carpus.runtime.image import load_image

__all__ = ["ImageStore", "Sample"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """One training image with its targets.

    Attributes:
        image: (H, W, 3) uint8 RGB, read-only.
        boxes: (N, 4) float32 corners in pixels of ``image``.
        labels: (N,) int64 class ids.
    """

    image: NDArray[np.uint8]
    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]


class ImageStore:
    """Random access to the decoded images of a dataset, crowd regions left out of the targets."""

    def __init__(self, dataset: CocoDataset, *, short_side: int | None = None, budget_gb: float = 6.0) -> None:
        """
        Args:
            dataset: the images and their boxes.
            short_side: images whose shorter side is longer than this are shrunk to it [px]; None keeps the source size.
            budget_gb: memory for decoded images [GB]; 0 decodes every image every time.
        """
        self._dataset = dataset
        self._short_side = short_side
        self._budget = int(budget_gb * 1e9)
        self._images: list[NDArray[np.uint8] | None] = [None] * len(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def fill(self, threads: int = 2) -> int:
        """Decodes images until the budget is spent.

        Args:
            threads: decoding threads.

        Returns:
            The number of images held.
        """
        used = 0
        held = 0
        with ThreadPoolExecutor(max(threads, 1)) as pool:
            # Chunks bound what is decoded beyond the budget.
            for start in range(0, len(self), 64):
                if used >= self._budget:
                    break
                chunk = range(start, min(start + 64, len(self)))
                for index, image in zip(chunk, pool.map(self._decode, chunk), strict=True):
                    used += image.nbytes
                    if used > self._budget:
                        break
                    self._images[index] = image
                    held += 1
        logger.info("%d of %d training images held in memory (%.2f GB)", held, len(self), min(used, self._budget) / 1e9)
        return held

    def __getitem__(self, index: int) -> Sample:
        """The sample at a position.

        Raises:
            DataError: the image cannot be decoded or does not have the size that the annotations state.
        """
        record = self._dataset.images[index]
        image = self._images[index]
        if image is None:
            image = self._decode(index)
        boxes, labels = record.training_targets()
        height, width = image.shape[:2]
        if (height, width) != (record.height, record.width):
            sx, sy = width / record.width, height / record.height
            boxes = boxes * np.array([sx, sy, sx, sy], dtype=np.float32)
        return Sample(image, boxes, labels)

    def _decode(self, index: int) -> NDArray[np.uint8]:
        image = decode(self._dataset.images[index])
        if self._short_side is not None and min(image.shape[:2]) > self._short_side:
            scale = self._short_side / min(image.shape[:2])
            size = (max(round(image.shape[1] * scale), 1), max(round(image.shape[0] * scale), 1))
            image = np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), dtype=np.uint8)
        image.setflags(write=False)
        return image


def decode(record: CocoImage) -> NDArray[np.uint8]:
    """Decodes an image and holds it against its annotations.

    Returns:
        (H, W, 3) uint8 RGB.

    Raises:
        DataError: unreadable, or of another size than annotated.
    """
    image = load_image(record.path)
    if image.shape[:2] != (record.height, record.width):
        raise DataError(
            f"{record.path} is {image.shape[1]} x {image.shape[0]} (after its EXIF rotation) but the annotations say "
            f"{record.width} x {record.height}; its boxes would be wrong. Correct width and height, or the image."
        )
    return image
