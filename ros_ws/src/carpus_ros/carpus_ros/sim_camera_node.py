"""The simulated robot's head camera on the topics of a real one."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from carpus.runtime.detections import Detections
from geometry_msgs.msg import PoseStamped, TransformStamped
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.parameter import Parameter
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from std_msgs.msg import Header
from vision_msgs.msg import Detection2DArray

from carpus_ros.camera_messages import camera_info, pose_message
from carpus_ros.detection_messages import DetectionMessages
from carpus_ros.image_codec import ImageBuffer
from carpus_ros.parameters import ParameterSpec, declare, refusal
from carpus_ros.process import run_node
from carpus_ros.qos import RELIABLE, overridable

try:
    from tf2_msgs.msg import TFMessage
except ImportError:  # ROS 2 from wheels has no tf2
    TFMessage = None

__all__ = ["PARAMETERS", "SimCameraNode", "main"]

PARAMETERS = (
    ParameterSpec("rate", 10.0, "Images a second.", least=0.1, greatest=120.0, changeable="start"),
    ParameterSpec("width", 640, "Image width [px].", least=16, greatest=4096, changeable="start"),
    ParameterSpec("height", 480, "Image height [px].", least=16, greatest=4096, changeable="start"),
    ParameterSpec("seed", 0, "Decides scene and film.", least=0, greatest=2**31 - 1, changeable="start"),
    ParameterSpec("domain", "heldout", "Look of the scene: train, heldout or site.", changeable="start"),
    ParameterSpec("robot", "gr1t2", "Robot in the scene: gr1t2 or primitive.", changeable="start"),
    ParameterSpec("frame_id", "head_camera_optical_frame", "Optical frame of the images.", changeable="start"),
    ParameterSpec("base_frame_id", "base_link", "Frame in which the camera's pose is given.", changeable="start"),
    ParameterSpec("compressed", False, "Publish image_raw/compressed as JPEG, too.", changeable="start"),
    ParameterSpec("jpeg_quality", 90, "Quality of the JPEGs.", least=1, greatest=100),
)


class SimCameraNode(Node):
    """Steps the simulated scene at a fixed rate and publishes what its camera sees; see the package's README."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("sim_camera", **kwargs)
        declare(self, PARAMETERS)
        self.add_on_set_parameters_callback(self._on_parameters)
        # MuJoCo and OpenGL load here, in the thread that will render.
        from carpus.sim.camera import SimCamera
        from carpus.sim.objects import CLASSES

        self._class_names = CLASSES
        self._camera = SimCamera(
            self._value("seed"),
            (self._value("height"), self._value("width")),
            domain=self._value("domain"),
            robot=self._value("robot"),
        )
        self._period = 1.0 / self._value("rate")
        self._image, self._buffer = Image(), ImageBuffer()
        self._truth = DetectionMessages()
        self._images = self._advertise(Image, "image_raw")
        self._infos = self._advertise(CameraInfo, "camera_info")
        self._poses = self._advertise(PoseStamped, "camera_pose")
        self._truths = self._advertise(Detection2DArray, "~/ground_truth")
        self._compressed = (
            self._advertise(CompressedImage, "image_raw/compressed") if self._value("compressed") else None
        )
        self._transforms = None if TFMessage is None else self.create_publisher(TFMessage, "/tf", 100)
        self.create_timer(self._period, self._step, clock=Clock(clock_type=ClockType.STEADY_TIME))
        self.get_logger().info(
            f"{self._value('robot')} in the domain {self._value('domain')}: {self._value('width')} x "
            f"{self._value('height')} at {self._value('rate'):g} Hz"
        )

    def close(self) -> None:
        """Free the renderer."""
        self._camera.close()

    def _advertise(self, message_type: Any, topic: str) -> Any:
        return self.create_publisher(message_type, topic, RELIABLE, qos_overriding_options=overridable())

    def _value(self, name: str) -> Any:
        return self.get_parameter(name).value

    def _on_parameters(self, parameters: list[Parameter]) -> SetParametersResult:
        reason = refusal(PARAMETERS, {p.name: p.value for p in parameters}, configured=True)
        return SetParametersResult(successful=reason is None, reason=reason or "")

    def _step(self) -> None:
        frame = self._camera.step(self._period)
        # The moment at which a real camera would have the picture; rendering takes longer than an exposure.
        header = Header(frame_id=self._value("frame_id"), stamp=self.get_clock().now().to_msg())
        self._image.header = header
        self._buffer.fill(self._image, frame.image)
        self._images.publish(self._image)
        self._infos.publish(camera_info(self._camera.camera_matrix, frame.image.shape[:2], header))
        if self._compressed is not None:
            self._compressed.publish(self._jpeg(header, frame.image))
        self._publish_pose(header, frame.T_base_camera)
        if self._truths.get_subscription_count():
            self._publish_truth(header, frame.image.shape[:2])

    def _jpeg(self, header: Header, rgb: np.ndarray) -> CompressedImage:
        quality = [cv2.IMWRITE_JPEG_QUALITY, self._value("jpeg_quality")]
        _, data = cv2.imencode(".jpg", cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR), quality)
        return CompressedImage(header=header, format="rgb8; jpeg compressed bgr8", data=data.tobytes())

    def _publish_pose(self, header: Header, T_base_camera: np.ndarray) -> None:
        pose = PoseStamped(pose=pose_message(T_base_camera))
        pose.header.stamp = header.stamp
        pose.header.frame_id = self._value("base_frame_id")
        self._poses.publish(pose)
        if self._transforms is not None:
            transform = TransformStamped(header=pose.header, child_frame_id=header.frame_id)
            transform.transform.rotation = pose.pose.orientation
            position = pose.pose.position
            translation = transform.transform.translation
            translation.x, translation.y, translation.z = position.x, position.y, position.z
            self._transforms.publish(TFMessage(transforms=[transform]))

    def _publish_truth(self, header: Header, size: tuple[int, int]) -> None:
        boxes = self._camera.boxes()
        truth = Detections(
            np.array([box.visible for box in boxes], np.float32).reshape(-1, 4),
            np.ones(len(boxes)),
            np.array([box.class_id for box in boxes], np.int64),
            self._class_names,
            size,
        )
        self._truths.publish(self._truth.fill(header, truth, len(boxes)))


def main(args: list[str] | None = None) -> None:
    """Run the node until the process is told to stop."""
    run_node(SimCameraNode, args)


if __name__ == "__main__":
    main()
