"""Drives a lifecycle node from another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import rclpy
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rclpy.executors import SingleThreadedExecutor

__all__ = ["LifecycleClient"]

_TRANSITIONS = {
    "configure": Transition.TRANSITION_CONFIGURE,
    "activate": Transition.TRANSITION_ACTIVATE,
    "deactivate": Transition.TRANSITION_DEACTIVATE,
    "cleanup": Transition.TRANSITION_CLEANUP,
}


class LifecycleClient:
    """Asks one node for transitions, with a context of its own.

    Args:
        node: name of the lifecycle node, with its namespace.
        going_on: asked while waiting; False gives up (the node has died, somebody pressed Ctrl-C).
    """

    def __init__(self, node: str, going_on: Callable[[], bool]) -> None:
        self._name = node
        self._going_on = going_on
        self._context = rclpy.Context()
        # Signals stay with the caller, who ends the processes in order.
        rclpy.init(context=self._context, signal_handler_options=rclpy.SignalHandlerOptions.NO)
        self._node = rclpy.create_node("carpus_graph", context=self._context, start_parameter_services=False)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._node)
        self._client: Any = self._node.create_client(ChangeState, f"{node}/change_state")

    def change(self, transition: str, timeout: float = 60.0) -> bool:
        """Ask for a transition ("configure", "activate", "deactivate", "cleanup"); whether it succeeded.

        Raises:
            TimeoutError: no answer in time.
        """
        end = time.monotonic() + timeout
        self._wait(self._client.service_is_ready, transition, end)
        future = self._client.call_async(ChangeState.Request(transition=Transition(id=_TRANSITIONS[transition])))
        self._wait(future.done, transition, end)
        answer: Any = future.result()
        return bool(answer.success)

    def close(self) -> None:
        """Leave the graph."""
        self._executor.shutdown(timeout_sec=0.0)
        self._node.destroy_node()
        self._context.try_shutdown()

    def _wait(self, condition: Callable[[], bool], transition: str, end: float) -> None:
        while not condition():
            if not self._going_on():
                raise TimeoutError(f"gave up asking {self._name} to {transition}")
            if time.monotonic() > end:
                raise TimeoutError(f"{self._name} did not answer when asked to {transition}")
            self._executor.spin_once(timeout_sec=0.05)
