"""Child processes that never outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Child", "wait_for_any"]

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """A process with its output in a file, in a session of its own, so that Ctrl-C reaches it through its parent only.

    Start children before rclpy makes threads: code runs between fork and exec.

    Args:
        name: for messages.
        command: program and arguments.
        log: file for stdout and stderr.
        environment: additions to this process's environment.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def code(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._process.poll()

    def tail(self, lines: int = 15) -> str:
        """The end of its output."""
        text = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(text[-lines:])

    def interrupt(self) -> None:
        """Ask it to end, as Ctrl-C does."""
        if self.code is None:
            self._process.send_signal(signal.SIGINT)

    def stop(self, patience: float = 10.0) -> int:
        """End it: SIGINT, after ``patience`` seconds SIGTERM, then SIGKILL. Returns its exit code."""
        self.interrupt()
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                return self._process.wait(patience)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, sign)
            patience = 3.0
        return self._process.wait()


def wait_for_any(children: Sequence[Child], seconds: float) -> Child | None:
    """The first child that ends within some seconds, or None."""
    end = time.monotonic() + seconds
    while True:
        for child in children:
            if child.code is not None:
                return child
        if time.monotonic() >= end:
            return None
        time.sleep(0.02)
