"""Messages field by field: detections, labels, camera information, and the definitions that they stand on."""

from __future__ import annotations

import numpy as np
import pytest

from carpus.runtime.detections import Detections
from tests.ros.workspace import activate

_REASON = activate()
if _REASON is None:
    from carpus_ros import detection_cdr
    from carpus_ros.camera_messages import camera_info, pose_message, quaternion_xyzw
    from carpus_ros.detection_cdr import DetectionEncoder
    from carpus_ros.detection_messages import DetectionMessages, from_message, label_info
    from carpus_ros.watch import camera_info_problem
    from rclpy.serialization import deserialize_message, serialize_message
    from sensor_msgs.msg import CameraInfo
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
