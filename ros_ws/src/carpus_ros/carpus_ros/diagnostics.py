"""The detector's reports: its line in /diagnostics for people, its statistics for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from carpus_msgs.msg import DetectorStats
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from carpus_ros.statistics import Counts, Snapshot

__all__ = ["detector_status", "diagnostic_array", "stats_message"]

_SILENCE = 2.0  # seconds without an image after which the source counts as silent


def detector_status(
    name: str,
    *,
    state: str,
    facts: Mapping[str, Any],
    snapshot: Snapshot,
    previous: Counts,
    problems: Mapping[str, int],
) -> DiagnosticStatus:
    """Sum up a detector: ERROR when the model fails, WARN when images are bad, absent or mostly dropped.

    Args:
        name: "<node>: detector".
        state: lifecycle state.
        facts: bundle, model, backend and so on, as they should be shown.
        snapshot: statistics now.
        previous: counts of the last report, to judge what happened since.
        problems: kinds of problem seen since activation and how often.
    """
    counts = snapshot.counts
    recent = {field: getattr(counts, field) - getattr(previous, field) for field in Counts.__dataclass_fields__}
    status = DiagnosticStatus(name=name, hardware_id=str(facts.get("bundle", "")))
    status.level, status.message = _judge(state, snapshot, recent)
    values = {
        "state": state,
        **facts,
        "rate [Hz]": f"{snapshot.rate:.2f}",
        "latency p50 [ms]": f"{snapshot.latency[0] * 1e3:.2f}",
        "latency p95 [ms]": f"{snapshot.latency[1] * 1e3:.2f}",
        "preprocess p50 [ms]": f"{snapshot.parts[0] * 1e3:.2f}",
        "inference p50 [ms]": f"{snapshot.parts[1] * 1e3:.2f}",
        "postprocess p50 [ms]": f"{snapshot.parts[2] * 1e3:.2f}",
        **{f"images {field}": getattr(counts, field) for field in Counts.__dataclass_fields__},
        **{f"seen: {kind}": number for kind, number in sorted(problems.items())},
    }
    status.values = [KeyValue(key=key, value=str(value)) for key, value in values.items()]
    return status


def _judge(state: str, snapshot: Snapshot, recent: Mapping[str, int]) -> tuple[bytes, str]:
    if state != "active":
        return DiagnosticStatus.OK, state
    if recent["failed"]:
        return DiagnosticStatus.ERROR, f"the model failed on {recent['failed']} images"
    if recent["rejected"]:
        return DiagnosticStatus.WARN, f"{recent['rejected']} images could not be used"
    if recent["lost"] > recent["received"]:
        return (
            DiagnosticStatus.WARN,
            f"the middleware lost {recent['lost']} images: give it larger buffers (carpus_ros/fastdds_images.xml) or "
            "make the subscription reliable by qos_overrides",
        )
    if snapshot.idle is None:
        return DiagnosticStatus.WARN, "no image has arrived yet"
    if snapshot.idle > _SILENCE:
        return DiagnosticStatus.WARN, f"no image for {snapshot.idle:.1f} s"
    if recent["dropped"] > recent["processed"]:
        return DiagnosticStatus.WARN, "more images dropped than processed: the model is slower than the camera"
    return DiagnosticStatus.OK, f"{snapshot.rate:.1f} Hz"


def diagnostic_array(stamp: Any, statuses: list[DiagnosticStatus]) -> DiagnosticArray:
    """Message for /diagnostics.

    Args:
        stamp: builtin_interfaces/Time.
        statuses: one a component.
    """
    message = DiagnosticArray(status=statuses)
    message.header.stamp = stamp
    return message


def stats_message(snapshot: Snapshot, *, backend: str, model: str) -> DetectorStats:
    """Message for ``~/stats``, its header left empty.

    Args:
        snapshot: statistics now.
        backend: inference backend.
        model: family and variant.
    """
    message = DetectorStats(backend=backend, model=model, rate_hz=snapshot.rate)
    for name in Counts.__dataclass_fields__:
        setattr(message, name, getattr(snapshot.counts, name))
    message.latency_p50, message.latency_p95 = snapshot.latency
    message.preprocess_p50, message.inference_p50, message.postprocess_p50 = snapshot.parts
    return message
