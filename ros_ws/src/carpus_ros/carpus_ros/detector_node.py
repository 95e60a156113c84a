"""The detector: images in, vision_msgs/Detection2DArray out, as a lifecycle node."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from carpus.runtime.detections import Detections
from carpus.runtime.detector import Detector
from carpus.runtime.draw import annotate
from carpus.runtime.errors import CarpusError
from carpus_msgs.msg import DetectorStats
from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from vision_msgs.msg import Detection2DArray, LabelInfo


from carpus_ros.detection_messages import label_info
from carpus_ros.detector_parameters import PARAMETERS
from carpus_ros.diagnostics import detector_status, diagnostic_array, stats_message
from carpus_ros.image_codec import ImageBuffer, decode_compressed, decode_image
from carpus_ros.parameters import as_names, declare, refusal
from carpus_ros.pipeline import Frame, Pipeline, Settings, Worker
from carpus_ros.process import run_node
from carpus_ros.qos import LATCHED, RELIABLE, SENSOR, incompatible_message, overridable, publisher_events, subscribe
from carpus_ros.statistics import Counts, Statistics
from carpus_ros.watch import ClockWatch, Reporter, StampWatch, camera_info_problem

__all__ = ["DetectorNode", "main"]

SUCCESS, FAILURE = TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE
_STEADY = time.perf_counter
_LEAST_YIELD, _MOST_YIELD = 5e-5, 5e-3  # seconds


class DetectorNode(LifecycleNode):
    """Runs a detector bundle on an image topic; see the package's README for topics and parameters.

    The executor's thread only receives: it leaves the newest image in a mailbox. A worker thread owns the model, and
    publishes. Nothing queues; an image that is replaced before the model was free is counted as dropped.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("detector", **kwargs)
        declare(self, PARAMETERS)
        self._stage = "unconfigured"
        self._detector: Detector | None = None
        self._pipeline: Pipeline | None = None
        self._worker: Worker | None = None
        self._outputs: dict[str, Any] = {}
        self._subscriptions_made: list[Any] = []
        self._statistics = Statistics(_STEADY)
        self._reported = Counts()
        self._reporter = Reporter(self.get_logger().warning, _STEADY)
        self._stamps = StampWatch()
        self._clock_watch = ClockWatch()
        self._debug_message, self._debug_buffer = Image(), ImageBuffer()
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", RELIABLE)
        self.add_on_set_parameters_callback(self._check_parameters)
        # Humble has no callback for values that were accepted; there they are taken when they are checked.
        after = getattr(self, "add_post_set_parameters_callback", None)
        self._apply_on_check = after is None
        if after is not None:
            after(self._apply_parameters)
        # A steady clock, so that a stopped or jumping clock cannot silence the diagnostics.
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self.create_timer(float(self._value("diagnostics_period")), self._report, clock=steady)
        if self._value("autostart"):
            self._start_timer = self.create_timer(0.0, self._autostart, clock=steady)

    # Lifecycle

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Load the model and advertise."""
        bundle = str(self._value("bundle"))
        if not bundle:
            self.get_logger().error("cannot configure: the parameter 'bundle' is empty; set it to a bundle's path")
            return FAILURE
        try:
            threads = int(self._value("num_threads"))
            self._detector = Detector.open(
                Path(bundle).expanduser(), str(self._value("backend")), num_threads=threads or None
            )
            settings = self._settings({})
            settings.apply(self._detector)
            self._detector.warm_up()
        except (CarpusError, OSError) as error:
            self.get_logger().error(f"cannot configure: {error}")
            self._release()
            return FAILURE
        self._advertise()
        self._pipeline = Pipeline(
            self._detector,
            settings,
            decode=decode_compressed if self._value("image_transport") == "compressed" else decode_image,
            publish=self._outputs["detections"].publish,
            show=self._show,
            statistics=self._statistics,
            rejections=self._reporter,
            clock=_STEADY,
        )
        self._stage = "inactive"
        manifest = self._detector.manifest
        self.get_logger().info(
            f"loaded {manifest.name} ({manifest.family}/{manifest.variant}, {len(manifest.classes)} classes) "
            f"on {self._detector.backend_name}"
        )
        return SUCCESS

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Enable the publishers, start the worker, subscribe."""
        result = super().on_activate(state)
        if result != SUCCESS or self._pipeline is None:
            return result
        self._statistics.reset()
        self._reporter.reset()
        self._stamps.reset()
        self._reported = Counts()
        self._publish_labels(self._pipeline.settings.score_threshold)
        self._worker = Worker(self._pipeline.process, alive=self.context.ok, report=self.get_logger().error)
        self._subscribe()
        self._stage = "active"
        return SUCCESS

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Unsubscribe and stop the worker; the model stays loaded."""
        self._quiesce()
        self._stage = "inactive"
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free the model and withdraw the topics."""
        self._release()
        return SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free everything, from whatever state."""
        self._release()
        self._stage = "finalized"
        return SUCCESS

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """After a failed transition: back to unconfigured."""
        self.get_logger().error(f"a transition from {state.label} raised an error; the node is unconfigured again")
        self._release()
        return SUCCESS

    def close(self) -> None:
        """Stop the worker and free the model; for the end of the process."""
        self._quiesce()
        if self._detector is not None:
            self._detector.close()
            self._detector = None

    def _autostart(self) -> None:
        self._start_timer.cancel()
        if self.trigger_configure() == SUCCESS:
            self.trigger_activate()
        else:
            self.get_logger().error("autostart: the node stays unconfigured; mend the cause and configure it again")

    def _quiesce(self) -> None:
        for subscription in self._subscriptions_made:
            self.destroy_subscription(subscription)
        self._subscriptions_made.clear()
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _release(self) -> None:
        self._quiesce()
        for publisher in self._outputs.values():
            self.destroy_lifecycle_publisher(publisher)
        self._outputs.clear()
        self._pipeline = None
        if self._detector is not None:
            self._detector.close()
            self._detector = None
        self._stage = "unconfigured"

    # Topics

    def _advertise(self) -> None:
        for name, message_type, topic, profile in (
            ("detections", Detection2DArray, "detections", RELIABLE),
            ("labels", LabelInfo, "label_info", LATCHED),
            ("debug", Image, "~/debug_image", RELIABLE),
            ("stats", DetectorStats, "~/stats", RELIABLE),
        ):
            self._outputs[name] = self.create_lifecycle_publisher(
                message_type,
                topic,
                profile,
                event_callbacks=publisher_events(self._incompatible(topic, "subscription")),
                qos_overriding_options=overridable(),
            )

    def _subscribe(self) -> None:
        base = self.resolve_topic_name("image")
        compressed = self._value("image_transport") == "compressed"
        image_topic = f"{base}/compressed" if compressed else base
        info_topic = f"{base.rpartition('/')[0]}/camera_info"  # beside the image, as image_transport has it
        for message_type, topic, callback in (
            (CompressedImage if compressed else Image, image_topic, self._on_image),
            (CameraInfo, info_topic, self._on_camera_info),
        ):
            self._subscriptions_made.append(
                subscribe(
                    self,
                    message_type,
                    topic,
                    callback,
                    SENSOR,
                    on_incompatible=self._incompatible(topic, "publisher"),
                    on_lost=self._on_lost if callback == self._on_image else None,
                )
            )

    def _incompatible(self, topic: str, other: str) -> Callable[[Any], None]:
        resolved = self.resolve_topic_name(topic)

        def report(info: Any) -> None:
            self._reporter.once(f"incompatible QoS on {resolved}", incompatible_message(resolved, info, other))

        return report

    def _on_image(self, message: Any) -> None:
        arrived = _STEADY()
        worker = self._worker
        if worker is None:
            return
        self._statistics.count("received")
        if worker.put(Frame(message, arrived)):
            self._statistics.count("dropped")
        stamp = message.header.stamp
        odd = self._stamps.check(stamp.sec * 1_000_000_000 + stamp.nanosec)
        if odd is not None:
            self._reporter.once(*odd)
        # Leaves the interpreter to the worker while it prepares the image (the model itself runs without it): otherwise
        # the executor prepares its next wait at the same time, and each holds up the other.
        preparing = self._pipeline.detector.last_timing.preprocess if self._pipeline is not None else 0.0
        time.sleep(min(max(preparing, _LEAST_YIELD), _MOST_YIELD))

    def _on_lost(self, info: Any) -> None:
        self._statistics.count("lost", info.total_count_change)

    def _on_camera_info(self, info: CameraInfo) -> None:
        problem = camera_info_problem(info)
        if problem is not None:
            self._reporter.once("camera_info", problem)

    def _show(self, header: Any, image: np.ndarray, detections: Detections) -> None:
        publisher = self._outputs["debug"]
        if publisher.get_subscription_count() == 0:
            return
        self._debug_message.header = header
        self._debug_buffer.fill(self._debug_message, annotate(image, detections))
        publisher.publish(self._debug_message)

    def _publish_labels(self, threshold: float) -> None:
        if self._detector is None:
            return
        message = label_info(self._detector.class_names, threshold)
        message.header.stamp = self.get_clock().now().to_msg()
        self._outputs["labels"].publish(message)

    # Parameters

    def _value(self, name: str) -> Any:
        return self.get_parameter(name).value

    def _settings(self, changes: dict[str, Any]) -> Settings:
        def value(name: str) -> Any:
            return changes[name] if name in changes else self._value(name)

        return Settings(
            float(value("score_threshold")),
            as_names(value("classes")),
            int(value("max_detections")),
            float(value("iou_threshold")),
        )

    def _check_parameters(self, parameters: list[Parameter]) -> SetParametersResult:
        changes = {parameter.name: parameter.value for parameter in parameters}
        reason = refusal(PARAMETERS, changes, configured=self._detector is not None)
        if reason is None and self._detector is not None:
            known = self._detector.class_names
            unknown = [name for name in as_names(changes.get("classes")) if name not in known]
            if unknown:
                reason = f"classes: the model has no class {unknown[0]!r}; it has {', '.join(known)}"
        if reason is not None:
            return SetParametersResult(successful=False, reason=reason)
        if self._apply_on_check:
            self._apply_parameters(parameters)
        return SetParametersResult(successful=True)

    def _apply_parameters(self, parameters: list[Parameter]) -> None:
        if self._pipeline is None:
            return
        before = self._pipeline.settings
        after = self._settings({parameter.name: parameter.value for parameter in parameters})
        if after != before:
            self._pipeline.settings = after
            if after.score_threshold != before.score_threshold and self._stage == "active":
                self._publish_labels(after.score_threshold)

    # Reports

    def _report(self) -> None:
        now = self.get_clock().now()
        odd = self._clock_watch.check(
            now.nanoseconds / 1e9, _STEADY(), simulated=bool(self.get_parameter("use_sim_time").value)
        )
        if odd is not None:
            self._reporter.once(*odd)
        snapshot = self._statistics.snapshot()
        facts = {"bundle": self._value("bundle")}
        if self._detector is not None:
            manifest = self._detector.manifest
            facts["model"] = f"{manifest.family}/{manifest.variant}"
            facts["backend"] = self._detector.backend_name
        status = detector_status(
            f"{self.get_name()}: detector",
            state=self._stage,
            facts=facts,
            snapshot=snapshot,
            previous=self._reported,
            problems=self._reporter.seen,
        )
        self._reported = replace(snapshot.counts)
        self._diagnostics.publish(diagnostic_array(now.to_msg(), [status]))
        if self._stage != "active" or self._detector is None:
            return
        stats = stats_message(snapshot, backend=self._detector.backend_name, model=facts["model"])
        stats.header.stamp = now.to_msg()
        self._outputs["stats"].publish(stats)


def main(args: list[str] | None = None) -> None:
    """Run the node until the process is told to stop."""
    run_node(DetectorNode, args)


if __name__ == "__main__":
    main()
