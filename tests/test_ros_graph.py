"""Camera, detector and recorder as three processes, driven without ``ros2 launch``; and the pieces that drive them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ros.workspace import activate
from tests.tiny_detector import coloured_image, write_tiny_bundle

_REASON = activate()
if _REASON is None:
    import rclpy
    from carpus_ros import detector_node
    from carpus_ros.children import Child, wait_for_any
    from rclpy.executors import SingleThreadedExecutor
    from rclpy.lifecycle import TransitionCallbackReturn
    from sensor_msgs.msg import CameraInfo, Image
    from vision_msgs.msg import Detection2DArray

    from tests.ros.harness import Client, NodeProcess, image_message
    from tests.ros.workspace import child_environment
else:
    pytest.skip(_REASON, allow_module_level=True)
pytestmark = pytest.mark.ros

DOMAIN = 91 + os.getpid() % 10


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.carpus", formats=("onnx",))


@pytest.fixture(scope="module")
def rendering() -> None:
    """Skips where the simulator cannot render."""
    pytest.importorskip("mujoco")
    code = "from carpus.sim.camera import SimCamera; SimCamera(0, (48, 64), robot='primitive').step(0.1)"
    try:
        tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("the simulator did not render an image within 120 s")
    if tried.returncode:
        pytest.skip(f"the simulator cannot render here: {tried.stderr.strip().splitlines()[-1]}")


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client(DOMAIN)
    yield made
    made.close()


def _graph(bundle: Path, output: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "carpus_ros.run_graph", "--bundle", str(bundle), "--output", str(output)]
    command += ["--backend", "onnxruntime", "--robot", "primitive", "--width", "160", "--height", "120", *options]
    return subprocess.Popen(
        command, env=child_environment(DOMAIN), stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def _nodes(output: Path) -> list[int]:
    """Processes that have files of the output folder open, which every node's log is."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                links = [os.readlink(link) for link in (entry / "fd").iterdir()]
            except OSError:
                continue
            if any(link.startswith(str(output)) for link in links):
                found.append(int(entry.name))
    return found


def test_graph_records_and_ends_by_itself(rendering: None, bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = _graph(bundle, output, "--duration", "3", "--rate", "5", "--score", "0.1")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert _nodes(output) == []
    summary = json.loads((output / "summary.json").read_text("utf-8"))
    assert summary["frames"] >= 2
    assert summary["detections"]["received"] >= summary["frames"]
    assert summary["detector"]["model"] == "tiny/cells"
    lines = [json.loads(line) for line in (output / "detections.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == summary["frames"]
    assert {line["frame_id"] for line in lines} == {"head_camera_optical_frame"}
    assert [line["stamp"] for line in lines] == sorted(line["stamp"] for line in lines)
    assert sum(len(line["detections"]) for line in lines) == sum(summary["classes"].values()) > 0
    assert (output / "annotated.mp4").stat().st_size > 1000


def test_interrupted_graph_keeps_its_recording_and_leaves_no_process(
    rendering: None, bundle: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    process = _graph(bundle, output, "--duration", "0", "--rate", "5")
    _wait_until_up(process, output)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert _nodes(output) == []
    assert json.loads((output / "summary.json").read_text("utf-8"))["frames"] >= 0
    assert not list(output.glob(".*partial*"))


def test_killed_graph_takes_its_nodes_along(rendering: None, bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = _graph(bundle, output, "--duration", "0")
    _wait_until_up(process, output)
    process.kill()
    process.communicate(timeout=30)
    end = time.monotonic() + 30
    while time.monotonic() < end and _nodes(output):
        time.sleep(0.1)
    assert _nodes(output) == []


def _wait_until_up(process: subprocess.Popen[str], output: Path) -> None:
    """Wait for the recorder's file and the detector's word; kill the graph when they do not come."""
    log, lines = output / "logs" / "detector.txt", output / "detections.jsonl"
    end = time.monotonic() + 60
    while not (lines.exists() and log.exists() and "loaded tiny" in log.read_text("utf-8")):
        if time.monotonic() > end or process.poll() is not None:
            process.send_signal(signal.SIGTERM)
            raise AssertionError(process.communicate()[1])
        time.sleep(0.05)


def test_graph_names_the_node_that_failed(tmp_path: Path) -> None:
    process = _graph(tmp_path / "nowhere.carpus", tmp_path / "out", "--duration", "1")
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "detector: could not configure" in errors
    assert "nowhere.carpus" in errors
    assert _nodes(tmp_path / "out") == []


def test_child_is_stopped_even_when_it_ignores_signals(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)"
    code += "; print('up', flush=True); time.sleep(60)"
    child = Child("stubborn", [sys.executable, "-c", code], tmp_path / "log.txt", {"X": "1"})
    end = time.monotonic() + 20
    while "up" not in child.tail() and time.monotonic() < end:
        time.sleep(0.05)
    assert wait_for_any([child], 0.0) is None
    assert child.stop(patience=0.3) == -signal.SIGKILL
    assert wait_for_any([child], 0.0) is child


def test_sim_camera_publishes_images_calibration_and_ground_truth(
    rendering: None, client: Client, tmp_path: Path
) -> None:
    node = NodeProcess(
        "carpus_ros.sim_camera_node",
        DOMAIN,
        tmp_path / "log.txt",
        {"robot": "primitive", "width": 160, "height": 120, "rate": 5.0, "seed": 3},
    )
    try:
        images = client.listen(Image, "/image_raw")
        infos = client.listen(CameraInfo, "/camera_info")
        truths = client.listen(Detection2DArray, "/sim_camera/ground_truth")
        client.wait_for(lambda: len(images) >= 3 and infos and truths, 60.0)
        image, info = images[-1], infos[-1]
        assert (image.height, image.width, image.encoding, len(image.data)) == (120, 160, "rgb8", 120 * 160 * 3)
        assert image.header.frame_id == info.header.frame_id == "head_camera_optical_frame"
        assert info.k[0] == pytest.approx(info.k[4])
        assert (info.k[2], info.k[5]) == pytest.approx((79.5, 59.5))
        assert len({bytes(message.data) for message in images}) > 1
        stamped = {message.header.stamp.sec * 10**9 + message.header.stamp.nanosec for message in images}
        truth = next(message for message in truths if message.detections)
        assert truth.header.stamp.sec * 10**9 + truth.header.stamp.nanosec >= min(stamped)
        assert all(0 <= item.bbox.center.position.x <= 160 for item in truth.detections)
    finally:
        assert node.stop() == 0, node.text()


def test_sim_camera_refuses_what_it_cannot_show(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    node = NodeProcess("carpus_ros.sim_camera_node", DOMAIN, tmp_path / "log.txt", {"domain": "moon"})
    assert node.process.wait(60) == 2
    assert "moon" in node.text()
    assert "Traceback" not in node.text()


def test_debug_image_is_not_drawn_while_nobody_looks(
    client: Client, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    draw = detector_node.annotate
    monkeypatch.setattr(detector_node, "annotate", lambda *given: drawn.append(1) or draw(*given))
    context = rclpy.Context()
    rclpy.init(
        context=context,
        domain_id=DOMAIN,
        args=["--ros-args", "-p", f"bundle:={bundle}", "-p", "backend:=onnxruntime"],
        signal_handler_options=rclpy.SignalHandlerOptions.NO,
    )
    node = detector_node.DetectorNode(context=context)
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)
    try:
        assert node.trigger_configure() == TransitionCallbackReturn.SUCCESS
        assert node.trigger_activate() == TransitionCallbackReturn.SUCCESS
        found = client.listen(Detection2DArray, "/detections")
        publisher = client.node.create_publisher(Image, "/image", 10)

        def answered(stamp: float) -> bool:
            publisher.publish(image_message(coloured_image(), stamp=stamp))
            executor.spin_once(timeout_sec=0.05)
            client.spin(0.05)
            return bool(found) and found[-1].header.stamp.sec == int(stamp)

        client.wait_for(lambda: answered(1.0))
        assert drawn == []
        shown = client.listen(Image, "/detector/debug_image")
        client.wait_for(lambda: client.node.count_publishers("/detector/debug_image") == 1)
        client.wait_for(lambda: answered(2.0) and shown)
        assert drawn
    finally:
        node.close()
        executor.shutdown()
        node.destroy_node()
        context.shutdown()


def test_a_signal_during_a_callback_ends_the_process_quietly(tmp_path: Path) -> None:
    code = """
import os, signal, sys
import rclpy
from carpus_ros.process import run_node
from rclpy.node import Node
from std_msgs.msg import Header

class Busy(Node):
    def __init__(self):
        super().__init__("busy")
        self._out = self.create_publisher(Header, "out", 1)
        self.create_timer(0.01, self._step)

    def _step(self):
        if sys.argv[1] == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
            while rclpy.ok():
                pass
        else:
            raise RuntimeError("a real fault")
        self._out.publish(Header())

    def close(self):
        print("closed")

run_node(Busy)
"""
    for what, returncode in (("signal", 0), ("fault", 1)):
        done = subprocess.run(
            [sys.executable, "-c", code, what],
            capture_output=True,
            text=True,
            timeout=60,
            env=child_environment(DOMAIN),
            check=False,
        )
        assert done.returncode == returncode, done.stderr
        assert "closed" in done.stdout
        assert ("a real fault" in done.stderr) is (what == "fault")
        assert ("Traceback" in done.stderr) is (what == "fault")
