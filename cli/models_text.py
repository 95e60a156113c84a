"""The table of `carpus models`, one variant in detail, and both for machines."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from carpus.export.support import Support
from carpus.models.counting import SCAN_OPERATIONS
from carpus.models.figures import FAMILY_FACTS, NOTES
from carpus.models.summary import TOLERANCE, Difference, ModelRow

__all__ = ["detail_text", "row_values", "table_text"]

WIDE = 100
"""Terminals of at least this many columns show all columns."""
_LETTERS = "abcdefghijklmnop"
_SUPPORT = (
    "T trains by the authors' recipe, t by this project's, I imports published weights, O exports ONNX, V OpenVINO"
)


class _Column(NamedTuple):
    """A column: its two header lines, its width, and whether only wide terminals show it."""

    above: str
    title: str
    width: int
    wide: bool = False


_COLUMNS = (
    _Column("", "variant", -9),
    _Column("", "input", -8),
    _Column("parameters [M]", "training", 8, wide=True),
    _Column("parameters [M]", "deployed", 8),
    _Column("parameters [M]", "paper", 6),
    _Column("parameters [M]", "diff", 6),
    _Column("GFLOPs", "here", 6),
    _Column("GFLOPs", "scan", 5, wide=True),
    _Column("GFLOPs", "paper", 6),
    _Column("GFLOPs", "diff", 6),
    _Column("GFLOPs", "alike", 6),
    _Column("COCO", "AP", 4, wide=True),
    _Column("", "does", 5),
    _Column("", "", -3),
)


def table_text(rows: list[ModelRow], support: Mapping[tuple[str, str], Support], columns: int) -> str:
    """All rows, family by family, and the notes they need, in so many columns of a terminal."""
    shown = [column for column in _COLUMNS if columns >= WIDE or not column.wide]
    letters = dict(zip(dict.fromkeys(note for row in rows for note in row.notes), _LETTERS, strict=False))
    lines: list[str] = []
    for family, members in groupby(rows, lambda row: row.family):
        facts = FAMILY_FACTS[family]
        if lines:
            lines.append("")
        lines += [f"{facts.title} ({family}), arXiv:{facts.paper}; published weights: {facts.licence}", *_head(shown)]
        for row in members:
            cells = dict(zip(_COLUMNS, _cells(row, support[row.family, row.variant], letters), strict=True))
            lines.append(_line(f"{cells[column]:{_align(column)}}" for column in shown))
    lines.append("")
    for text in (*_legend(rows), *(f"{letter}: {NOTES[note]}" for note, letter in letters.items())):
        lines += textwrap.wrap(text, min(columns, 110), subsequent_indent="   ")
    return "\n".join(lines) + "\n"


def detail_text(row: ModelRow, support: Support, columns: int) -> str:
    """One variant: every figure on a line of its own."""
    published, facts = row.published, FAMILY_FACTS[row.family]
    params, gflops, counted = row.params_difference, row.gflops_difference, row.count
    lines = [
        ("network", f"{facts.title} {row.variant}, arXiv:{facts.paper}"),
        ("input", f"{row.input_size[1]} x {row.input_size[0]} px (width x height)"),
        ("classes", f"{row.num_classes} in the published form"),
        ("parameters", f"{row.params_training:,} in training, {row.params_inference:,} deployed"),
    ]
    if published is not None and params is not None:
        lines.append(("", f"{published.params_m:g} M in the authors' {published.source}{_percent(params, ', ')}"))
    lines.append(
        ("GFLOPs", f"{counted.gflops:.2f}: layers {counted.layers:.2f}, other products {counted.products:.2f}")
    )
    if counted.scan:
        lines.append(("", f"and {counted.scan:.2f} in the scan ({SCAN_OPERATIONS} a step, channel and state)"))
    if published is not None and gflops is not None:
        once = " (a multiply-accumulate counted once)" if facts.mac_operations == 1 else ""
        lines.append(("", f"{published.gflops:g} in the authors' {published.source}{once}{_percent(gflops, ', ')}"))
        if gflops.explained_by is not None and row.alike_difference is not None:
            alike = row.alike_difference
            lines.append(("", f"{alike.here:.2f} counted alike{_percent(alike, ', ')}"))
    lines += [("", f"note: {NOTES[note]}") for note in row.notes]
    if published is not None and published.ap is not None:
        latency = "" if published.latency_ms is None else f", {published.latency_ms:g} ms on the authors' machine"
        lines.append(("COCO AP", f"{published.ap:g} as published{latency}"))
    lines += [
        ("licence", f"{row.licence} (published weights)" if row.licence else "no published weights"),
        ("train", ", ".join(f"--recipe {name}" for name in support.recipes) or "no recipe"),
        ("import", "yes" if support.published else "there is nothing to import"),
        ("export", ", ".join(_formats(support)) or "no"),
    ]
    text = []
    for label, value in lines:
        text += textwrap.wrap(value, min(columns, 110), initial_indent=f"{label:<12}", subsequent_indent=" " * 12)
    return "\n".join(text) + "\n"


def row_values(row: ModelRow, support: Support) -> dict[str, Any]:
    """A row as plain values."""

    def difference(of: Difference | None) -> float | None:
        return None if of is None else round(of.relative, 4)

    return {
        "family": row.family,
        "variant": row.variant,
        "input_size": list(row.input_size),
        "num_classes": row.num_classes,
        "params_training": row.params_training,
        "params_inference": row.params_inference,
        "gflops": round(row.count.gflops, 4),
        "gflops_parts": {name: round(value, 4) for name, value in row.count._asdict().items()},
        "gflops_alike": None if row.alike is None else round(row.alike, 4),
        "published": None if row.published is None else dataclasses.asdict(row.published),
        "published_gflops": row.published_gflops,
        "difference": {
            "params": difference(row.params_difference),
            "gflops": difference(row.gflops_difference),
            "gflops_alike": difference(row.alike_difference),
        },
        "notes": {note: NOTES[note] for note in row.notes},
        "licence": row.licence,
        "support": {"recipes": list(support.recipes), "import": support.published, "export": _formats(support)},
    }


def _cells(row: ModelRow, support: Support, letters: Mapping[str, str]) -> tuple[str, ...]:
    published, params, gflops = row.published, row.params_difference, row.gflops_difference
    explained = gflops is not None and gflops.explained_by is not None
    return (
        row.variant,
        f"{row.input_size[1]}x{row.input_size[0]}",
        f"{row.params_training / 1e6:.2f}",
        f"{row.params_inference / 1e6:.2f}",
        "-" if params is None else _printed(params.published, params.digits),
        _percent(params),
        _short(row.count.gflops),
        _short(row.count.scan) if row.count.scan else "",
        "-" if row.published_gflops is None else _printed(row.published_gflops, 1),
        _percent(gflops),
        _short(row.alike) if explained and row.alike is not None else "",
        "-" if published is None or published.ap is None else f"{published.ap:.1f}",
        "".join(letter if does else "-" for letter, does in _does(support)),
        ",".join(letters[note] for note in row.notes),
    )


def _does(support: Support) -> tuple[tuple[str, bool], ...]:
    """A letter for everything that can be done, and whether it can."""
    return (
        ("T", "official" in support.recipes),
        ("t", "tabletop" in support.recipes),
        ("I", support.published),
        ("O", support.onnx),
        ("V", support.openvino),
    )


def _formats(support: Support) -> list[str]:
    return [name for name, does in (("onnx", support.onnx), ("openvino", support.openvino)) if does]


def _legend(rows: list[ModelRow]) -> Iterable[str]:
    yield (
        "paper: as the authors print it (model zoo or configuration file); LW-DETR's GFLOPs are doubled, because its "
        "authors count a multiply-accumulate once. diff: from that; = where the figure rounds to it."
    )
    yield (
        "parameters: in training / in the form the authors deploy; the authors of LW-DETR and Mamba-YOLO print the "
        "former. GFLOPs: convolutions, linear maps and matrix products of one image, two for a multiply-accumulate, of "
        "a mixture only the experts that are chosen; scan: the selective scan's recurrence, which is elementwise, "
        f"{SCAN_OPERATIONS} operations a step, channel and state; alike: counted as the authors count, where that "
        f"explains more than {TOLERANCE:.0%}."
    )
    yield f"does: {_SUPPORT}."
    special = {row.licence: row.variant for row in rows if row.licence not in (None, FAMILY_FACTS[row.family].licence)}
    for licence in special:
        variants = ", ".join(row.variant for row in rows if row.licence == licence)
        yield f"licence of {variants}: {licence}."
    without = [row for row in rows if row.licence is None]
    for family, members in groupby(without, lambda row: row.family):
        yield f"no published weights: {family} {', '.join(row.variant for row in members)}."


def _head(shown: Iterable[_Column]) -> list[str]:
    shown = list(shown)
    above = ""
    for group, columns in groupby(shown, lambda column: column.above):
        width = sum(abs(column.width) + 1 for column in columns)
        above += f"{group:^{width}}"
    return [above.rstrip(), _line(f"{column.title:{_align(column)}}" for column in shown)]


def _line(cells: Iterable[str]) -> str:
    return " ".join(cells).rstrip()


def _align(column: _Column) -> str:
    return f"{'<' if column.width < 0 else '>'}{abs(column.width)}"


def _percent(difference: Difference | None, before: str = "") -> str:
    if difference is None:
        return ""
    if difference.relative == 0.0:
        return f"{before}the same when rounded" if before else "="
    return f"{before}{difference.relative:+.1%}"


def _printed(figure: float, digits: int) -> str:
    return f"{figure:.{min(digits, 2)}f}"


def _short(figure: float) -> str:
    return f"{figure:.2f}" if figure < 100 else f"{figure:.1f}"
