"""What the nodes know about themselves: statistics, reports, clocks, parameters, diagnostics, the DDS profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ros.workspace import activate

_REASON = activate()
if _REASON is None:
    from carpus_ros.dds import profile_environment
    from carpus_ros.detector_parameters import PARAMETERS
    from carpus_ros.diagnostics import detector_status
    from carpus_ros.parameters import as_names, refusal
    from carpus_ros.statistics import Counts, Sample, Snapshot, Statistics
    from carpus_ros.watch import ClockWatch, Reporter, StampWatch
else:
    pytest.skip(_REASON, allow_module_level=True)
pytestmark = pytest.mark.ros


def test_statistics_window_and_rates() -> None:
    now = [100.0]
    statistics = Statistics(lambda: now[0], window=2.0)
    assert statistics.snapshot() == Snapshot(Counts(), 0.0, (0.0, 0.0), (0.0, 0.0, 0.0), None)
    for index in range(40):
        now[0] += 0.1
        statistics.count("received")
        statistics.add(Sample(0.01 * (index % 20 + 1), 0.001, 0.005, 0.002))
    statistics.count("dropped", 3)
    snapshot = statistics.snapshot()
    assert snapshot.counts == Counts(received=40, processed=40, dropped=3)
    assert snapshot.rate == pytest.approx(10.0, rel=0.06)
    assert snapshot.latency == pytest.approx((0.105, 0.19), abs=0.011)
    assert snapshot.parts == pytest.approx((0.001, 0.005, 0.002))
    now[0] += 3.0
    assert statistics.snapshot().rate == 0.0
    assert statistics.snapshot().idle == pytest.approx(3.0)
    statistics.reset()
    assert statistics.snapshot().counts == Counts()


def test_reporter_says_once_or_at_intervals() -> None:
    said: list[str] = []
    now = [0.0]
    reporter = Reporter(said.append, lambda: now[0], period=5.0)
    for _ in range(3):
        reporter.once("a", "first kind")
    assert len(said) == 1
    for moment in (0.0, 4.9, 5.0, 6.0, 10.1):
        now[0] = moment
        reporter.throttled("b", f"second kind at {moment}")
    assert said[1:] == ["second kind at 0.0", "second kind at 5.0", "second kind at 10.1"]
    assert reporter.seen == {"a": 3, "b": 5}
    reporter.reset()
    assert reporter.seen == {}


def test_stamps() -> None:
    watch = StampWatch()
    assert [watch.check(stamp) for stamp in (5, 5, 6)] == [None, None, None]
    kind, message = watch.check(2_000_000_000) or watch.check(1_500_000_000) or ("", "")
    assert (kind, "0.500 s" in message) == ("stamp backwards", True)
    assert watch.check(0) is not None
    watch.reset()
    assert watch.check(1) is None


@pytest.mark.parametrize(
    ("simulated", "looks", "jump"),
    [
        (False, [(10.0, 0.0), (11.0, 1.0), (12.1, 2.0)], None),
        (False, [(10.0, 0.0), (13.0, 1.0)], "+2.000"),
        (False, [(10.0, 0.0), (9.0, 1.0)], "-2.000"),
        (True, [(10.0, 0.0), (10.0, 1.0), (60.0, 2.0)], None),
        (True, [(10.0, 0.0), (3.0, 1.0)], "-7.000"),
    ],
)
def test_clock_jumps(simulated: bool, looks: list[tuple[float, float]], jump: str | None) -> None:
    watch = ClockWatch()
    *before, last = [watch.check(now, steady, simulated=simulated) for now, steady in looks]
    assert before == [None] * len(before)
    assert (last is None) if jump is None else (last is not None and jump in last[1])


@pytest.mark.parametrize(
    ("changes", "configured", "expected"),
    [
        ({"score_threshold": 0.3, "classes": ["mug"]}, True, None),
        ({"bundle": "x"}, False, None),
        ({"bundle": "x"}, True, "bundle: can change only while the node is unconfigured"),
        ({"score_threshold": 0.3, "num_threads": 2}, True, "num_threads: can change only"),
        ({"autostart": True}, False, "autostart: is fixed when the node starts"),
        ({"backend": "cuda"}, False, "backend: expected one of auto, openvino, onnxruntime, got 'cuda'"),
        ({"score_threshold": float("nan")}, False, "score_threshold: expected a finite number"),
        ({"score_threshold": -0.1}, False, "score_threshold: expected 0.0 to 1.0, got -0.1"),
        ({"classes": "mug"}, False, "classes: expected a list of strings, got 'mug'"),
        ({"use_sim_time": True}, True, None),
    ],
)
def test_parameter_sets_are_judged_as_a_whole(
    changes: dict[str, object], configured: bool, expected: str | None
) -> None:
    said = refusal(PARAMETERS, changes, configured=configured)
    assert said == expected if expected is None else expected in str(said)


def test_every_parameter_is_described_with_its_limits() -> None:
    for spec in PARAMETERS:
        descriptor = spec.descriptor()
        assert descriptor.description.endswith(".")
        assert spec.problem(spec.default) is None
        ranges = list(descriptor.floating_point_range) + list(descriptor.integer_range)
        assert len(ranges) == (spec.least is not None)
    assert as_names(["", "mug"]) == ("mug",)
    assert as_names(None) == ()


@pytest.mark.parametrize(
    ("state", "snapshot", "expected"),
    [
        ("inactive", Snapshot(Counts(), 0, (0, 0), (0, 0, 0), None), (b"\x00", "inactive")),
        ("active", Snapshot(Counts(), 0, (0, 0), (0, 0, 0), None), (b"\x01", "no image has arrived yet")),
        ("active", Snapshot(Counts(9, 9), 9.0, (0, 0), (0, 0, 0), 0.1), (b"\x00", "9.0 Hz")),
        ("active", Snapshot(Counts(9, 9), 0.0, (0, 0), (0, 0, 0), 4.2), (b"\x01", "no image for 4.2 s")),
        ("active", Snapshot(Counts(9, 3, dropped=6), 3.0, (0, 0), (0, 0, 0), 0.1), (b"\x01", "more images dropped")),
        ("active", Snapshot(Counts(9, 8, rejected=1), 8.0, (0, 0), (0, 0, 0), 0.1), (b"\x01", "1 images could not be")),
        ("active", Snapshot(Counts(9, 8, failed=1), 8.0, (0, 0), (0, 0, 0), 0.1), (b"\x02", "the model failed on 1")),
        ("active", Snapshot(Counts(2, 2, lost=20), 2.0, (0, 0), (0, 0, 0), 0.1), (b"\x01", "the middleware lost 20")),
    ],
)
def test_diagnostic_levels(state: str, snapshot: Snapshot, expected: tuple[bytes, str]) -> None:
    status = detector_status(
        "detector: detector",
        state=state,
        facts={"bundle": "b"},
        snapshot=snapshot,
        previous=Counts(),
        problems={"x": 2},
    )
    assert status.level == expected[0]
    assert expected[1] in status.message
    assert ("seen: x", "2") in {(value.key, value.value) for value in status.values}


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({}, "FASTDDS_DEFAULT_PROFILES_FILE"),
        ({"ROS_DISTRO": "kilted"}, "FASTDDS_DEFAULT_PROFILES_FILE"),
        ({"ROS_DISTRO": "humble"}, "FASTRTPS_DEFAULT_PROFILES_FILE"),
        ({"FASTRTPS_DEFAULT_PROFILES_FILE": "mine.xml"}, None),
    ],
)
def test_dds_profile_is_found_and_respects_the_users(environment: dict[str, str], variable: str | None) -> None:
    added = profile_environment(environment)
    assert list(added) == ([variable] if variable else [])
    assert all(Path(path).is_file() for path in added.values())
