"""The simulated robot's graph without ``ros2 launch``: sim_camera -> detector -> recorder, as three processes.

::

    python -m carpus_ros.run_graph --bundle tabletop.carpus --output recording --duration 20
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from carpus_ros.children import Child, wait_for_any
from carpus_ros.dds import profile_environment
from carpus_ros.lifecycle_client import LifecycleClient

__all__ = ["Graph", "main"]


@dataclass(frozen=True)
class Graph:
    """What to run.

    Attributes:
        bundle: the detector's bundle.
        output: folder for the recording and the nodes' logs.
        duration: seconds of recording; 0 until interrupted.
        rate: images a second.
        size: image (height, width) [px].
        seed: of the simulated scene.
        domain: look of the simulated scene.
        robot: simulated robot.
        backend: inference backend.
        num_threads: threads of one inference; 0 leaves it to the backend.
        score_threshold: least score of a detection.
    """

    bundle: Path
    output: Path
    duration: float = 20.0
    rate: float = 10.0
    size: tuple[int, int] = (480, 640)
    seed: int = 0
    domain: str = "heldout"
    robot: str = "gr1t2"
    backend: str = "auto"
    num_threads: int = 0
    score_threshold: float = 0.5

    def commands(self) -> dict[str, list[str]]:
        """Program and arguments of each node."""
        camera = {
            "rate": float(self.rate),
            "height": self.size[0],
            "width": self.size[1],
            "seed": self.seed,
            "domain": self.domain,
            "robot": self.robot,
        }
        detector = {
            "bundle": self.bundle.absolute(),
            "backend": self.backend,
            "num_threads": self.num_threads,
            "score_threshold": float(self.score_threshold),
        }
        recorder = {"output": self.output.absolute(), "fps": float(self.rate), "duration": float(self.duration)}
        return {
            "recorder": _command("recorder_node", recorder, {"image": "image_raw"}),
            "detector": _command("detector_node", detector, {"image": "image_raw"}),
            "sim_camera": _command("sim_camera_node", camera, {}),
        }

    def run(self, stop: threading.Event | None = None) -> int:
        """Run until the recording is complete or ``stop`` is set; nothing is left running.

        Returns:
            0 when the recording is complete, 1 when a node failed, 2 when the output folder cannot be made; what
            failed goes to stderr.
        """
        stop = stop or threading.Event()
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.stderr.write(f"run_graph: cannot use {str(self.output)!r}: {error.strerror}; name another --output\n")
            return 2
        environment = profile_environment()
        children: dict[str, Child] = {}
        client: LifecycleClient | None = None
        try:
            for name, command in self.commands().items():
                children[name] = Child(name, command, self.output / "logs" / f"{name}.txt", environment)
            everyone = list(children.values())
            client = LifecycleClient(
                "/detector", lambda: not stop.is_set() and all(child.code is None for child in everyone)
            )
            try:
                for transition in ("configure", "activate"):
                    if not client.change(transition):
                        return _failed(children["detector"], f"could not {transition}")
            except TimeoutError as error:
                ended = wait_for_any(everyone, 0.0)
                if stop.is_set():
                    return 0
                return _failed(ended or children["detector"], str(error))
            while not stop.is_set():
                ended = wait_for_any(everyone, 0.2)
                if ended is not None and (ended.name != "recorder" or ended.code != 0):
                    return _failed(ended, f"ended with code {ended.code}")
                if ended is not None:
                    break
            return 0
        finally:
            # From the end of the chain to its beginning, so that the recorder closes its files while all is well.
            for child in children.values():
                child.interrupt()
            for child in children.values():
                child.stop()
            if client is not None:
                client.close()


def _command(module: str, parameters: Mapping[str, object], remappings: Mapping[str, str]) -> list[str]:
    command = [sys.executable, "-m", f"carpus_ros.{module}", "--ros-args"]
    for name, value in parameters.items():
        command += ["-p", f"{name}:={value}"]
    for source, target in remappings.items():
        command += ["-r", f"{source}:={target}"]
    return command


def _failed(child: Child, what: str) -> int:
    sys.stderr.write(f"{child.name}: {what}; the end of {child.log}:\n{child.tail()}\n")
    return 1


def main(args: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bundle", type=Path, required=True, help="the detector's bundle, a folder or a .zip")
    parser.add_argument("--output", type=Path, required=True, help="folder for the recording and the nodes' logs")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds to record; 0 until Ctrl-C (default 20)")
    parser.add_argument("--rate", type=float, default=10.0, help="images a second (default 10)")
    parser.add_argument("--width", type=int, default=640, help="image width [px] (default 640)")
    parser.add_argument("--height", type=int, default=480, help="image height [px] (default 480)")
    parser.add_argument("--seed", type=int, default=0, help="decides scene and film (default 0)")
    parser.add_argument("--domain", default="heldout", help="look of the scene: train, heldout, site (default heldout)")
    parser.add_argument("--robot", default="gr1t2", help="gr1t2 or primitive (default gr1t2)")
    parser.add_argument("--backend", default="auto", help="auto, openvino or onnxruntime (default auto)")
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of one inference; 0: backend's choice (default)"
    )
    parser.add_argument("--score", type=float, default=0.5, help="least score of a detection (default 0.5)")
    given = parser.parse_args(args)
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    stop = threading.Event()

    def request_stop(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)
    graph = Graph(
        given.bundle,
        given.output,
        given.duration,
        given.rate,
        (given.height, given.width),
        given.seed,
        given.domain,
        given.robot,
        given.backend,
        given.threads,
        given.score,
    )
    return graph.run(stop)


if __name__ == "__main__":
    raise SystemExit(main())
