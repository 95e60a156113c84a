"""Ctrl-C without harm: the step in progress is finished, then training is asked to stop."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType, TracebackType

__all__ = ["InterruptGuard"]

logger = logging.getLogger(__name__)

_SAME_WISH = 1.0  # seconds


class InterruptGuard:
    """While entered, turns SIGINT and SIGTERM into a request; a SIGINT later than a second after it interrupts at once.

    What comes within that second is the same wish: a signal to a whole group, passed on by a parent as well.

    Outside the main thread, where Python cannot take signals, it only carries requests made through `request`.

    Attributes:
        requested: whether a stop was asked for.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, object] = {}
        self._asked = 0.0

    def request(self) -> None:
        """Asks for a stop after the step in progress."""
        self.requested = True

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested:
            if number == signal.SIGINT and now - self._asked > _SAME_WISH:
                raise KeyboardInterrupt
            return
        self.requested, self._asked = True, now
        logger.info("stopping after this step; interrupt again to stop at once and lose it")
