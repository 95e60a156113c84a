"""What the recorder keeps: a line a frame, an annotated video, a summary."""

from __future__ import annotations

import json
import os
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
from carpus.runtime.detections import Detections
from carpus.runtime.draw import annotate
from carpus.runtime.errors import CarpusError
from carpus.runtime.video import VideoWriter

__all__ = ["Matcher", "Recording", "rate"]

L = TypeVar("L")
R = TypeVar("R")


class Matcher(Generic[L, R]):
    """Pairs two streams of which both carry the same stamps; what finds no partner within the capacity is forgotten.

    Args:
        capacity: unpaired items kept a stream.
    """

    def __init__(self, capacity: int = 60) -> None:
        self._capacity = capacity
        self._left: OrderedDict[int, L] = OrderedDict()
        self._right: OrderedDict[int, R] = OrderedDict()

    def left(self, stamp: int, item: L) -> tuple[L, R] | None:
        """Add an item of the first stream; the pair it completes."""
        if stamp in self._right:
            return item, self._right.pop(stamp)
        self._keep(self._left, stamp, item)
        return None

    def right(self, stamp: int, item: R) -> tuple[L, R] | None:
        """Add an item of the second stream; the pair it completes."""
        if stamp in self._left:
            return self._left.pop(stamp), item
        self._keep(self._right, stamp, item)
        return None

    def _keep(self, waiting: OrderedDict[int, Any], stamp: int, item: Any) -> None:
        waiting[stamp] = item
        while len(waiting) > self._capacity:
            waiting.popitem(last=False)


def rate(arrivals: list[float]) -> float:
    """Mean rate [Hz] of arrival times [s], 0 for less than two."""
    if len(arrivals) < 2 or arrivals[-1] <= arrivals[0]:
        return 0.0
    return (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])


class Recording:
    """Writes ``detections.jsonl``, ``annotated.mp4`` and ``summary.json`` into a folder.

    Args:
        folder: made when missing; files of an earlier recording are replaced.
        fps: of the video.

    Raises:
        BackendError: PyAV, which writes the video, is not installed.
    """

    def __init__(self, folder: Path, fps: float) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.frames = 0
        self.problem: str | None = None
        self._classes: Counter[str] = Counter()
        self._lines = (folder / "detections.jsonl").open("w", encoding="utf-8")
        self._video: VideoWriter | None = VideoWriter(folder / "annotated.mp4", fps)

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close({})

    def add(self, stamp: int, frame_id: str, image: np.ndarray, detections: Detections) -> None:
        """Keep a frame.

        Args:
            stamp: of the image [ns].
            frame_id: of the image.
            image: (height, width, 3) uint8 RGB.
            detections: found in it.
        """
        names = detections.names
        line = {
            "stamp": stamp / 1e9,
            "frame_id": frame_id,
            "image_size": list(detections.image_size),
            "detections": [
                {"class": name, "score": round(float(score), 4), "xyxy": [round(float(v), 2) for v in box]}
                for name, score, box in zip(names, detections.score, detections.xyxy, strict=True)
            ],
        }
        self._lines.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._classes.update(names)
        self.frames += 1
        if self._video is None:
            return
        try:
            self._video.write(annotate(image, detections))
        except CarpusError as error:  # such as a camera that changes its size: keep what there is, and the lines
            self._video.close()
            self._video, self.problem = None, str(error)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Finish the files.

        Args:
            summary: facts to put into ``summary.json`` besides the recording's own.
        """
        if self._lines.closed:
            return
        self._lines.close()
        if self._video is not None and self.frames:
            self._video.close()
        facts = {**summary, "frames": self.frames, "classes": dict(self._classes.most_common())}
        if self.problem is not None:
            facts["problem"] = self.problem
        partial = self.folder / ".summary.json.partial"
        partial.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(partial, self.folder / "summary.json")
