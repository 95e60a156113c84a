"""Detections to vision_msgs, with as little object making as Python allows."""

from __future__ import annotations

from typing import Any

import numpy as np
from carpus.runtime.detections import Detections
from vision_msgs.msg import Detection2D, Detection2DArray, LabelInfo, ObjectHypothesisWithPose, VisionClass

__all__ = ["DetectionMessages", "from_message", "label_info"]


class DetectionMessages:
    """Fills one Detection2DArray again and again from a pool of Detection2D.

    Making a Detection2D costs about ten times as much as filling it. The array that :meth:`fill` returns is valid until
    the next call, which is enough to publish it.
    """

    def __init__(self) -> None:
        self._array = Detection2DArray()
        self._pool: list[Detection2D] = []

    def fill(self, header: Any, detections: Detections, most: int) -> Detection2DArray:
        """Message of the best detections.

        Args:
            header: std_msgs/Header of the image.
            detections: best first, boxes in pixels of the image.
            most: no more than this many.
        """
        count = min(len(detections), most)
        while len(self._pool) < count:
            self._pool.append(Detection2D(results=[ObjectHypothesisWithPose()]))
        names = detections.class_names
        boxes = detections.xyxy[:count].tolist()
        scores = detections.score[:count].tolist()
        classes = detections.class_id[:count].tolist()
        messages = self._pool[:count]
        for message, (left, top, right, bottom), score, class_id in zip(messages, boxes, scores, classes, strict=True):
            message.header = header
            box = message.bbox
            position = box.center.position
            position.x = 0.5 * (left + right)
            position.y = 0.5 * (top + bottom)
            box.size_x = right - left
            box.size_y = bottom - top
            hypothesis = message.results[0].hypothesis
            hypothesis.class_id = names[class_id]
            hypothesis.score = score
        self._array.header = header
        self._array.detections = messages
        return self._array


def label_info(class_names: tuple[str, ...], threshold: float) -> LabelInfo:
    """What the class names are, for a latched topic.

    Args:
        class_names: by class id.
        threshold: least score that is published.
    """
    message = LabelInfo(threshold=float(threshold))
    message.class_map = [VisionClass(class_id=number, class_name=name) for number, name in enumerate(class_names)]
    return message


def from_message(message: Detection2DArray, class_names: tuple[str, ...], image_size: tuple[int, int]) -> Detections:
    """The inverse of :meth:`DetectionMessages.fill`, for upright boxes; the best hypothesis of each detection counts.

    Args:
        message: detections of one image.
        class_names: names by class id; names that are not among them are appended.
        image_size: (height, width) of the image [px].
    """
    names = list(class_names)
    index = {name: number for number, name in enumerate(names)}
    rows: list[tuple[float, float, float, float]] = []
    scores: list[float] = []
    classes: list[int] = []
    for detection in message.detections:
        if not detection.results:
            continue
        best = max((result.hypothesis for result in detection.results), key=lambda hypothesis: hypothesis.score)
        if best.class_id not in index:
            index[best.class_id] = len(names)
            names.append(best.class_id)
        box, centre = detection.bbox, detection.bbox.center.position
        half_x, half_y = 0.5 * box.size_x, 0.5 * box.size_y
        rows.append((centre.x - half_x, centre.y - half_y, centre.x + half_x, centre.y + half_y))
        scores.append(best.score)
        classes.append(index[best.class_id])
    return Detections(
        np.array(rows, np.float32), np.array(scores), np.array(classes, np.int64), tuple(names), image_size
    )
