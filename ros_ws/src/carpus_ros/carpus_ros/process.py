"""One node, one process: start, spin, stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import rclpy
from carpus.runtime.errors import CarpusError
from carpus_ros.dds import profile_environment
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.exceptions import ParameterException

__all__ = ["run_node"]


def run_node(make: Callable[[], Any], args: list[str] | None = None) -> None:
    """Make a node and spin it until Ctrl-C, SIGTERM or its own end; then close it.

    Args:
        make: returns a node that has ``close()``, which must be safe after the context is shut down. A node may have
            ``finished``, which ends the process when it becomes true.
        args: command line, ``sys.argv`` when None.

    Raises:
        SystemExit: with code 2 when the node cannot be made with its parameters; the message goes to stderr.
    """
    if threading.current_thread() is threading.main_thread():
        # rclpy's handler ends the spinning; Python's would raise KeyboardInterrupt as well, perhaps while files close.
        signal.signal(signal.SIGINT, lambda number, frame: None)
    os.environ.update(profile_environment())  # read when the first participant is made; a profile of one's own stays
    rclpy.init(args=args)
    try:
        node = make()
    except (CarpusError, ValueError, ParameterException) as error:
        rclpy.try_shutdown()
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    except RuntimeError:
        if rclpy.ok():
            raise
        return  # told to stop while starting
    executor = None
    try:
        executor = SingleThreadedExecutor()
        executor.add_node(node)
        while rclpy.ok() and not getattr(node, "finished", False):
            executor.spin_once(timeout_sec=1.0)
    except (KeyboardInterrupt, ExternalShutdownException):
        pass
    except RuntimeError:
        # What was under way when the signal came, making the executor or a callback, finds no context any more.
        if rclpy.ok():
            raise
    finally:
        node.close()
        if executor is not None:
            executor.shutdown(timeout_sec=0.0)
        node.destroy_node()
        rclpy.try_shutdown()
