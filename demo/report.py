"""The page that `make demo` ends with: one file with pictures and video inside, so that it can be passed on."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages import Layout, Stage

__all__ = ["write_report"]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --accent: #0a7d55; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; } thead th { background: var(--soft); }
.big { font-size: 2.4rem; font-weight: 600; color: var(--accent); }
.frames { display: grid; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); gap: .6rem; }
img, video { width: 100%; border-radius: .4rem; } code { font-size: .9em; } .note { opacity: .75; }
"""
_CLASSES_SHOWN = 12
_ERRORS = ("max_box_px", "max_score")


def write_report(layout: Layout, stages: Sequence[Stage], seconds: Mapping[str, float]) -> None:
    """Write the page from what the stages left.

    Args:
        layout: where they left it.
        stages: the stages, in order.
        seconds: how long each took when it last ran [s].
    """
    out = layout.out
    before = _read(out / "before.json")["metrics"]
    after = {name: _read(out / f"after_{name}.json")["metrics"] for name in ("onnxruntime", "openvino")}
    manifest = _read(layout.site_bundle / "manifest.json")
    body = "\n".join(
        (
            "<h1>Carpus: from a simulated tabletop to a ROS 2 node</h1>",
            f"<p class='note'>DEIMv2-Atto, {len(manifest['classes'])} classes, fine-tuned for a new site on this"
            " machine. Every figure on this page was measured here, by the stages listed at its end.</p>",
            _ap_section(before, after),
            _frames_section(out / "detections" / "annotated"),
            _parity_section(manifest),
            _latency_section(_read(out / "bench.json")),
            _ros_section(out / "ros"),
            _stages_section(stages, seconds),
        )
    )
    head = f"<head><meta charset='utf-8'><title>Carpus demo</title><style>{_STYLE}</style></head>"
    page = f"<!doctype html><html lang='en'>{head}<body>{body}</body></html>\n"
    temporary = layout.report.with_suffix(".tmp")
    layout.report.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(layout.report)


def _ap_section(before: Mapping[str, Any], after: Mapping[str, Mapping[str, Any]]) -> str:
    best = after["onnxruntime"]
    rows = [
        ("shipped weights, ONNX Runtime", before),
        *((f"fine-tuned, {name}", result) for name, result in after.items()),
    ]
    classes = [
        (name, f"{_value(before['per_class'].get(name)):.3f}", f"{_value(value):.3f}")
        for name, value in list(best["per_class"].items())[:_CLASSES_SHOWN]
    ]
    return (
        f"<h2>Accuracy</h2><p><span class='big'>AP {before['ap']:.3f} &rarr; {best['ap']:.3f}</span> on "
        f"{best['images']} pictures of the site that training never saw (COCO AP, IoU 0.50:0.95)</p>"
        + _table(("", "AP", "AP50", "AP75"), [(n, *(f"{r[k]:.3f}" for k in ("ap", "ap50", "ap75"))) for n, r in rows])
        + _table(("class", "AP before", "AP after"), classes)
    )


def _frames_section(folder: Path) -> str:
    frames = sorted(folder.glob("*.jpg")) + sorted(folder.glob("*.png"))
    shown = frames[:: max(1, len(frames) // 6)][:6]
    pictures = "".join(f"<img alt='{html.escape(path.name)}' src='{_data(path)}'>" for path in shown)
    return f"<h2>What it sees</h2><div class='frames'>{pictures}</div>"


def _parity_section(manifest: Mapping[str, Any]) -> str:
    rows = [
        (
            f"{record['backend']} {record['precision']}",
            *(f"{record['metrics'][key]:.2g} (at most {record['thresholds'][key]:g})" for key in _ERRORS),
            str(record["images"]),
            "passed" if record["passed"] else "failed",
        )
        for record in manifest["parity"]
    ]
    return (
        "<h2>Parity with the trained network</h2><p>Preprocessing, inference and postprocessing of every exported form "
        "against the torch module, on pictures of the site. An export that misses a limit is not written.</p>"
        + _table(("", "boxes [px]", "scores", "pictures", ""), rows)
    )


def _latency_section(bench: Mapping[str, Any]) -> str:
    rows = []
    for entry in bench["backends"]:
        for part, values in entry["milliseconds"].items():
            rows.append(
                (
                    f"{entry['backend']} {entry['precision']}: {part}",
                    *(f"{values[p]:.2f}" for p in ("p50", "p90", "p99")),
                )
            )
    size = bench["image"]
    where = ", ".join(f"{key} {value}" for key, value in bench["machine"].items())
    return (
        f"<h2>Latency</h2><p>One {size['width']}x{size['height']} picture at a time, {bench['runs']} runs, in"
        " milliseconds.</p>" + _table(("", "p50", "p90", "p99"), rows) + f"<p class='note'>{html.escape(where)}</p>"
    )


def _ros_section(folder: Path) -> str:
    summary = _read(folder / "summary.json")
    classes = ", ".join(f"{count} {name}" for name, count in summary.pop("classes", {}).items())
    rows = [(key.replace("_", " "), _cell(value)) for key, value in _flat(summary)]
    rows.append(("objects in all frames", classes or "none"))
    videos = sorted(folder.glob("*.mp4"))
    video = f"<video controls muted loop src='{_data(videos[0], 'video/mp4')}'></video>" if videos else ""
    return (
        "<h2>The ROS 2 graph</h2><p>Three processes over DDS: simulated head camera, detector (lifecycle node), "
        "recorder. The video is what the recorder saw. The detector's own counts are its last report's, up to a second "
        f"older than the recorder's.</p>{video}" + _table(("what", "measured"), rows)
    )


def _stages_section(stages: Sequence[Stage], seconds: Mapping[str, float]) -> str:
    rows = [(stage.title, f"{seconds.get(stage.name, 0.0):.0f}") for stage in stages]
    note = "<p>Of a stage that was interrupted, the time since it went on.</p>"
    return f"<h2>Where the time went</h2>{note}" + _table(
        ("stage", "seconds"), [*rows, ("all", f"{sum(seconds.values()):.0f}")]
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}: ")
        elif not isinstance(value, list):
            yield prefix + key, value


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _value(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _data(path: Path, kind: str = "") -> str:
    kind = kind or ("image/png" if path.suffix == ".png" else "image/jpeg")
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))
