"""Ctrl-C without harm: the step in progress is finished, then training is asked to stop."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType

__all__ = ["InterruptGuard"]

logger = logging.getLogger(__name__)


class InterruptGuard:
    """While entered, turns SIGINT and SIGTERM into a request; a second SIGINT interrupts at once.

    Outside the main thread, where Python cannot take signals, it only carries requests made through `request`.

    Attributes:
        requested: whether a stop was asked for.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, object] = {}

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
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        logger.info("stopping after this step; interrupt again to stop at once and lose it")
