"""Detections straight to the bytes of a vision_msgs/Detection2DArray.

rclpy turns a message into bytes field by field through Python objects, 36 zeros of covariance a detection included; for
a dozen detections that costs as much as all postprocessing. The bytes are simple enough to be written directly: plain
CDR (OMG CORBA 3.4, clause 9.3; DDS-XTypes 1.3, encoding version 1), little-endian, every number aligned to its own size
counted from the byte after the four bytes that name the encoding.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from rclpy.serialization import deserialize_message, serialize_message
from std_msgs.msg import Header
from vision_msgs.msg import Detection2DArray

from carpus.runtime.detections import Detections
from carpus_ros.detection_messages import DetectionMessages

__all__ = ["DetectionEncoder"]

_LITTLE_ENDIAN_CDR = b"\x00\x01\x00\x00"
# geometry_msgs/PoseWithCovariance as its message starts out: position 0, orientation (0, 0, 0, 1), covariance 0.
_POSE = struct.pack("<7d36d", 0, 0, 0, 0, 0, 0, 1, *[0.0] * 36)
_NO_ID = struct.pack("<IB", 1, 0)
_SCORE, _BOX = struct.Struct("<d"), struct.Struct("<5d")


class DetectionEncoder:
    """Encodes detections for ``publish``, as bytes where the middleware reads those as it reads its own.

    Whether it does is tried once, when the encoder is made; where the encoding is another, messages are made instead.
    """

    def __init__(self) -> None:
        self._messages = DetectionMessages()
        self._templates: dict[tuple[str, str, int], tuple[bytes, int, int]] = {}
        self.direct = self._agrees()

    def __call__(self, header: Any, detections: Detections, most: int) -> Any:
        """What to give to ``publish``: bytes, or a Detection2DArray that is valid until the next call.

        Args:
            header: std_msgs/Header of the image.
            detections: best first, boxes in pixels of the image.
            most: no more than this many.
        """
        if not self.direct:
            return self._messages.fill(header, detections, most)
        return self._encode(header, detections, most)

    def _encode(self, header: Any, detections: Detections, most: int) -> bytes:
        count = min(len(detections), most)
        stamp = struct.pack("<iI", header.stamp.sec, header.stamp.nanosec)
        out = bytearray(stamp)  # offsets count from the end of the encoding's name, which is put before it at last
        _append_string(out, header.frame_id)
        _align(out, 4)
        out += struct.pack("<I", count)
        names = detections.class_names
        xyxy = detections.xyxy[:count].astype(np.float64)
        centre, size = (xyxy[:, :2] + xyxy[:, 2:]) * 0.5, xyxy[:, 2:] - xyxy[:, :2]
        boxes = np.column_stack((centre, np.zeros(count), size)).tolist()
        scores = detections.score[:count].tolist()
        classes = detections.class_id[:count].tolist()
        for box, score, class_id in zip(boxes, scores, classes, strict=True):
            _align(out, 4)
            template, score_at, box_at = self._template(header.frame_id, names[class_id], len(out) % 8)
            start = len(out)
            out += template
            out[start : start + 8] = stamp
            _SCORE.pack_into(out, start + score_at, score)
            _BOX.pack_into(out, start + box_at, *box)
        return _LITTLE_ENDIAN_CDR + bytes(out)

    def _template(self, frame_id: str, name: str, phase: int) -> tuple[bytes, int, int]:
        """A Detection2D that starts ``phase`` bytes after a multiple of eight; where its score and box are in it."""
        key = (frame_id, name, phase)
        found = self._templates.get(key)
        if found is None:
            if len(self._templates) > 4096:  # a source that gives every image another frame
                self._templates.clear()
            out = bytearray(phase)
            out += bytes(8)  # stamp
            _append_string(out, frame_id)
            _align(out, 4)
            out += struct.pack("<I", 1)  # one hypothesis
            _append_string(out, name)
            _align(out, 8)
            score_at = len(out) - phase
            out += bytes(8) + _POSE
            box_at = len(out) - phase
            out += bytes(40) + _NO_ID
            found = self._templates[key] = (bytes(out[phase:]), score_at, box_at)
        return found

    def _agrees(self) -> bool:
        """Whether the middleware's own bytes are as long and mean the same, for names and frames of all alignments.

        The bytes themselves may differ: what Fast CDR puts between aligned fields is left over in its buffer.
        """
        boxes = np.array([[1, 2, 30, 50], [0.5, 0.25, 7, 9], [3, 4, 5, 6.5]], np.float32)
        for length in range(9):
            header = Header(frame_id="f" * length)
            header.stamp.sec, header.stamp.nanosec = -5 + length, 7 + length
            names = tuple("ü" + "x" * (length + extra) for extra in range(3))
            detections = Detections(boxes, [0.9, 0.8, 0.1], [0, 1, 2], names, (100, 100))
            for count in (0, 1, 3):
                message = self._messages.fill(header, detections, count)
                own, direct = serialize_message(message), self._encode(header, detections, count)
                if len(own) != len(direct) or own[:4] != direct[:4]:
                    return False
                if deserialize_message(direct, Detection2DArray) != message:
                    return False
        return True


def _align(out: bytearray, size: int) -> None:
    out += bytes(-len(out) % size)


def _append_string(out: bytearray, text: str) -> None:
    data = text.encode()
    _align(out, 4)
    out += struct.pack("<I", len(data) + 1) + data + b"\0"
