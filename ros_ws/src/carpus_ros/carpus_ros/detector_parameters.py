"""The detector's parameters."""

from __future__ import annotations

from carpus_ros.parameters import ParameterSpec

__all__ = ["PARAMETERS"]

PARAMETERS = (
    ParameterSpec("bundle", "", "Path of the bundle, a folder or a .zip; ~ is expanded.", changeable="unconfigured"),
    ParameterSpec(
        "backend",
        "auto",
        "Inference backend; auto takes the best that is installed and that the bundle has an artefact for.",
        choices=("auto", "openvino", "onnxruntime"),
        changeable="unconfigured",
    ),
    ParameterSpec(
        "num_threads",
        0,
        "Threads of one inference; 0 leaves it to the backend.",
        least=0,
        greatest=256,
        changeable="unconfigured",
    ),
    ParameterSpec(
        "image_transport",
        "raw",
        "Subscribe image as sensor_msgs/Image, or image/compressed as sensor_msgs/CompressedImage.",
        choices=("raw", "compressed"),
        changeable="unconfigured",
    ),
    ParameterSpec("score_threshold", 0.5, "Least score of a published detection.", least=0.0, greatest=1.0),
    ParameterSpec(
        "iou_threshold",
        0.7,
        "Greatest IoU of two published detections of one class; only for bundles with non-maximum suppression.",
        least=0.0,
        greatest=1.0,
    ),
    ParameterSpec("classes", (), "Names of the classes to publish; empty for all."),
    ParameterSpec("max_detections", 100, "Most detections in one message, best first.", least=1, greatest=1000),
    ParameterSpec(
        "diagnostics_period",
        1.0,
        "Seconds between messages on /diagnostics and ~/stats.",
        least=0.1,
        greatest=60.0,
        changeable="start",
    ),
    ParameterSpec(
        "autostart",
        False,
        "Configure and activate at start, for use without a lifecycle manager.",
        changeable="start",
    ),
)
