"""The detector node as a process of its own, over real DDS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ros.workspace import activate
from tests.tiny_detector import coloured_image, write_tiny_bundle

_REASON = activate()
pytestmark = [pytest.mark.ros, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]
if _REASON is None:
    import cv2
    import numpy as np
    from carpus_msgs.msg import DetectorStats
    from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
    from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
    from sensor_msgs.msg import CameraInfo, CompressedImage, Image
    from vision_msgs.msg import Detection2DArray, LabelInfo

    from tests.ros.harness import Client, NodeProcess, image_message

DOMAIN = 20 + os.getpid() % 60


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.carpus", formats=("onnx",))


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client(DOMAIN)
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
