"""Watches for oddities of stamps, clocks and camera information, and reports each kind once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ClockWatch", "Reporter", "StampWatch", "camera_info_problem"]


class Reporter:
    """Says each kind of problem once, and remembers which were seen and how often.

    Args:
        say: where messages go.
        clock: steady seconds.
        period: for :meth:`throttled`, seconds before the same kind is said again.
    """

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float], period: float = 5.0) -> None:
        self._say = say
        self._clock = clock
        self._period = period
        self._seen: dict[str, int] = {}
        self._said: dict[str, float] = {}

    def once(self, kind: str, message: str) -> None:
        """Say it the first time; later ones are only counted."""
        self._seen[kind] = self._seen.get(kind, 0) + 1
        if self._seen[kind] == 1:
            self._say(f"{message} (said once; counted in the diagnostics)")

    def throttled(self, kind: str, message: str) -> None:
        """Say it at most once a period."""
        self._seen[kind] = self._seen.get(kind, 0) + 1
        now = self._clock()
        if kind not in self._said or now - self._said[kind] >= self._period:
            self._said[kind] = now
            self._say(message)

    def reset(self) -> None:
        """Forget everything."""
        self._seen.clear()
        self._said.clear()

    @property
    def seen(self) -> dict[str, int]:
        """How often each kind was reported since the last reset."""
        return dict(self._seen)


class StampWatch:
    """Compares the stamps of successive messages."""

    def __init__(self) -> None:
        self._last: int | None = None

    def check(self, stamp: int) -> tuple[str, str] | None:
        """Look at the next stamp [ns].

        Returns:
            (kind, message) when something is odd, else None.
        """
        last, self._last = self._last, stamp
        if stamp == 0:
            return "zero stamp", "images carry the stamp 0: detections cannot be matched to other data by time"
        if last is not None and stamp < last:
            return (
                "stamp backwards",
                f"image stamp went back by {(last - stamp) / 1e9:.3f} s: a restarted source, a looped recording or "
                "several publishers; detections keep the stamps of their images",
            )
        return None

    def reset(self) -> None:
        """Forget the last stamp."""
        self._last = None


class ClockWatch:
    """Compares the node's clock with a steady one.

    Args:
        tolerance: difference between two looks that counts as a jump [s].
    """

    def __init__(self, tolerance: float = 0.5) -> None:
        self._tolerance = tolerance
        self._last: tuple[float, float] | None = None

    def check(self, now: float, steady: float, *, simulated: bool) -> tuple[str, str] | None:
        """Look at both clocks.

        Args:
            now: the node's clock [s].
            steady: steady clock [s].
            simulated: simulated time may run at any speed and pause, so only going back is a jump.

        Returns:
            (kind, message) when the node's clock jumped since the last look, else None.
        """
        last, self._last = self._last, (now, steady)
        if last is None:
            return None
        moved = now - last[0]
        if simulated:
            jump = moved if moved < 0.0 else 0.0
        else:
            jump = moved - (steady - last[1])
        if jump == 0.0 or (not simulated and abs(jump) < self._tolerance):
            return None
        return "clock jump", f"the clock jumped by {jump:+.3f} s; latencies are measured on a steady clock"


def camera_info_problem(info: Any) -> str | None:
    """Say what is wrong with a sensor_msgs/CameraInfo, or None.

    Args:
        info: anything with the fields of sensor_msgs/CameraInfo; ``k`` is row-major 3x3.
    """
    if info.k[0] == 0.0 or info.k[4] == 0.0:
        return (
            f"camera_info has no calibration (fx = {info.k[0]:g}, fy = {info.k[4]:g}): detections stay in pixels, "
            "what needs rays or metres downstream will not work"
        )
    if info.height == 0 or info.width == 0:
        return f"camera_info states an image of {info.width} x {info.height} pixels"
    return None
