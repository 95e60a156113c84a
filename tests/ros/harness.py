"""Node processes and a client to talk to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rcl_interfaces.msg import Parameter as ParameterMessage
from rcl_interfaces.srv import GetParameters, SetParameters, SetParametersAtomically
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from sensor_msgs.msg import Image

from tests.ros.workspace import child_environment

__all__ = ["Client", "NodeProcess", "image_message", "transitions"]

transitions = {
    "configure": Transition.TRANSITION_CONFIGURE,
    "activate": Transition.TRANSITION_ACTIVATE,
    "deactivate": Transition.TRANSITION_DEACTIVATE,
    "cleanup": Transition.TRANSITION_CLEANUP,
    "unconfigured shutdown": Transition.TRANSITION_UNCONFIGURED_SHUTDOWN,
    "active shutdown": Transition.TRANSITION_ACTIVE_SHUTDOWN,
}


class NodeProcess:
    """A node in a process of its own, its output in a file.

    Args:
        module: module with a ``main``, as for ``python -m``.
        domain: ROS domain.
        log: file for stdout and stderr.
        parameters: ROS parameters.
    """

    def __init__(self, module: str, domain: int, log: Path, parameters: dict[str, Any] | None = None) -> None:
        command = [sys.executable, "-m", module, "--ros-args"]
        for name, value in (parameters or {}).items():
            command += ["-p", f"{name}:={str(value).lower() if isinstance(value, bool) else value}"]
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=child_environment(domain), start_new_session=True
            )

    def text(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace")

    def stop(self, timeout: float = 15.0) -> int:
        """Send SIGINT, wait, return the exit code; a node that hangs is killed and fails the test."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"the node did not stop within {timeout} s; its output:\n{self.text()}") from None


class Client:
    """A node in the test process that publishes, listens and calls services.

    Args:
        domain: ROS domain.
    """

    def __init__(self, domain: int) -> None:
        self.context = rclpy.Context()
        rclpy.init(context=self.context, domain_id=domain)
        self.node = rclpy.create_node(f"client_{os.getpid()}", context=self.context)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)

    def close(self) -> None:
        """Leave the domain."""
        self.executor.shutdown()
        self.node.destroy_node()
        with contextlib.suppress(RuntimeError):
            self.context.shutdown()

    def spin(self, seconds: float) -> None:
        """Handle events for a while."""
        self.wait_for(lambda: False, seconds, fail=False)

    def wait_for(self, condition: Callable[[], Any], timeout: float = 20.0, *, fail: bool = True) -> Any:
        """Handle events until the condition holds; its value."""
        end = time.monotonic() + timeout
        while not (value := condition()):
            left = end - time.monotonic()
            if left <= 0.0:
                if fail:
                    raise AssertionError(f"waited {timeout} s in vain")
                return value
            self.executor.spin_once(timeout_sec=min(left, 0.05))
        return value

    def call(self, service_type: Any, name: str, request: Any, timeout: float = 30.0) -> Any:
        """Call a service and wait for its answer."""
        client = self.node.create_client(service_type, name)
        self.wait_for(client.service_is_ready, timeout)
        future = client.call_async(request)
        self.wait_for(future.done, timeout)
        self.node.destroy_client(client)
        return future.result()

    def transition(self, node: str, name: str) -> bool:
        """Ask a lifecycle node for a transition; whether it succeeded."""
        request = ChangeState.Request(transition=Transition(id=transitions[name]))
        return bool(self.call(ChangeState, f"{node}/change_state", request).success)

    def state(self, node: str) -> str:
        """State of a lifecycle node."""
        return str(self.call(GetState, f"{node}/get_state", GetState.Request()).current_state.label)

    def set_parameters(self, node: str, values: dict[str, Any], *, atomically: bool = False) -> list[tuple[bool, str]]:
        """Set parameters; (successful, reason) for each, or one for all when atomic."""
        messages: list[ParameterMessage] = [
            Parameter(name, Parameter.Type.STRING_ARRAY if value == [] else None, value).to_parameter_msg()
            if value == []
            else Parameter(name, value=value).to_parameter_msg()
            for name, value in values.items()
        ]
        if atomically:
            request = SetParametersAtomically.Request(parameters=messages)
            results = [self.call(SetParametersAtomically, f"{node}/set_parameters_atomically", request).result]
        else:
            results = self.call(
                SetParameters, f"{node}/set_parameters", SetParameters.Request(parameters=messages)
            ).results
        return [(result.successful, result.reason) for result in results]

    def parameter(self, node: str, name: str) -> Any:
        """Value of a parameter."""
        answer = self.call(GetParameters, f"{node}/get_parameters", GetParameters.Request(names=[name]))
        return Parameter.from_parameter_msg(ParameterMessage(name=name, value=answer.values[0])).value

    def listen(self, message_type: Any, topic: str, qos: Any = 10) -> list[Any]:
        """Subscribe; the list that grows with every message."""
        messages: list[Any] = []
        self.node.create_subscription(message_type, topic, messages.append, qos)
        return messages

    def publisher(self, message_type: Any, topic: str, qos: Any = 10, *, readers: int = 1) -> Any:
        """Advertise and wait until somebody reads."""
        publisher = self.node.create_publisher(message_type, topic, qos)
        self.wait_for(lambda: publisher.get_subscription_count() >= readers)
        return publisher


def image_message(rgb: np.ndarray, *, stamp: float = 1.0, frame: str = "camera_optical_frame") -> Image:
    """An rgb8 sensor_msgs/Image of (height, width, 3) uint8 RGB."""
    message = Image(height=rgb.shape[0], width=rgb.shape[1], step=rgb.shape[1] * 3, encoding="rgb8")
    message.header.stamp.sec, message.header.stamp.nanosec = int(stamp), round(stamp % 1 * 1e9)
    message.header.frame_id = frame
    message.data = rgb.tobytes()
    return message
