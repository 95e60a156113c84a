"""From an image message to an answer without DDS: mailbox, pipeline, worker."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from carpus.runtime.detections import Detections
from carpus.runtime.detector import Detector
from carpus.runtime.errors import DataError
from tests.ros.images import image_message, picture
from tests.ros.workspace import activate
from tests.tiny_detector import tiny_manifest, tiny_onnx, write_tiny_bundle

_REASON = activate()
if _REASON is None:
    from carpus_ros.image_codec import decode_image
    from carpus_ros.mailbox import Mailbox
    from carpus_ros.pipeline import Frame, Pipeline, Settings, Worker
    from carpus_ros.statistics import Statistics
    from carpus_ros.watch import Reporter
    from rclpy.serialization import deserialize_message
    from std_msgs.msg import Header
    from vision_msgs.msg import (
        Detection2DArray,
    )
else:
    pytest.skip(_REASON, allow_module_level=True)
pytestmark = pytest.mark.ros


def test_mailbox_keeps_the_newest_and_lets_the_reader_go() -> None:
    mailbox: Mailbox[int] = Mailbox()
    assert [mailbox.put(number) for number in (1, 2, 3)] == [False, True, True]
    assert mailbox.take() == 3
    taken: list[int | None] = []
    reader = threading.Thread(target=lambda: taken.append(mailbox.take()))
    reader.start()
    mailbox.close()
    reader.join(5.0)
    assert taken == [None]


class _Sink:
    """Collects what a pipeline publishes and shows."""

    def __init__(self) -> None:
        self.published: list[int] = []
        self.shown = 0

    def publish(self, message: Detection2DArray | bytes) -> None:
        if isinstance(message, bytes):
            message = deserialize_message(message, Detection2DArray)
        self.published.append(len(message.detections))

    def show(self, header: Header, image: np.ndarray, detections: Detections) -> None:
        self.shown += 1


def _pipeline(detector: Detector, sink: _Sink, said: list[str]) -> tuple[Pipeline, Statistics]:
    statistics = Statistics(time.perf_counter)
    pipeline = Pipeline(
        detector,
        Settings(0.5, (), 100),
        decode=decode_image,
        publish=sink.publish,
        show=sink.show,
        statistics=statistics,
        rejections=Reporter(said.append, time.perf_counter),
        clock=time.perf_counter,
    )
    return pipeline, statistics


def test_pipeline_counts_bad_images_and_a_model_that_answers_nan(tmp_path: Path) -> None:
    model = tiny_onnx(tiny_manifest(), nan=True)
    path = write_tiny_bundle(tmp_path / "nan.carpus", formats=("onnx",), model=model)
    sink, said = _Sink(), []
    with Detector.open(path, "onnxruntime") as detector:
        pipeline, statistics = _pipeline(detector, sink, said)
        good = image_message(np.full((64, 64, 3), 255, np.uint8), "rgb8")
        black = image_message(np.zeros((64, 64, 3), np.uint8), "rgb8")
        wrong = image_message(picture(), "rgb8")
        wrong.encoding = "?"
        for message in (good, black, wrong, good):
            pipeline.process(Frame(message, time.perf_counter()))
        pipeline.settings = Settings(0.5, ("red",), 2)
        pipeline.process(Frame(good, time.perf_counter()))
    counts = statistics.snapshot().counts
    assert (counts.processed, counts.rejected, counts.failed) == (3, 1, 1)
    assert sink.published == [48, 48, 2]
    assert sink.shown == 3
    assert any("NaN" in text for text in said)
    assert any("'?' is not supported" in text for text in said)


def test_settings_are_applied_whole_or_not_at_all(tmp_path: Path) -> None:
    path = write_tiny_bundle(tmp_path / "tiny.carpus", formats=("onnx",))
    with Detector.open(path, "onnxruntime") as detector:
        Settings(0.4, ("red",), 5).apply(detector)
        with pytest.raises(DataError, match=r"0\.\.1"):
            Settings(2.0, ("blue",), 5).apply(detector)
        with pytest.raises(DataError, match="no class 'x'"):
            Settings(0.9, ("x",), 5).apply(detector)
        assert (detector.score_threshold, detector.classes) == (0.4, ("red",))


def test_worker_answers_the_newest_and_outlives_errors() -> None:
    done: list[int] = []
    said: list[str] = []
    gate = threading.Event()

    def process(frame: Frame) -> None:
        gate.wait(5.0)
        if frame.message == 2:
            raise RuntimeError("publisher is gone")
        done.append(frame.message)

    worker = Worker(process, alive=lambda: True, report=said.append)
    worker.put(Frame(1, 0.0))
    end = time.monotonic() + 5.0
    dropped = 0
    while not dropped and time.monotonic() < end:  # until the worker is held up with the first
        dropped = worker.put(Frame(2, 0.0))
    gate.set()
    while not said and time.monotonic() < end:
        time.sleep(0.01)
    worker.put(Frame(3, 0.0))
    while done[-1:] != [3] and time.monotonic() < end:
        time.sleep(0.01)
    worker.stop()
    assert said == ["publishing failed: publisher is gone"]
    assert done[-1] == 3


def test_worker_outlives_an_exception_that_nobody_foresaw() -> None:
    said: list[str] = []
    done = threading.Event()

    def process(frame: Frame) -> None:
        if frame.message == "odd":
            raise LookupError("unforeseen")
        done.set()

    worker = Worker(process, alive=lambda: True, report=said.append)
    worker.put(Frame("odd", 0.0))
    end = time.monotonic() + 20.0
    while not said and time.monotonic() < end:
        time.sleep(0.01)
    worker.put(Frame("even", 0.0))
    assert done.wait(20.0)
    worker.stop()
    assert said == ["an image was not answered: LookupError: unforeseen"]
