"""From an image message to a published detection message; owned by one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
from carpus.runtime.detections import Detections
from carpus.runtime.detector import Detector
from carpus.runtime.errors import CarpusError, DataError

from carpus_ros.detection_cdr import DetectionEncoder
from carpus_ros.mailbox import Mailbox
from carpus_ros.statistics import Sample, Statistics
from carpus_ros.watch import Reporter

__all__ = ["Frame", "Pipeline", "Settings", "Worker"]


class Frame(NamedTuple):
    """An image message and the steady time at which it arrived [s]."""

    message: Any
    arrived: float


@dataclass(frozen=True)
class Settings:
    """What may change while the node is active; replaced as a whole.

    Attributes:
        score_threshold: least score that is published, 0..1.
        classes: names to look for; empty for all.
        max_detections: most detections in a message.
        iou_threshold: greatest IoU of two detections of one class, 0..1; for bundles with suppression.
    """

    score_threshold: float
    classes: tuple[str, ...]
    max_detections: int
    iou_threshold: float = 0.7

    def apply(self, detector: Detector) -> None:
        """Bring a detector in line.

        Raises:
            DataError: a class is not the detector's, or a threshold is out of range; nothing is changed then.
        """
        before = detector.classes, detector.score_threshold
        detector.classes = self.classes or None
        try:
            detector.score_threshold = self.score_threshold
            if detector.suppresses:
                detector.iou_threshold = self.iou_threshold
        except DataError:
            detector.classes, detector.score_threshold = before
            raise


class Pipeline:
    """Decodes, detects, publishes, measures.

    Args:
        detector: the open model.
        settings: initial settings.
        decode: message to RGB array.
        publish: takes a Detection2DArray, or its bytes.
        show: takes (header, RGB, detections) for the debug image, or is None-like cheap when nobody looks.
        statistics: counters.
        rejections: where unusable images are reported.
        clock: steady seconds, the one that stamped the frames.
    """

    def __init__(
        self,
        detector: Detector,
        settings: Settings,
        *,
        decode: Callable[[Any], np.ndarray],
        publish: Callable[[Any], None],
        show: Callable[[Any, np.ndarray, Detections], None],
        statistics: Statistics,
        rejections: Reporter,
        clock: Callable[[], float],
    ) -> None:
        self.detector = detector
        self.settings = settings
        self._applied: Settings | None = None
        self._decode = decode
        self._publish = publish
        self._show = show
        self._statistics = statistics
        self._rejections = rejections
        self._clock = clock
        self._encode = DetectionEncoder()

    def process(self, frame: Frame) -> None:
        """Answer one image; a bad image or a failing model is counted and reported, never raised."""
        settings = self.settings
        try:
            if settings is not self._applied:
                settings.apply(self.detector)
                self._applied = settings
            image = self._decode(frame.message)
            detections = self.detector(image)
        except (DataError, cv2.error) as error:
            self._statistics.count("rejected")
            self._rejections.throttled("bad image", f"image not used: {error}")
            return
        except CarpusError as error:
            self._statistics.count("failed")
            self._rejections.throttled("model failure", f"no detections for an image: {error}")
            return
        header = frame.message.header
        self._publish(self._encode(header, detections, settings.max_detections))
        self._statistics.add(Sample(self._clock() - frame.arrived, *self.detector.last_timing))
        self._show(header, image, detections)


class Worker:
    """The thread that owns the model: reads the newest frame from a mailbox until stopped.

    Args:
        process: called with each frame, in the worker's thread.
        alive: False once the node's context is shut down, when a publisher may vanish under the worker.
        report: told about exceptions that should not happen.
    """

    def __init__(
        self, process: Callable[[Frame], None], *, alive: Callable[[], bool], report: Callable[[str], object]
    ) -> None:
        self._mailbox: Mailbox[Frame] = Mailbox()
        self._process = process
        self._alive = alive
        self._report = report
        self._thread = threading.Thread(target=self._run, name="carpus-detector", daemon=True)
        self._thread.start()

    def put(self, frame: Frame) -> bool:
        """Offer a frame; True when an older one was dropped for it."""
        return self._mailbox.put(frame)

    def stop(self) -> None:
        """Finish the frame in hand and end the thread."""
        self._mailbox.close()
        self._thread.join()

    def _run(self) -> None:
        while (frame := self._mailbox.take()) is not None:
            try:
                self._process(frame)
                # Frees the image while there is time, not between the next one's arrival and its processing.
                del frame
            except RuntimeError as error:  # rclpy's errors; a publisher is invalid once the context is shut down
                if not self._alive():
                    return
                self._report(f"publishing failed: {error}")
            except Exception as error:  # noqa: BLE001 - a dead worker would leave an active node that answers nothing
                self._report(f"an image was not answered: {type(error).__name__}: {error}")
