"""Counts and a sliding window of timings of a node."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["Counts", "Sample", "Snapshot", "Statistics"]


@dataclass(frozen=True)
class Sample:
    """Seconds that one image took: from arrival to publication, and in the parts of the model."""

    latency: float
    preprocess: float
    inference: float
    postprocess: float


@dataclass(frozen=True)
class Counts:
    """What became of the images since activation.

    Attributes:
        received: images that arrived in the node.
        processed: answered by a detection message.
        dropped: replaced by a newer image before the model was free.
        rejected: could not be decoded or used.
        failed: the model failed on them.
        lost: lost by the middleware before they reached the node, where it tells.
    """

    received: int = 0
    processed: int = 0
    dropped: int = 0
    rejected: int = 0
    failed: int = 0
    lost: int = 0


@dataclass(frozen=True)
class Snapshot:
    """Statistics at one moment.

    Attributes:
        counts: since activation.
        rate: answers a second over the window [Hz].
        latency: (p50, p95) over the window [s]; zero without samples.
        parts: medians of preprocess, inference and postprocess over the window [s].
        idle: seconds since the last image arrived, None before the first.
    """

    counts: Counts
    rate: float
    latency: tuple[float, float]
    parts: tuple[float, float, float]
    idle: float | None


class Statistics:
    """Thread-safe counters and timings.

    Args:
        clock: steady seconds.
        window: length of the sliding window [s].
    """

    def __init__(self, clock: Callable[[], float], window: float = 5.0) -> None:
        self._clock = clock
        self._window = window
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Start afresh."""
        with self._lock:
            self._counts = dict.fromkeys(Counts.__dataclass_fields__, 0)
            self._samples: deque[tuple[float, Sample]] = deque()
            self._began = self._clock()
            self._arrived: float | None = None

    def count(self, name: str, number: int = 1) -> None:
        """Add to one of the fields of :class:`Counts`."""
        with self._lock:
            self._counts[name] += number
            if name == "received":
                self._arrived = self._clock()

    def add(self, sample: Sample) -> None:
        """Record an answered image."""
        now = self._clock()
        with self._lock:
            self._counts["processed"] += 1
            self._samples.append((now, sample))
            self._forget(now)

    def snapshot(self) -> Snapshot:
        """Statistics of this moment."""
        now = self._clock()
        with self._lock:
            self._forget(now)
            samples = [sample for _, sample in self._samples]
            span = min(self._window, max(now - self._began, 1e-9))
            idle = None if self._arrived is None else now - self._arrived
            counts = Counts(**self._counts)
        if not samples:
            return Snapshot(counts, 0.0, (0.0, 0.0), (0.0, 0.0, 0.0), idle)
        p50, p95 = np.percentile([sample.latency for sample in samples], (50, 95))
        parts = np.median([(s.preprocess, s.inference, s.postprocess) for s in samples], axis=0)
        return Snapshot(
            counts,
            len(samples) / span,
            (float(p50), float(p95)),
            (float(parts[0]), float(parts[1]), float(parts[2])),
            idle,
        )

    def _forget(self, now: float) -> None:
        while self._samples and self._samples[0][0] < now - self._window:
            self._samples.popleft()
