"""The parts of the ROS 2 nodes that need no DDS: image decoding, mailbox, statistics, watches, parameters, messages."""

from __future__ import annotations

import array
import json
import threading
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

from carpus.runtime.detections import Detections
from carpus.runtime.detector import Detector
from carpus.runtime.errors import BackendError, DataError
from tests.ros.workspace import activate
from tests.tiny_detector import coloured_image, tiny_manifest, tiny_onnx, write_tiny_bundle

_REASON = activate()
if _REASON is None:
    from carpus_ros import detection_cdr
    from carpus_ros.camera_messages import camera_info, pose_message, quaternion_xyzw
    from carpus_ros.dds import profile_environment
    from carpus_ros.detection_cdr import DetectionEncoder
    from carpus_ros.detection_messages import DetectionMessages, from_message, label_info
    from carpus_ros.detector_parameters import PARAMETERS
    from carpus_ros.diagnostics import detector_status
    from carpus_ros.image_codec import ImageBuffer, decode_compressed, decode_image, encodings
    from carpus_ros.mailbox import Mailbox
    from carpus_ros.parameters import as_names, refusal
    from carpus_ros.pipeline import Frame, Pipeline, Settings, Worker
    from carpus_ros.recording import Matcher, Recording, rate
    from carpus_ros.statistics import Counts, Sample, Snapshot, Statistics
    from carpus_ros.watch import ClockWatch, Reporter, StampWatch, camera_info_problem
    from rclpy.serialization import deserialize_message, serialize_message
    from sensor_msgs.msg import CameraInfo, CompressedImage, Image
    from std_msgs.msg import Header
    from vision_msgs.msg import (
        BoundingBox2D,
        BoundingBox3D,
        Classification,
        Detection2D,
        Detection2DArray,
        Detection3D,
        LabelInfo,
        ObjectHypothesis,
        ObjectHypothesisWithPose,
        Point2D,
        Pose2D,
        VisionClass,
        VisionInfo,
    )
else:
    pytest.skip(_REASON, allow_module_level=True)
pytestmark = pytest.mark.ros


def _message(pixels: np.ndarray, encoding: str, *, padding: int = 0, big: bool = False) -> Image:
    """An image message of (height, row bytes) uint8 rows, each followed by some padding."""
    rows = np.pad(pixels.reshape(len(pixels), -1).view(np.uint8), ((0, 0), (0, padding)), constant_values=77)
    width = {"mono16": 2, "rgb8": 3, "bgr8": 3, "8UC3": 3, "rgba8": 4, "bgra8": 4, "8UC4": 4}
    per_pixel = width.get(encoding, 2 if "yuv" in encoding or encoding in ("uyvy", "yuyv") else 1)
    message = Image(height=len(pixels), width=(rows.shape[1] - padding) // per_pixel, step=rows.shape[1])
    message.encoding, message.is_bigendian = encoding, int(big)
    message.data = rows.tobytes()
    return message


def _picture(height: int = 12, width: int = 16) -> np.ndarray:
    """Smooth in colour, so that chroma subsampling and demosaicing keep it."""
    y, x = np.mgrid[:height, :width]
    return np.stack((60 + 4 * x, 90 + 5 * y, 150 - 3 * x), axis=-1).astype(np.uint8)


def _encode(rgb: np.ndarray, encoding: str) -> np.ndarray:
    """Rows of bytes of a picture, made without the code under test."""
    alpha = np.full((*rgb.shape[:2], 1), 9, np.uint8)
    if encoding in ("rgb8",):
        return rgb
    if encoding in ("bgr8", "8UC3"):
        return rgb[:, :, ::-1].copy()
    if encoding == "rgba8":
        return np.concatenate((rgb, alpha), axis=2)
    if encoding in ("bgra8", "8UC4"):
        return np.concatenate((rgb[:, :, ::-1], alpha), axis=2)
    if encoding in ("mono8", "8UC1"):
        return rgb[:, :, 0].copy()
    if encoding == "mono16":
        return rgb[:, :, 0].astype("<u2") * 257
    if encoding.startswith("bayer"):
        pattern = encoding[6:10]
        rows = np.empty(rgb.shape[:2], np.uint8)
        for index, colour in enumerate(pattern):
            at = np.s_[index // 2 :: 2, index % 2 :: 2]
            rows[at] = rgb[:, :, "rgb".index(colour)][at]
        return rows
    # ITU-R BT.601, studio range
    r, g, b = (rgb[:, :, channel].astype(np.float64) for channel in range(3))
    luma = 16 + (65.481 * r + 128.553 * g + 24.966 * b) / 255
    blue = 128 + (-37.797 * r - 74.203 * g + 112.0 * b) / 255
    red = 128 + (112.0 * r - 93.786 * g - 18.214 * b) / 255
    chroma = np.empty_like(luma)
    chroma[:, ::2], chroma[:, 1::2] = blue[:, ::2], red[:, ::2]
    order = (chroma, luma) if encoding in ("yuv422", "uyvy") else (luma, chroma)
    return np.stack(order, axis=-1).round().astype(np.uint8)


_ENCODINGS = """
    rgb8 bgr8 8UC3 rgba8 bgra8 8UC4 mono8 8UC1 mono16 yuv422 uyvy yuv422_yuy2 yuyv
    bayer_rggb8 bayer_bggr8 bayer_gbrg8 bayer_grbg8
""".split()  # noqa: SIM905


def test_the_encodings_listed_here_are_those_supported() -> None:
    assert set(_ENCODINGS) == set(encodings())


@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("encoding", _ENCODINGS)
def test_every_encoding_gives_the_same_picture(encoding: str, padding: int) -> None:
    rgb = _picture()
    decoded = decode_image(_message(_encode(rgb, encoding), encoding, padding=padding))
    assert decoded.dtype == np.uint8
    assert decoded.shape == rgb.shape
    wanted = np.repeat(rgb[:, :, :1], 3, axis=2) if encoding in ("mono8", "8UC1", "mono16") else rgb
    tolerance = 6 if encoding[:3] in ("yuv", "uyv", "yuy") else 8 if encoding.startswith("bayer") else 0
    inner = np.s_[2:-2, 2:-2] if encoding.startswith("bayer") else np.s_[:, :]
    error = np.abs(decoded[inner].astype(int) - wanted[inner])
    assert error.max() <= tolerance


def test_rgb8_is_a_view_of_the_message() -> None:
    message = _message(_picture(), "rgb8")
    message.data = array.array("B", message.data)
    assert np.shares_memory(decode_image(message), np.frombuffer(message.data, np.uint8))


def test_big_endian_grey_and_a_last_row_without_padding() -> None:
    rgb = _picture()
    grey = rgb[:, :, 0].astype(">u2") * 257
    assert (decode_image(_message(grey.astype(">u2"), "mono16", big=True))[:, :, 0] == rgb[:, :, 0]).all()
    message = _message(_encode(rgb, "rgb8"), "rgb8", padding=5)
    message.data = bytes(message.data)[:-5]
    assert (decode_image(message) == rgb).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"encoding": "32FC1"}, "image encoding '32FC1' is not supported; expected one of rgb8"),
        ({"encoding": ""}, "image encoding '' is not supported"),
        ({"height": 0}, "image of 16 x 0 pixels: expected at least 1 x 1"),
        ({"width": 0}, "image of 0 x 12 pixels"),
        ({"step": 47}, "image step is 47 bytes: 16 pixels of rgb8 need at least 48"),
        ({"data": b""}, "image data has 0 bytes: 16 x 12 rgb8 with step 48 needs 576"),
        ({"data": bytes(575)}, "image data has 575 bytes"),
        ({"height": 4000000000}, "image data has 576 bytes"),
        ({"encoding": "yuyv", "width": 15}, "yuyv shares colour between pairs, expected even"),
        ({"encoding": "bayer_rggb8", "height": 2}, "bayer_rggb8 needs at least 4 x 4"),
    ],
)
def test_bad_images_say_what_is_wrong(changes: dict[str, object], expected: str) -> None:
    message = _message(_picture(), "rgb8")
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(DataError) as caught:
        decode_image(message)
    assert expected in str(caught.value)


def test_compressed_images() -> None:
    rgb = _picture(32, 48)
    for suffix, tolerance in ((".png", 0), (".jpg", 6)):
        data = cv2.imencode(suffix, cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR))[1].tobytes()
        decoded = decode_compressed(CompressedImage(format=f"rgb8; {suffix[1:]} compressed bgr8", data=data))
        assert np.abs(decoded.astype(int) - rgb).max() <= tolerance
    for format_name, damaged, expected in (
        ("jpeg", b"", "0 bytes do not decode"),
        ("jpeg", b"no image", "8 bytes do not decode"),
        ("16UC1; compressedDepth png", data, "holds depth"),
    ):
        with pytest.raises(DataError, match=expected):
            decode_compressed(CompressedImage(format=format_name, data=damaged))


def test_image_buffer_survives_a_change_of_size() -> None:
    buffer, message = ImageBuffer(), Image()
    for height, width in ((12, 16), (12, 16), (5, 7)):
        rgb = _picture(height, width)
        buffer.fill(message, rgb)
        assert (message.height, message.width, message.step, message.encoding) == (height, width, width * 3, "rgb8")
        assert (decode_image(message) == rgb).all()


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


def test_statistics_window_and_rates() -> None:
    now = [100.0]
    statistics = Statistics(lambda: now[0], window=2.0)
    assert statistics.snapshot() == Snapshot(Counts(), 0.0, (0.0, 0.0), (0.0, 0.0, 0.0), None)
    for index in range(40):
        now[0] += 0.1
        statistics.count("received")
        statistics.add(Sample(0.01 * (index % 20 + 1), 0.001, 0.005, 0.002))
    statistics.count("dropped", 3)
    snapshot = statistics.snapshot()
    assert snapshot.counts == Counts(received=40, processed=40, dropped=3)
    assert snapshot.rate == pytest.approx(10.0, rel=0.06)
    assert snapshot.latency == pytest.approx((0.105, 0.19), abs=0.011)
    assert snapshot.parts == pytest.approx((0.001, 0.005, 0.002))
    now[0] += 3.0
    assert statistics.snapshot().rate == 0.0
    assert statistics.snapshot().idle == pytest.approx(3.0)
    statistics.reset()
    assert statistics.snapshot().counts == Counts()


def test_reporter_says_once_or_at_intervals() -> None:
    said: list[str] = []
    now = [0.0]
    reporter = Reporter(said.append, lambda: now[0], period=5.0)
    for _ in range(3):
        reporter.once("a", "first kind")
    assert len(said) == 1
    for moment in (0.0, 4.9, 5.0, 6.0, 10.1):
        now[0] = moment
        reporter.throttled("b", f"second kind at {moment}")
    assert said[1:] == ["second kind at 0.0", "second kind at 5.0", "second kind at 10.1"]
    assert reporter.seen == {"a": 3, "b": 5}
    reporter.reset()
    assert reporter.seen == {}


def test_stamps() -> None:
    watch = StampWatch()
    assert [watch.check(stamp) for stamp in (5, 5, 6)] == [None, None, None]
    kind, message = watch.check(2_000_000_000) or watch.check(1_500_000_000) or ("", "")
    assert (kind, "0.500 s" in message) == ("stamp backwards", True)
    assert watch.check(0) is not None
    watch.reset()
    assert watch.check(1) is None


@pytest.mark.parametrize(
    ("simulated", "looks", "jump"),
    [
        (False, [(10.0, 0.0), (11.0, 1.0), (12.1, 2.0)], None),
        (False, [(10.0, 0.0), (13.0, 1.0)], "+2.000"),
        (False, [(10.0, 0.0), (9.0, 1.0)], "-2.000"),
        (True, [(10.0, 0.0), (10.0, 1.0), (60.0, 2.0)], None),
        (True, [(10.0, 0.0), (3.0, 1.0)], "-7.000"),
    ],
)
def test_clock_jumps(simulated: bool, looks: list[tuple[float, float]], jump: str | None) -> None:
    watch = ClockWatch()
    *before, last = [watch.check(now, steady, simulated=simulated) for now, steady in looks]
    assert before == [None] * len(before)
    assert (last is None) if jump is None else (last is not None and jump in last[1])


def test_camera_information() -> None:
    header = Header(frame_id="optical")
    matrix = np.array([[500.0, 0, 320], [0, 510, 240], [0, 0, 1]])
    info = camera_info(matrix, (480, 640), header)
    assert camera_info_problem(info) is None
    assert list(info.k) == [500, 0, 319.5, 0, 510, 239.5, 0, 0, 1]
    assert list(info.p) == [500, 0, 319.5, 0, 0, 510, 239.5, 0, 0, 0, 1, 0]
    assert (info.height, info.width, info.distortion_model, info.header.frame_id) == (480, 640, "plumb_bob", "optical")
    assert "no calibration" in str(camera_info_problem(CameraInfo(height=480, width=640)))
    info.height = 0
    assert "640 x 0" in str(camera_info_problem(info))


def test_quaternions_turn_vectors_as_their_matrix_does() -> None:
    rng = np.random.default_rng(3)
    turns = [np.linalg.qr(rng.normal(size=(3, 3)))[0] for _ in range(50)]
    turns = [turn * np.sign(np.linalg.det(turn)) for turn in turns]
    turns += [np.eye(3), np.diag([1.0, -1, -1]), np.diag([-1.0, 1, -1]), np.diag([-1.0, -1, 1])]
    for turn in turns:
        x, y, z, w = quaternion_xyzw(turn)
        assert x * x + y * y + z * z + w * w == pytest.approx(1.0)
        assert w >= 0.0
        axis = np.array([x, y, z])
        for vector in np.eye(3):
            turned = vector + 2 * np.cross(axis, np.cross(axis, vector) + w * vector)
            assert turned == pytest.approx(turn @ vector, abs=1e-12)
    pose = np.eye(4)
    pose[:3, 3] = 1.0, 2.0, 3.0
    message = pose_message(pose)
    assert (message.position.x, message.position.y, message.position.z, message.orientation.w) == (1, 2, 3, 1)


@pytest.mark.parametrize(
    ("changes", "configured", "expected"),
    [
        ({"score_threshold": 0.3, "classes": ["mug"]}, True, None),
        ({"bundle": "x"}, False, None),
        ({"bundle": "x"}, True, "bundle: can change only while the node is unconfigured"),
        ({"score_threshold": 0.3, "num_threads": 2}, True, "num_threads: can change only"),
        ({"autostart": True}, False, "autostart: is fixed when the node starts"),
        ({"backend": "cuda"}, False, "backend: expected one of auto, openvino, onnxruntime, got 'cuda'"),
        ({"score_threshold": float("nan")}, False, "score_threshold: expected a finite number"),
        ({"score_threshold": -0.1}, False, "score_threshold: expected 0.0 to 1.0, got -0.1"),
        ({"classes": "mug"}, False, "classes: expected a list of strings, got 'mug'"),
        ({"use_sim_time": True}, True, None),
    ],
)
def test_parameter_sets_are_judged_as_a_whole(
    changes: dict[str, object], configured: bool, expected: str | None
) -> None:
    said = refusal(PARAMETERS, changes, configured=configured)
    assert said == expected if expected is None else expected in str(said)


def test_every_parameter_is_described_with_its_limits() -> None:
    for spec in PARAMETERS:
        descriptor = spec.descriptor()
        assert descriptor.description.endswith(".")
        assert spec.problem(spec.default) is None
        ranges = list(descriptor.floating_point_range) + list(descriptor.integer_range)
        assert len(ranges) == (spec.least is not None)
    assert as_names(["", "mug"]) == ("mug",)
    assert as_names(None) == ()


def _detections(count: int) -> Detections:
    rng = np.random.default_rng(count)
    corners = rng.uniform(0, 200, (count, 2))
    boxes = np.hstack((corners, corners + rng.uniform(1, 100, (count, 2))))
    scores = np.sort(rng.uniform(0, 1, count))[::-1]
    return Detections(boxes, scores, rng.integers(0, 2, count), ("mug", "Schüssel"), (480, 640))


def test_detection_messages_there_and_back() -> None:
    messages = DetectionMessages()
    for number, count in enumerate((3, 0, 7, 2)):
        header = Header(frame_id=f"frame {number}")
        header.stamp.sec = number
        detections = _detections(count)
        message = messages.fill(header, detections, most=5)
        assert message.header == header
        assert len(message.detections) == min(count, 5)
        assert all(item.header == header for item in message.detections)
        back = from_message(message, ("mug", "Schüssel"), (480, 640))
        assert back.xyxy == pytest.approx(detections.xyxy[:5], abs=1e-4)
        assert back.score == pytest.approx(detections.score[:5])
        assert back.names == detections.names[:5]
    stranger = Detection2DArray(detections=[Detection2D(), Detection2D(results=[ObjectHypothesisWithPose()])])
    stranger.detections[1].results[0].hypothesis.class_id = "new"
    assert from_message(stranger, ("mug",), (10, 10)).class_names == ("mug", "new")


def test_encoded_detections_mean_what_rclpy_sends() -> None:
    encoder, messages = DetectionEncoder(), DetectionMessages()
    assert encoder.direct
    rng = np.random.default_rng(0)
    for count in (0, 1, 2, 7, 30):
        names = tuple("".join(rng.choice(list("aé漢z"), rng.integers(1, 12))) + str(index) for index in range(2))
        detections = _detections(count)
        detections = Detections(detections.xyxy, detections.score, detections.class_id, names, (480, 640))
        header = Header(frame_id="ö" * int(rng.integers(0, 9)))
        header.stamp.sec, header.stamp.nanosec = int(rng.integers(-(2**31), 2**31)), int(rng.integers(0, 10**9))
        for most in (1, 100):
            direct, slow = encoder(header, detections, most), messages.fill(header, detections, most)
            assert len(direct) == len(serialize_message(slow))
            assert deserialize_message(direct, Detection2DArray) == slow


def test_another_encoding_falls_back_to_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection_cdr, "_LITTLE_ENDIAN_CDR", b"\x00\x07\x00\x00")
    encoder = DetectionEncoder()
    assert not encoder.direct
    message = encoder(Header(frame_id="f"), _detections(2), 100)
    assert isinstance(message, Detection2DArray)
    assert len(message.detections) == 2


def test_label_info() -> None:
    message = label_info(("mug", "Schüssel"), 0.25)
    assert [(item.class_id, item.class_name) for item in message.class_map] == [(0, "mug"), (1, "Schüssel")]
    assert message.threshold == 0.25


@pytest.mark.parametrize(
    ("state", "snapshot", "expected"),
    [
        ("inactive", Snapshot(Counts(), 0, (0, 0), (0, 0, 0), None), (b"\x00", "inactive")),
        ("active", Snapshot(Counts(), 0, (0, 0), (0, 0, 0), None), (b"\x01", "no image has arrived yet")),
        ("active", Snapshot(Counts(9, 9), 9.0, (0, 0), (0, 0, 0), 0.1), (b"\x00", "9.0 Hz")),
        ("active", Snapshot(Counts(9, 9), 0.0, (0, 0), (0, 0, 0), 4.2), (b"\x01", "no image for 4.2 s")),
        ("active", Snapshot(Counts(9, 3, dropped=6), 3.0, (0, 0), (0, 0, 0), 0.1), (b"\x01", "more images dropped")),
        ("active", Snapshot(Counts(9, 8, rejected=1), 8.0, (0, 0), (0, 0, 0), 0.1), (b"\x01", "1 images could not be")),
        ("active", Snapshot(Counts(9, 8, failed=1), 8.0, (0, 0), (0, 0, 0), 0.1), (b"\x02", "the model failed on 1")),
        ("active", Snapshot(Counts(2, 2, lost=20), 2.0, (0, 0), (0, 0, 0), 0.1), (b"\x01", "the middleware lost 20")),
    ],
)
def test_diagnostic_levels(state: str, snapshot: Snapshot, expected: tuple[bytes, str]) -> None:
    status = detector_status(
        "detector: detector",
        state=state,
        facts={"bundle": "b"},
        snapshot=snapshot,
        previous=Counts(),
        problems={"x": 2},
    )
    assert status.level == expected[0]
    assert expected[1] in status.message
    assert ("seen: x", "2") in {(value.key, value.value) for value in status.values}


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
        good = _message(np.full((64, 64, 3), 255, np.uint8), "rgb8")
        black = _message(np.zeros((64, 64, 3), np.uint8), "rgb8")
        wrong = _message(_picture(), "rgb8")
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


def test_matcher_pairs_by_stamp_and_forgets() -> None:
    matcher: Matcher[str, str] = Matcher(capacity=2)
    assert matcher.left(1, "image 1") is None
    assert matcher.right(2, "answer 2") is None
    assert matcher.left(2, "image 2") == ("image 2", "answer 2")
    assert matcher.right(1, "answer 1") == ("image 1", "answer 1")
    for stamp in (3, 4, 5):
        matcher.left(stamp, f"image {stamp}")
    assert matcher.right(3, "late") is None
    assert matcher.right(5, "answer 5") == ("image 5", "answer 5")


def test_rate() -> None:
    assert rate([]) == rate([1.0]) == rate([1.0, 1.0]) == 0.0
    assert rate([0.0, 0.1, 0.2, 0.3]) == pytest.approx(10.0)


def test_recording(tmp_path: Path) -> None:
    pytest.importorskip("av")
    with Recording(tmp_path / "out", fps=10.0) as recording:
        for number in range(5):
            found = Detections([[4, 5, 60, 70]], [0.75], [0], ("Schüssel",), (96, 160))
            recording.add(number * 100_000_000, "optical", coloured_image(), found)
        # A camera that changes its size ends the video, not the recording.
        recording.add(500_000_000, "optical", coloured_image(48, 80), Detections.empty(("Schüssel",), (48, 80)))
        recording.close({"images": 7})
    lines = [json.loads(line) for line in (tmp_path / "out" / "detections.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == 6
    assert lines[1] == {
        "stamp": 0.1,
        "frame_id": "optical",
        "image_size": [96, 160],
        "detections": [{"class": "Schüssel", "score": 0.75, "xyxy": [4.0, 5.0, 60.0, 70.0]}],
    }
    summary = json.loads((tmp_path / "out" / "summary.json").read_text("utf-8"))
    assert (summary["images"], summary["frames"], summary["classes"]) == (7, 6, {"Schüssel": 5})
    assert "expected shape" in summary["problem"]
    capture = cv2.VideoCapture(str(tmp_path / "out" / "annotated.mp4"))
    assert capture.get(cv2.CAP_PROP_FRAME_COUNT) == 5
    capture.release()


def test_recording_of_nothing_has_a_summary_and_no_video(tmp_path: Path) -> None:
    pytest.importorskip("av")
    with Recording(tmp_path / "out", fps=10.0):
        pass
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["detections.jsonl", "summary.json"]


def test_recording_without_av_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(BackendError, match="PyAV"):
        Recording(tmp_path / "out", fps=10.0)


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({}, "FASTDDS_DEFAULT_PROFILES_FILE"),
        ({"ROS_DISTRO": "kilted"}, "FASTDDS_DEFAULT_PROFILES_FILE"),
        ({"ROS_DISTRO": "humble"}, "FASTRTPS_DEFAULT_PROFILES_FILE"),
        ({"FASTRTPS_DEFAULT_PROFILES_FILE": "mine.xml"}, None),
    ],
)
def test_dds_profile_is_found_and_respects_the_users(environment: dict[str, str], variable: str | None) -> None:
    added = profile_environment(environment)
    assert list(added) == ([variable] if variable else [])
    assert all(Path(path).is_file() for path in added.values())


def test_vision_msgs_are_field_exact() -> None:
    header, pose = "std_msgs/Header", "geometry_msgs/PoseWithCovariance"
    expected = {
        "BoundingBox2D": {"center": "vision_msgs/Pose2D", "size_x": "double", "size_y": "double"},
        "BoundingBox3D": {"center": "geometry_msgs/Pose", "size": "geometry_msgs/Vector3"},
        "Classification": {"header": header, "results": "sequence<vision_msgs/ObjectHypothesis>"},
        "Detection2D": {
            "header": header,
            "results": "sequence<vision_msgs/ObjectHypothesisWithPose>",
            "bbox": "vision_msgs/BoundingBox2D",
            "id": "string",
        },
        "Detection2DArray": {"header": header, "detections": "sequence<vision_msgs/Detection2D>"},
        "Detection3D": {
            "header": header,
            "results": "sequence<vision_msgs/ObjectHypothesisWithPose>",
            "bbox": "vision_msgs/BoundingBox3D",
            "id": "string",
        },
        "LabelInfo": {"header": header, "class_map": "sequence<vision_msgs/VisionClass>", "threshold": "float"},
        "ObjectHypothesis": {"class_id": "string", "score": "double"},
        "ObjectHypothesisWithPose": {"hypothesis": "vision_msgs/ObjectHypothesis", "pose": pose},
        "Point2D": {"x": "double", "y": "double"},
        "Pose2D": {"position": "vision_msgs/Point2D", "theta": "double"},
        "VisionClass": {"class_id": "uint16", "class_name": "string"},
        "VisionInfo": {
            "header": header,
            "method": "string",
            "database_location": "string",
            "database_version": "int32",
        },
    }
    types = (
        BoundingBox2D,
        BoundingBox3D,
        Classification,
        Detection2D,
        Detection2DArray,
        Detection3D,
        LabelInfo,
        ObjectHypothesis,
        ObjectHypothesisWithPose,
        Point2D,
        Pose2D,
        VisionClass,
        VisionInfo,
    )
    assert {item.__name__: dict(item.get_fields_and_field_types()) for item in types} == expected
