"""Records what the detector saw: detections, annotated video, rates and drops."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from carpus.runtime.errors import DataError
from carpus_msgs.msg import DetectorStats
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.parameter import Parameter
from sensor_msgs.msg import Image
from vision_msgs.msg import Detection2DArray, LabelInfo

from carpus_ros.detection_messages import from_message
from carpus_ros.image_codec import decode_image
from carpus_ros.parameters import ParameterSpec, declare, refusal
from carpus_ros.process import run_node
from carpus_ros.qos import LATCHED, RELIABLE, SENSOR, incompatible_message, subscribe
from carpus_ros.recording import Matcher, Recording, rate
from carpus_ros.statistics import Counts
from carpus_ros.watch import Reporter

__all__ = ["PARAMETERS", "RecorderNode", "main"]

PARAMETERS = (
    ParameterSpec("output", "recording", "Folder for the recording.", changeable="start"),
    ParameterSpec("fps", 10.0, "Frames a second of the video.", least=0.1, greatest=120.0, changeable="start"),
    ParameterSpec(
        "duration",
        0.0,
        "Seconds to record from the first detections on; 0 until the node is stopped.",
        least=0.0,
        greatest=86400.0,
        changeable="start",
    ),
)


class RecorderNode(Node):
    """Pairs images and detections by their stamp and writes them down; see the package's README."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("recorder", **kwargs)
        declare(self, PARAMETERS)
        self.add_on_set_parameters_callback(self._on_parameters)
        self.finished = False
        self._matcher: Matcher[Image, Detection2DArray] = Matcher()
        self._reporter = Reporter(self.get_logger().warning, time.perf_counter)
        self._names: tuple[str, ...] = ()
        self._images: list[float] = []
        self._detections: list[float] = []
        self._delays: list[float] = []
        self._stats: DetectorStats | None = None
        for message_type, topic, callback, profile in (
            (Image, "image", self._on_image, SENSOR),
            (Detection2DArray, "detections", self._on_detections, RELIABLE),
            (LabelInfo, "label_info", self._on_labels, LATCHED),
            (DetectorStats, "detector/stats", self._on_stats, RELIABLE),
        ):
            incompatible = self._incompatible(self.resolve_topic_name(topic))
            subscribe(self, message_type, topic, callback, profile, on_incompatible=incompatible)
        self.create_timer(0.1, self._check_end, clock=Clock(clock_type=ClockType.STEADY_TIME))
        # Last, so that a node that cannot be made leaves no files; callbacks come only once the executor spins.
        self._recording = Recording(Path(self._value("output")).expanduser(), self._value("fps"))

    def close(self) -> None:
        """Finish the recording's files."""
        self._recording.close(self._summary())

    def _value(self, name: str) -> Any:
        return self.get_parameter(name).value

    def _incompatible(self, topic: str) -> Callable[[Any], None]:
        return lambda info: self._reporter.once(
            f"incompatible QoS on {topic}", incompatible_message(topic, info, "publisher")
        )

    def _on_parameters(self, parameters: list[Parameter]) -> SetParametersResult:
        reason = refusal(PARAMETERS, {p.name: p.value for p in parameters}, configured=True)
        return SetParametersResult(successful=reason is None, reason=reason or "")

    def _on_image(self, message: Image) -> None:
        self._images.append(time.perf_counter())
        self._write(self._matcher.left(_stamp(message), message))

    def _on_detections(self, message: Detection2DArray) -> None:
        self._detections.append(time.perf_counter())
        self._delays.append((self.get_clock().now().nanoseconds - _stamp(message)) / 1e9)
        self._write(self._matcher.right(_stamp(message), message))

    def _on_labels(self, message: LabelInfo) -> None:
        self._names = tuple(item.class_name for item in sorted(message.class_map, key=lambda item: item.class_id))

    def _on_stats(self, message: DetectorStats) -> None:
        self._stats = message

    def _write(self, pair: tuple[Image, Detection2DArray] | None) -> None:
        if pair is None:
            return
        image, answer = pair
        try:
            rgb = decode_image(image)
            detections = from_message(answer, self._names, (image.height, image.width))
            self._recording.add(_stamp(image), image.header.frame_id, rgb, detections)
        except DataError as error:
            self._reporter.throttled("frame", f"frame not recorded: {error}")

    def _check_end(self) -> None:
        duration = self._value("duration")
        if duration and self._detections and time.perf_counter() - self._detections[0] >= duration:
            self.finished = True

    def _summary(self) -> dict[str, Any]:
        delays = self._delays or [0.0]
        summary: dict[str, Any] = {
            "images": {"received": len(self._images), "rate_hz": round(rate(self._images), 3)},
            "detections": {"received": len(self._detections), "rate_hz": round(rate(self._detections), 3)},
            "stamp_to_recorder_ms": {
                name: round(float(np.percentile(delays, q)) * 1e3, 3) for name, q in (("p50", 50), ("p95", 95))
            },
        }
        if self._stats is not None:
            stats = self._stats
            summary["detector"] = {
                "backend": stats.backend,
                "model": stats.model,
                **{name: getattr(stats, name) for name in Counts.__dataclass_fields__},
                "rate_hz": round(stats.rate_hz, 3),
                **{
                    f"{name}_ms": round(getattr(stats, name) * 1e3, 3)
                    for name in ("latency_p50", "latency_p95", "preprocess_p50", "inference_p50", "postprocess_p50")
                },
            }
        return summary


def _stamp(message: Any) -> int:
    """Stamp of a message [ns]."""
    return int(message.header.stamp.sec) * 1_000_000_000 + int(message.header.stamp.nanosec)


def main(args: list[str] | None = None) -> None:
    """Run the node until the process is told to stop or the duration is over."""
    run_node(RecorderNode, args)


if __name__ == "__main__":
    main()
