"""A mailbox with one slot: the newest item wins."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

__all__ = ["Mailbox"]

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Hands items from one thread to another without ever queueing: an unread item is replaced by a newer one."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._item: T | None = None
        self._closed = False

    def put(self, item: T) -> bool:
        """Leave an item; returns True when it replaced one that nobody had read."""
        with self._condition:
            replaced = self._item is not None
            self._item = item
            self._condition.notify()
            return replaced

    def take(self) -> T | None:
        """Wait for an item and take it; None once the mailbox is closed, what it held is then lost."""
        with self._condition:
            while self._item is None and not self._closed:
                self._condition.wait()
            if self._closed:
                return None
            item, self._item = self._item, None
            return item

    def close(self) -> None:
        """Wake and dismiss the reader."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
