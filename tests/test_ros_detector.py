"""The detector node as a process of its own, over real DDS."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ros.workspace import activate
from tests.tiny_detector import coloured_image, write_tiny_bundle

_REASON = activate()
if _REASON is None:
    import cv2
    import numpy as np
    from carpus_msgs.msg import DetectorStats
    from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
    from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
    from rosgraph_msgs.msg import Clock
    from sensor_msgs.msg import CameraInfo, CompressedImage, Image
    from vision_msgs.msg import Detection2DArray, LabelInfo

    from tests.ros.harness import Client, NodeProcess, image_message
else:
    pytest.skip(_REASON, allow_module_level=True)
pytestmark = pytest.mark.ros

DOMAIN = 1 + os.getpid() % 45 * 2  # one for the detector that the tests share, the next for those that start their own
APART = DOMAIN + 1


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.carpus", formats=("onnx",))


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client(DOMAIN)
    yield made
    made.close()


@pytest.fixture
def apart() -> Iterator[Client]:
    made = Client(APART)
    yield made
    made.close()


@pytest.fixture(scope="module")
def detector(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One active detector for the tests that leave it active and with its parameters as they were."""
    log = tmp_path_factory.mktemp("log") / "detector.txt"
    node = NodeProcess(
        "carpus_ros.detector_node",
        DOMAIN,
        log,
        {"bundle": bundle, "backend": "onnxruntime", "autostart": True, "diagnostics_period": 0.2},
    )
    yield node
    assert node.stop() == 0, node.text()


def _answer(client: Client, publisher, found: list, message: Image) -> Detection2DArray:
    """Publish an image until detections with its stamp arrive (a best-effort reader may miss the first ones)."""
    for _ in range(40):
        publisher.publish(message)
        if client.wait_for(lambda: found and found[-1].header.stamp == message.header.stamp, 0.5, fail=False):
            return found[-1]
    raise AssertionError(f"no answer to the image of stamp {message.header.stamp}")


def test_detections_carry_stamp_frame_names_and_source_pixels(detector: NodeProcess, client: Client) -> None:
    found = client.listen(Detection2DArray, "/detections")
    publisher = client.publisher(Image, "/image")
    message = image_message(coloured_image(96, 160), stamp=12.25, frame="head_camera_optical_frame")
    answer = _answer(client, publisher, found, message)
    assert (answer.header.stamp.sec, answer.header.stamp.nanosec) == (12, 250_000_000)
    assert answer.header.frame_id == "head_camera_optical_frame"
    # Three quarters of the picture are coloured, each is four cells of 40 x 24 pixels.
    names = [detection.results[0].hypothesis.class_id for detection in answer.detections]
    assert sorted(names) == ["blue"] * 4 + ["grün"] * 4 + ["red"] * 4
    assert names[0] == "red"  # the most saturated quarter comes first
    for detection in answer.detections:
        assert detection.header == answer.header
        assert (detection.bbox.size_x, detection.bbox.size_y) == pytest.approx((40, 24))
    first = answer.detections[0].bbox.center.position
    assert (first.x, first.y) == pytest.approx((20, 12))
    assert 0.5 <= answer.detections[0].results[0].hypothesis.score <= 1.0


def test_camera_sized_images_pass_through_shared_memory(detector: NodeProcess, client: Client) -> None:
    """640x480 rgb8 is larger than Fast DDS's default segment; with the profile a best-effort reader gets it."""
    found = client.listen(Detection2DArray, "/detections")
    publisher = client.publisher(Image, "/image")
    _answer(client, publisher, found, image_message(coloured_image(480, 640), stamp=20.0))
    before = len(found)
    for number in range(10):
        publisher.publish(image_message(coloured_image(480, 640), stamp=21.0 + number))
        client.wait_for(lambda number=number: found[-1].header.stamp.sec == 21 + number, 2.0, fail=False)
    assert len(found) - before >= 8


def test_labels_are_latched_for_late_subscribers(detector: NodeProcess, client: Client) -> None:
    latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    found = client.listen(LabelInfo, "/label_info", latched)
    client.wait_for(lambda: found)
    assert [(item.class_id, item.class_name) for item in found[0].class_map] == [(0, "red"), (1, "grün"), (2, "blue")]
    assert found[0].threshold == pytest.approx(0.5)


def test_threshold_and_classes_change_while_active(detector: NodeProcess, client: Client) -> None:
    found = client.listen(Detection2DArray, "/detections")
    publisher = client.publisher(Image, "/image")
    assert client.set_parameters("/detector", {"classes": ["blue"], "max_detections": 3}) == [(True, ""), (True, "")]
    answer = _answer(client, publisher, found, image_message(coloured_image(), stamp=2.0))
    assert [detection.results[0].hypothesis.class_id for detection in answer.detections] == ["blue"] * 3
    # The logit of a full colour is 10, of a blue of 170 it is 3.3: a score of 0.97.
    assert client.set_parameters("/detector", {"score_threshold": 0.98}) == [(True, "")]
    answer = _answer(client, publisher, found, image_message(coloured_image(), stamp=3.0))
    assert list(answer.detections) == []
    assert (
        client.set_parameters("/detector", {"classes": [], "max_detections": 100, "score_threshold": 0.5})
        == [(True, "")] * 3
    )
    answer = _answer(client, publisher, found, image_message(coloured_image(), stamp=4.0))
    assert len(answer.detections) == 12


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"bundle": "/other.carpus"}, "bundle: can change only while the node is unconfigured"),
        ({"backend": "openvino"}, "backend: can change only while the node is unconfigured"),
        ({"classes": ["red", "purple"]}, "classes: the model has no class 'purple'; it has red, grün, blue"),
        ({"classes": [1, 2]}, "classes: expected a list of strings"),
        ({"score_threshold": 1.5}, "score_threshold"),
        ({"score_threshold": float("nan")}, "score_threshold"),
        ({"max_detections": 0}, "max_detections"),
        ({"autostart": False}, "autostart"),
    ],
)
def test_parameter_refusals_give_a_reason(
    detector: NodeProcess, client: Client, values: dict[str, object], reason: str
) -> None:
    ((accepted, said),) = client.set_parameters("/detector", values)
    assert not accepted
    assert reason in said


def test_a_set_of_parameters_changes_as_a_whole_or_not_at_all(detector: NodeProcess, client: Client) -> None:
    ((accepted, said),) = client.set_parameters(
        "/detector", {"score_threshold": 0.9, "classes": ["purple"]}, atomically=True
    )
    assert not accepted
    assert "purple" in said
    assert client.parameter("/detector", "score_threshold") == 0.5
    found = client.listen(Detection2DArray, "/detections")
    publisher = client.publisher(Image, "/image")
    answer = _answer(client, publisher, found, image_message(coloured_image(), stamp=5.0))
    assert len(answer.detections) == 12


def test_debug_image_shows_the_boxes(detector: NodeProcess, client: Client) -> None:
    found = client.listen(Detection2DArray, "/detections")
    shown = client.listen(Image, "/detector/debug_image")
    publisher = client.publisher(Image, "/image")
    client.wait_for(lambda: client.node.count_publishers("/detector/debug_image") == 1)
    message = image_message(coloured_image(), stamp=6.0)
    _answer(client, publisher, found, message)
    client.wait_for(lambda: shown)
    picture = np.frombuffer(shown[-1].data, np.uint8).reshape(96, 160, 3)
    assert shown[-1].encoding == "rgb8"
    assert shown[-1].header == message.header
    assert (picture != coloured_image()).any(axis=2).sum() > 100


def _broken(**changes: object) -> Image:
    message = image_message(coloured_image())
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def test_bad_images_are_counted_reported_and_survived(detector: NodeProcess, client: Client) -> None:
    found = client.listen(Detection2DArray, "/detections")
    diagnostics = client.listen(DiagnosticArray, "/diagnostics")
    publisher = client.publisher(Image, "/image")
    _answer(client, publisher, found, image_message(coloured_image(), stamp=7.0))

    def rejected() -> int:
        values = [value.value for value in _values(diagnostics) if value.key == "images rejected"]
        return int(values[-1]) if values else -1

    client.wait_for(lambda: rejected() >= 0)
    before = rejected()
    bad = [_broken(encoding="32FC1"), _broken(data=b"12345"), _broken(height=0), _broken(step=3)]
    # Best effort may lose some; every kind of damage has a test of its own in test_ros_images.
    for _ in range(20):
        for message in bad:
            publisher.publish(message)
            client.spin(0.05)
        if rejected() >= before + 4:
            break
    assert rejected() >= before + 4
    assert any(
        status.level == DiagnosticStatus.WARN and "could not be used" in status.message
        for message in diagnostics
        for status in message.status
    )
    assert "image not used:" in detector.text()
    _answer(client, publisher, found, image_message(coloured_image(), stamp=8.0))


def _values(diagnostics: list) -> list:
    return [value for message in diagnostics for status in message.status for value in status.values]


def test_odd_stamps_and_empty_calibration_are_said_once(detector: NodeProcess, client: Client) -> None:
    found = client.listen(Detection2DArray, "/detections")
    publisher = client.publisher(Image, "/image")
    infos = client.publisher(CameraInfo, "/camera_info")
    for _ in range(3):
        infos.publish(CameraInfo(height=96, width=160))
        for stamp in (100.0, 90.0, 0.0):
            _answer(client, publisher, found, image_message(coloured_image(), stamp=stamp))
    client.wait_for(lambda: "no calibration" in detector.text())
    text = detector.text()
    assert text.count("image stamp went back by") == 1
    assert text.count("images carry the stamp 0") == 1
    assert text.count("camera_info has no calibration (fx = 0, fy = 0)") == 1


def _settled(stats: DetectorStats) -> bool:
    """Whether every image that arrived is accounted for; one in hand is not yet."""
    return stats.received == stats.processed + stats.dropped + stats.rejected + stats.failed > 0


def test_statistics_and_diagnostics_tell_the_same(detector: NodeProcess, client: Client) -> None:
    stats = client.listen(DetectorStats, "/detector/stats")
    diagnostics = client.listen(DiagnosticArray, "/diagnostics")
    publisher = client.publisher(Image, "/image")
    for number in range(10):
        publisher.publish(image_message(coloured_image(), stamp=200.0 + number))
        client.spin(0.1)
    client.wait_for(lambda: len(diagnostics) > 1 and stats and stats[-1].rate_hz > 0 and _settled(stats[-1]))
    last = stats[-1]
    assert (last.backend, last.model) == ("onnxruntime", "tiny/cells")
    assert 0.0 < last.inference_p50 < last.latency_p50 <= last.latency_p95
    keys = {value.key for value in _values(diagnostics)}
    assert {"rate [Hz]", "latency p95 [ms]", "images dropped", "backend", "state"} <= keys
    (status,) = diagnostics[-1].status
    assert status.name == "detector: detector"
    assert {value.key: value.value for value in status.values}["backend"] == "onnxruntime"


def test_lifecycle_from_a_bad_bundle_to_shutdown(apart: Client, bundle: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.carpus"
    shutil.copytree(bundle, damaged)
    with (damaged / "model.onnx").open("ab") as file:
        file.write(b"x")
    node = NodeProcess(
        "carpus_ros.detector_node", APART, tmp_path / "log.txt", {"bundle": damaged, "backend": "onnxruntime"}
    )
    found = apart.listen(Detection2DArray, "/detections")
    try:
        assert apart.state("/detector") == "unconfigured"
        assert not apart.transition("/detector", "configure")
        assert apart.state("/detector") == "unconfigured"
        assert "cannot configure" in node.text()
        assert "model.onnx" in node.text()
        assert apart.set_parameters("/detector", {"bundle": ""}) == [(True, "")]
        assert not apart.transition("/detector", "configure")
        assert "the parameter 'bundle' is empty" in node.text()
        assert apart.set_parameters("/detector", {"bundle": str(bundle), "classes": ["purple"]}) == [(True, "")] * 2
        assert not apart.transition("/detector", "configure")
        assert "no class 'purple'" in node.text()
        assert apart.set_parameters("/detector", {"classes": ["red"]}) == [(True, "")]
        for stamp in (1.0, 2.0):
            assert apart.transition("/detector", "configure")
            assert apart.state("/detector") == "inactive"
            assert apart.transition("/detector", "activate")
            publisher = apart.publisher(Image, "/image")
            answer = _answer(apart, publisher, found, image_message(coloured_image(), stamp=stamp))
            assert len(answer.detections) == 4
            assert apart.transition("/detector", "deactivate")
            assert apart.transition("/detector", "cleanup")
            apart.node.destroy_publisher(publisher)
        assert apart.transition("/detector", "configure")
        assert apart.transition("/detector", "activate")
        assert apart.transition("/detector", "active shutdown")
        assert apart.state("/detector") == "finalized"
    finally:
        assert node.stop() == 0, node.text()


def test_compressed_overload_drops_old_images_and_counts_them(apart: Client, bundle: Path, tmp_path: Path) -> None:
    """A small file that takes long to decode: the detector must answer the newest and count what it skipped."""
    node = NodeProcess(
        "carpus_ros.detector_node",
        APART,
        tmp_path / "log.txt",
        {
            "bundle": bundle,
            "backend": "onnxruntime",
            "autostart": True,
            "image_transport": "compressed",
            "diagnostics_period": 0.2,
        },
    )
    try:
        found = apart.listen(Detection2DArray, "/detections")
        stats = apart.listen(DetectorStats, "/detector/stats")
        publisher = apart.publisher(CompressedImage, "/image/compressed")
        small = CompressedImage(format="png")
        small.data = cv2.imencode(".png", cv2.cvtColor(coloured_image(), cv2.COLOR_RGB2BGR))[1].tobytes()
        small.header.stamp.sec = 1
        assert len(_answer(apart, publisher, found, small).detections) == 12
        large = CompressedImage(format="jpeg")
        large.data = cv2.imencode(".jpg", np.zeros((4000, 6000, 3), np.uint8))[1].tobytes()
        for number in range(30):
            large.header.stamp.sec = 10 + number
            publisher.publish(large)
            apart.spin(0.01)
        apart.wait_for(lambda: stats and stats[-1].dropped > 0)
        apart.wait_for(lambda: found[-1].header.stamp.sec == 39)
        apart.wait_for(lambda: stats[-1].received == stats[-1].processed + stats[-1].dropped)
        answered = [message.header.stamp.sec for message in found]
        assert answered == sorted(answered)
        assert len(answered) < 25
    finally:
        assert node.stop() == 0, node.text()


def test_incompatible_qos_and_a_clock_that_jumps_are_said_once(apart: Client, bundle: Path, tmp_path: Path) -> None:
    node = NodeProcess(
        "carpus_ros.detector_node",
        APART,
        tmp_path / "log.txt",
        {
            "bundle": bundle,
            "backend": "onnxruntime",
            "autostart": True,
            "use_sim_time": True,
            "diagnostics_period": 0.1,
            "qos_overrides./image.subscription.reliability": "reliable",
        },
    )
    try:
        clock = apart.publisher(Clock, "/clock")
        best_effort = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)
        for _ in range(2):
            apart.node.create_publisher(Image, "/image", best_effort)
        apart.wait_for(lambda: "incompatible QoS (RELIABILITY)" in node.text())
        for second in (50, 51, 20, 21, 5, 6):
            for _ in range(3):
                message = Clock()
                message.clock.sec = second
                clock.publish(message)
                apart.spin(0.1)
        apart.wait_for(lambda: "the clock jumped by" in node.text())
        found = apart.listen(Detection2DArray, "/detections")
        publisher = apart.publisher(Image, "/image")
        assert len(_answer(apart, publisher, found, image_message(coloured_image())).detections) == 12
        text = node.text()
        assert text.count("incompatible QoS (RELIABILITY)") == 1
        assert "set qos_overrides./image.subscription.reliability here" in text
        assert text.count("the clock jumped by") == 1
    finally:
        assert node.stop() == 0, node.text()
