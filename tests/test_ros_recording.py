"""The recorder without DDS: pairing by stamp, rates, the files that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import pytest

from carpus.runtime.detections import Detections
from carpus.runtime.errors import BackendError
from tests.ros.workspace import activate
from tests.tiny_detector import coloured_image

_REASON = activate()
if _REASON is None:
    from carpus_ros.recording import Matcher, Recording, rate
else:
    pytest.skip(_REASON, allow_module_level=True)
pytestmark = pytest.mark.ros


def test_matcher_pairs_by_stamp_and_forgets() -> None:
    matcher: Matcher[str, str] = Matcher(capacity=2)
    assert matcher.left(1, "image 1") is None
    assert matcher.right(2, "answer 2") is None
    assert matcher.left(2, "image 2") == ("image 2", "answer 2")
    assert matcher.right(1, "answer 1") == ("image 1", "answer 1")
    for stamp in (3, 4, 5):
        matcher.left(stamp, f"image {stamp}")
    assert matcher.right(3, "late") is None
    assert matcher.right(5, "answer 5") == ("image 5", "answer 5")


def test_rate() -> None:
    assert rate([]) == rate([1.0]) == rate([1.0, 1.0]) == 0.0
    assert rate([0.0, 0.1, 0.2, 0.3]) == pytest.approx(10.0)


def test_recording(tmp_path: Path) -> None:
    pytest.importorskip("av")
    with Recording(tmp_path / "out", fps=10.0) as recording:
        for number in range(5):
            found = Detections([[4, 5, 60, 70]], [0.75], [0], ("Schüssel",), (96, 160))
            recording.add(number * 100_000_000, "optical", coloured_image(), found)
        # A camera that changes its size ends the video, not the recording.
        recording.add(500_000_000, "optical", coloured_image(48, 80), Detections.empty(("Schüssel",), (48, 80)))
        recording.close({"images": 7})
    lines = [json.loads(line) for line in (tmp_path / "out" / "detections.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == 6
    assert lines[1] == {
        "stamp": 0.1,
        "frame_id": "optical",
        "image_size": [96, 160],
        "detections": [{"class": "Schüssel", "score": 0.75, "xyxy": [4.0, 5.0, 60.0, 70.0]}],
    }
    summary = json.loads((tmp_path / "out" / "summary.json").read_text("utf-8"))
    assert (summary["images"], summary["frames"], summary["classes"]) == (7, 6, {"Schüssel": 5})
    assert "expected shape" in summary["problem"]
    capture = cv2.VideoCapture(str(tmp_path / "out" / "annotated.mp4"))
    assert capture.get(cv2.CAP_PROP_FRAME_COUNT) == 5
    capture.release()


def test_recording_of_nothing_has_a_summary_and_no_video(tmp_path: Path) -> None:
    pytest.importorskip("av")
    with Recording(tmp_path / "out", fps=10.0):
        pass
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["detections.jsonl", "summary.json"]


def test_recording_without_av_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(BackendError, match="PyAV"):
        Recording(tmp_path / "out", fps=10.0)
