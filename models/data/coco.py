"""The records of a detection dataset in COCO layout: immutable, checked, with contiguous class ids.

`carpus.models.data.coco_reader.load_coco` makes them from a file. Boxes are corners in source pixels everywhere;
COCO's ``[x, y, width, height]`` exists only in files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from carpus.runtime.errors import DataError

__all__ = ["BadBox", "CategoryMap", "CocoDataset", "CocoImage", "locate_split"]


@dataclass(frozen=True)
class CategoryMap:
    """The classes of a dataset, in the order of the model's contiguous class ids.

    Attributes:
        names: class names, unique, any unicode.
        dataset_ids: the category id that the dataset's files use for each class.
    """

    names: tuple[str, ...]
    dataset_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.dataset_ids):
            raise DataError(f"CategoryMap: {len(self.names)} names but {len(self.dataset_ids)} dataset ids.")
        for what, values in (("name", self.names), ("dataset id", self.dataset_ids)):
            twice = [value for value, count in Counter(values).items() if count > 1]
            if twice:
                raise DataError(f"CategoryMap: {what} {twice[0]!r} is used by more than one class; make them distinct.")

    def __len__(self) -> int:
        return len(self.names)

    def class_ids(self) -> dict[int, int]:
        """Dataset category id -> contiguous class id."""
        return {dataset_id: index for index, dataset_id in enumerate(self.dataset_ids)}


@dataclass(frozen=True)
class BadBox:
    """A box that cannot be used, and where it stands.

    Attributes:
        annotations: the annotation file.
        annotation_id: id of the annotation in that file.
        image: the image's ``file_name``.
        reason: what is wrong, with the offending value.
    """

    annotations: Path
    annotation_id: int | str
    image: str
    reason: str

    def __str__(self) -> str:
        return f"annotation {self.annotation_id} of {self.image!r}: {self.reason}"


@dataclass(frozen=True)
class CocoImage:
    """One image and its ground truth. Arrays are read-only and row-aligned; N may be 0.

    Attributes:
        image_id: id in the annotation file.
        path: the image file.
        height, width: image size [px].
        boxes: (N, 4) float32 corners x1, y1, x2, y2 [px], clipped to the image.
        labels: (N,) int64 contiguous class ids.
        crowd: (N,) bool; crowd regions are no training targets, and detections on them count neither way.
        area: (N,) float64 COCO area [px^2].
        annotation_ids: ids in the annotation file.
    """

    image_id: int | str
    path: Path
    height: int
    width: int
    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]
    annotation_ids: tuple[int | str, ...]

    def training_targets(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Boxes (M, 4) and labels (M,) without the crowd regions."""
        keep = ~self.crowd
        return self.boxes[keep], self.labels[keep]


@dataclass(frozen=True)
class CocoDataset:
    """A checked COCO detection dataset.

    Attributes:
        annotations: the annotation file.
        image_dir: the folder that ``file_name`` is relative to.
        categories: the classes.
        images: records in the file's order.
        bad_boxes: boxes that were dropped, in the file's order.
    """

    annotations: Path
    image_dir: Path
    categories: CategoryMap
    images: tuple[CocoImage, ...]
    bad_boxes: tuple[BadBox, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[CocoImage]:
        return iter(self.images)

    def require_objects(self, purpose: str) -> None:
        """Refuse a dataset in which no image has an object (crowds aside).

        Args:
            purpose: what is impossible then, for the message.

        Raises:
            DataError: there is none.
        """
        if not any((~image.crowd).any() for image in self.images):
            raise DataError(
                f"{self.annotations}: none of the {len(self)} images has an object of these classes (crowds aside), so "
                f"there is nothing to {purpose}; check that it holds the annotations of this split"
            )

    def subset(self, count: int) -> CocoDataset:
        """The dataset reduced to ``count`` images spread evenly over the file (all of them if it has fewer)."""
        if count >= len(self.images):
            return self
        chosen = np.linspace(0, len(self.images) - 1, max(count, 1)).round().astype(int)
        return CocoDataset(
            self.annotations, self.image_dir, self.categories, tuple(self.images[i] for i in chosen), self.bad_boxes
        )


def locate_split(path: Path, split: str | None = None, image_dir: Path | None = None) -> tuple[Path, Path]:
    """Finds annotation file and image folder of a split.

    Args:
        path: an annotation file, a split's folder (``annotations.json`` and ``images/``), or with ``split`` a dataset
            root.
        split: name of the folder below ``path`` when ``path`` is a root.
        image_dir: folder of the images when it is not ``images/`` beside the annotation file.

    Returns:
        (annotation file, image folder).

    Raises:
        DataError: nothing usable there; says what was looked for.
    """
    path = Path(path)
    if path.suffix.lower() == ".json":
        annotations = path
    elif split is not None and (path / split).is_dir():
        annotations = path / split / "annotations.json"
    else:
        annotations = path / "annotations.json"
    if not annotations.is_file():
        raise DataError(
            f"No dataset at {path}: {annotations} does not exist. Expected a COCO annotation file, or a folder with "
            "annotations.json and images/."
        )
    images = Path(image_dir) if image_dir is not None else annotations.parent / "images"
    if not images.is_dir():
        raise DataError(f"Image folder {images} does not exist; name the folder that file_name is relative to.")
    return annotations, images
