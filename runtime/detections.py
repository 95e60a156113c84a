"""Detections of one image, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from carpus.runtime.errors import DataError

__all__ = ["Detections"]


@dataclass(frozen=True, eq=False)
class Detections:
    """Boxes found in one image, best first. Arrays are read-only; an image without detections has N = 0.

    Attributes:
        xyxy: (N, 4) float32, left, top, right, bottom in pixels of the source image.
        score: (N,) float32 in 0..1, descending.
        class_id: (N,) int64, contiguous ids of the model, 0..C-1.
        class_names: name of every class of the model, by class id.
        image_size: (height, width) of the source image [px].
    """

    xyxy: np.ndarray
    score: np.ndarray
    class_id: np.ndarray
    class_names: tuple[str, ...]
    image_size: tuple[int, int]

    def __post_init__(self) -> None:
        xyxy = np.array(self.xyxy, np.float32)
        score = np.array(self.score, np.float32)
        class_id = np.array(self.class_id, np.int64)
        if xyxy.size == 0:
            xyxy = xyxy.reshape(0, 4)
        if xyxy.ndim != 2 or xyxy.shape[1] != 4:
            raise DataError(f"Detections.xyxy: expected shape (N, 4), got {xyxy.shape}")
        count = len(xyxy)
        for name, array in (("score", score), ("class_id", class_id)):
            if array.shape != (count,):
                raise DataError(f"Detections.{name}: expected shape ({count},) as xyxy has, got {array.shape}")
        if count:
            if not (np.isfinite(xyxy).all() and np.isfinite(score).all()):
                raise DataError("Detections: expected finite boxes and scores, got NaN or infinity")
            if class_id.min() < 0 or class_id.max() >= len(self.class_names):
                bad = class_id[(class_id < 0) | (class_id >= len(self.class_names))][0]
                raise DataError(f"Detections.class_id: expected 0..{len(self.class_names) - 1}, got {bad}")
            if (score[1:] > score[:-1]).any():
                order = np.argsort(-score, kind="stable")
                xyxy, score, class_id = xyxy[order], score[order], class_id[order]
        for name, array in (("xyxy", xyxy), ("score", score), ("class_id", class_id)):
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        object.__setattr__(self, "class_names", tuple(self.class_names))
        object.__setattr__(self, "image_size", (int(self.image_size[0]), int(self.image_size[1])))

    @classmethod
    def trusted(
        cls,
        xyxy: np.ndarray,
        score: np.ndarray,
        class_id: np.ndarray,
        class_names: tuple[str, ...],
        image_size: tuple[int, int],
    ) -> Detections:
        """Detections of arrays that are known to be right: of the types above, finite, in order, and nobody else's.

        For postprocessing, where the checks of the constructor would cost as much as all the rest.
        """
        made = object.__new__(cls)
        for array in (xyxy, score, class_id):
            array.flags.writeable = False
        vars(made).update(xyxy=xyxy, score=score, class_id=class_id, class_names=class_names, image_size=image_size)
        return made

    @classmethod
    def empty(cls, class_names: tuple[str, ...], image_size: tuple[int, int]) -> Detections:
        """No detections in an image of (height, width)."""
        return cls(np.zeros((0, 4)), np.zeros(0), np.zeros(0), class_names, image_size)

    def __len__(self) -> int:
        return len(self.score)

    def __iter__(self) -> Iterator[tuple[np.ndarray, float, int, str]]:
        """Yield (xyxy (4,) float32, score, class id, class name), best first."""
        for box, score, class_id in zip(self.xyxy, self.score, self.class_id, strict=True):
            yield box, float(score), int(class_id), self.class_names[class_id]

    @property
    def names(self) -> tuple[str, ...]:
        """Class name of each detection."""
        return tuple(self.class_names[index] for index in self.class_id)

    @property
    def xywh(self) -> np.ndarray:
        """(N, 4) float32: left, top, width, height [px], as COCO files hold them."""
        xywh = self.xyxy.copy()
        xywh[:, 2:] -= xywh[:, :2]
        return xywh

    def filter(self, *, score: float | None = None, classes: Iterable[int | str] | None = None) -> Detections:
        """Keep detections of at least this score and of these classes.

        Args:
            score: least score, or None for any.
            classes: class ids or names, or None for all.

        Raises:
            DataError: a class is not among the model's.
        """
        keep = np.ones(len(self), bool)
        if score is not None:
            keep &= self.score >= np.float32(score)
        if classes is not None:
            keep &= np.isin(self.class_id, class_ids(classes, self.class_names))
        return Detections(self.xyxy[keep], self.score[keep], self.class_id[keep], self.class_names, self.image_size)


def class_ids(classes: Iterable[int | str], class_names: tuple[str, ...]) -> np.ndarray:
    """Class ids (K,) int64, ascending and without repeats, of names or ids.

    Raises:
        DataError: one of them is not a class of the model.
    """
    if isinstance(classes, str):
        raise DataError(f"classes: expected a list of names or ids, got the string {classes!r}; write [{classes!r}]")
    index = {name: number for number, name in enumerate(class_names)}
    found = set()
    for item in classes:
        if isinstance(item, str):
            if item not in index:
                shown = ", ".join(class_names[:20]) + (", ..." if len(class_names) > 20 else "")
                raise DataError(f"classes: the model has no class {item!r}; it has {shown}")
            found.add(index[item])
        elif 0 <= item < len(class_names):
            found.add(int(item))
        else:
            raise DataError(f"classes: expected ids 0..{len(class_names) - 1}, got {item}")
    return np.array(sorted(found), np.int64)
