"""What the detector node costs beside its model, against a plain script around the same model.

    scripts/with_ros.sh .venv/bin/python benchmarks/node_overhead.py [--bundle BUNDLE]

Overhead is the time from the image's arrival in the subscription's callback to the return of the detections'
``publish``, less the model's own time (``session.run`` alone). Preprocessing, postprocessing and making the message
count. The script is what one writes first: cv2.resize, numpy, onnxruntime, one message object a detection, all in the
callback. Both run in processes of their own on the same 640x480 rgb8 images with one inference thread, and are asked in
turn, image by image, so that whatever else the machine does meets both. Exits 1 when the node needs more than 1.3 times
what the script needs.

Without a bundle, a graph of the detectors' contract is used that averages a 320x320 input over cells and finds twelve.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1.3
SIZE = (480, 640)
_LINGER = 1.0  # seconds for the last answer to get through


def run_node(bundle: Path, report: Path, count: int, score: float) -> None:
    """The child with Carpus's node."""
    import rclpy
    from carpus_ros.detector_node import DetectorNode
    from carpus_ros.statistics import Sample, Statistics

    samples: list[Sample] = []

    class Keeping(Statistics):
        def add(self, sample: Sample) -> None:
            samples.append(sample)
            super().add(sample)

    arguments = ["-p", f"bundle:={bundle}", "-p", "backend:=onnxruntime", "-p", "num_threads:=1"]
    arguments += ["-p", f"score_threshold:={score}", "-r", "image:=node/image", "-r", "detections:=node/detections"]
    rclpy.init(args=["--ros-args", *arguments])
    node = DetectorNode()
    node._statistics = Keeping(time.perf_counter)
    node.trigger_configure()
    node.trigger_activate()
    executor = rclpy.executors.SingleThreadedExecutor()
    executor.add_node(node)
    while len(samples) < count:
        executor.spin_once(timeout_sec=0.2)
    report.write_text(json.dumps([(sample.latency, sample.inference) for sample in samples]))
    time.sleep(_LINGER)
    node.close()


def run_script(model: Path, names: list[str], report: Path, count: int, score: float) -> None:
    """The child with the plain script."""
    import onnxruntime
    import rclpy
    from rclpy.qos import QoSProfile, ReliabilityPolicy
    from sensor_msgs.msg import Image
    from vision_msgs.msg import Detection2D, Detection2DArray, ObjectHypothesisWithPose

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    height, width = session.get_inputs()[0].shape[2:]
    rclpy.init()
    node = rclpy.create_node("script")
    publisher = node.create_publisher(Detection2DArray, "script/detections", 5)
    samples: list[tuple[float, float]] = []

    def received(message: Image) -> None:
        arrived = time.perf_counter()
        image = np.frombuffer(message.data, np.uint8).reshape(message.height, message.width, 3)
        resized = cv2.resize(image, (width, height))
        tensor = np.ascontiguousarray((resized.astype(np.float32) / 255.0).transpose(2, 0, 1)[None])
        began = time.perf_counter()
        logits, boxes = session.run(["pred_logits", "pred_boxes"], {"images": tensor})
        inference = time.perf_counter() - began
        scores = 1.0 / (1.0 + np.exp(-logits[0]))
        answer = Detection2DArray(header=message.header)
        for query, class_id in np.argwhere(scores >= score):
            x, y, w, h = boxes[0, query] * (message.width, message.height, message.width, message.height)
            detection = Detection2D(header=message.header)
            detection.bbox.center.position.x = float(x)
            detection.bbox.center.position.y = float(y)
            detection.bbox.size_x = float(w)
            detection.bbox.size_y = float(h)
            hypothesis = ObjectHypothesisWithPose()
            hypothesis.hypothesis.class_id = names[class_id]
            hypothesis.hypothesis.score = float(scores[query, class_id])
            detection.results.append(hypothesis)
            answer.detections.append(detection)
        publisher.publish(answer)
        samples.append((time.perf_counter() - arrived, inference))

    best_effort = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)
    node.create_subscription(Image, "script/image", received, best_effort)
    while len(samples) < count:
        rclpy.spin_once(node, timeout_sec=0.2)
    report.write_text(json.dumps(samples))
    time.sleep(_LINGER)


def ask_in_turn(image: np.ndarray, count: int, children: list[subprocess.Popen[bytes]]) -> int:
    """Publish the image to both in turn until each has answered ``count`` times; detections in an answer."""
    import array

    import rclpy
    from sensor_msgs.msg import Image
    from vision_msgs.msg import Detection2DArray

    rclpy.init()
    node = rclpy.create_node("benchmark")
    answers: dict[str, list[int]] = {"node": [], "script": []}
    publishers = {}
    for name, found in answers.items():
        publishers[name] = node.create_publisher(Image, f"{name}/image", 5)
        node.create_subscription(
            Detection2DArray, f"{name}/detections", lambda m, found=found: found.append(len(m.detections)), 5
        )
    message = Image(height=SIZE[0], width=SIZE[1], step=SIZE[1] * 3, encoding="rgb8")
    message.data = array.array("B", image.tobytes())
    while any(publisher.get_subscription_count() == 0 for publisher in publishers.values()):
        rclpy.spin_once(node, timeout_sec=0.1)
        if any(child.poll() is not None for child in children):
            raise RuntimeError("one of the two ended early")
    time.sleep(1.0)
    while any(len(found) < count for found in answers.values()):
        if any(child.poll() for child in children):
            raise RuntimeError("one of the two failed; its output is above")
        for name, publisher in publishers.items():
            before = len(answers[name])
            if before >= count:
                continue
            message.header.stamp = node.get_clock().now().to_msg()
            publisher.publish(message)
            end = time.monotonic() + 2.0
            while len(answers[name]) == before and time.monotonic() < end:
                rclpy.spin_once(node, timeout_sec=0.1)
            time.sleep(0.01)
    rclpy.shutdown()
    if answers["node"][-1] != answers["script"][-1]:
        print(f"note: the node finds {answers['node'][-1]} objects, the script {answers['script'][-1]}")
    return answers["node"][-1]


def main() -> int:
    """Print the table; 1 when the node is over the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bundle", type=Path, help="a detector's bundle (folder); a small synthetic one when absent")
    parser.add_argument("--image", type=Path, help="picture to send, resized to 640x480")
    parser.add_argument("--images", type=int, default=300, help="images for each (default 300)")
    parser.add_argument("--score", type=float, default=0.5, help="score threshold (default 0.5)")
    parser.add_argument("--domain", type=int, default=78, help="ROS domain (default 78)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        role, job = given.child[0], json.loads(given.child[1])
        if role == "node":
            run_node(Path(job["bundle"]), Path(job["report"]), job["count"], job["score"])
        else:
            run_script(Path(job["model"]), job["names"], Path(job["report"]), job["count"], job["score"])
        return 0
    from carpus_ros.dds import profile_environment

    from carpus.runtime.bundle import Bundle

    sys.path.insert(0, str(ROOT))
    from tests.tiny_detector import coloured_image, tiny_manifest, write_tiny_bundle

    os.environ.update(profile_environment())
    os.environ.update(ROS_DOMAIN_ID=str(given.domain), ROS_AUTOMATIC_DISCOVERY_RANGE="LOCALHOST")
    image = coloured_image(*SIZE)
    if given.image:
        image = cv2.cvtColor(cv2.resize(cv2.imread(str(given.image)), SIZE[::-1]), cv2.COLOR_BGR2RGB)
    with tempfile.TemporaryDirectory() as folder:
        bundle = given.bundle or write_tiny_bundle(
            Path(folder) / "tiny.carpus", formats=("onnx",), manifest=tiny_manifest((320, 320))
        )
        with Bundle.open(bundle) as opened:
            manifest = opened.manifest
        onnx = next(artefact for artefact in manifest.artefacts if artefact.format == "onnx")
        reports = {name: Path(folder) / f"{name}.json" for name in ("node", "script")}
        children = []
        for name, report in reports.items():
            job = {
                "bundle": str(bundle.absolute()),
                "model": str(bundle.absolute() / onnx.files[0].path),
                "names": list(manifest.class_names),
                "report": str(report),
                "count": given.images,
                "score": given.score,
            }
            children.append(subprocess.Popen([sys.executable, __file__, "--child", name, json.dumps(job)]))
        try:
            objects = ask_in_turn(image, given.images, children)
            for child in children:
                child.wait(timeout=30)
        finally:
            for child in children:
                child.kill()
        samples = {name: np.array(json.loads(report.read_text()))[20:] for name, report in reports.items()}
    return _report(samples, f"{manifest.family}/{manifest.variant}, {objects} objects, 640x480 rgb8")


def _report(samples: dict[str, np.ndarray], what: str) -> int:
    print(f"{what}, {len(samples['node'])} images each [ms]")
    print(f"{'':<8} {'total p50':>10} {'model p50':>10} {'overhead p50':>13} {'p95':>8}")
    medians = {}
    for name, rows in samples.items():
        overhead: Any = (rows[:, 0] - rows[:, 1]) * 1e3
        medians[name] = float(np.median(overhead))
        total, model = np.median(rows, axis=0) * 1e3
        print(f"{name:<8} {total:>10.2f} {model:>10.2f} {medians[name]:>13.2f} {np.percentile(overhead, 95):>8.2f}")
    ratio = medians["node"] / medians["script"]
    print(f"node / script: {ratio:.2f} (limit {LIMIT})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
