"""The report of an import: every key, by what became of it, as JSON and as lines for people."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from carpus.models.published.fit import Fit
from carpus.models.published.reader import PublishedWeights

__all__ = ["make_report", "report_lines"]

_WIDTH = 110
_FEW = 10
_SAID = (
    ("constants", "compared, and equal"),
    ("not_taken", "known, not taken"),
    ("absent", "known, not in the file"),
)
_WRONG = (
    ("missing", "missing: the network needs them, the file has none"),
    ("left_over", "left over: in the file, and not known"),
    ("misshapen", "of another shape"),
    ("contradictions", "contradictory"),
)


def make_report(
    weights: PublishedWeights,
    fit: Fit,
    network: Mapping[str, Any],
    source: Mapping[str, Any],
    fits_instead: Sequence[str] = (),
) -> dict[str, Any]:
    """The report as JSON values.

    Args:
        weights: what was read.
        fit: how it fits.
        network: family, variant and more of the network that it was held against.
        source: file, sha256 and more of the file.
        fits_instead: variants that the weights fit completely, when this is none of them.
    """
    lists: dict[str, Any] = {
        "used": list(fit.copied),
        "through_another_name": list(fit.shared),
        "constants": _pairs(fit.constants, "reason"),
        "not_taken": _pairs(fit.not_taken, "reason"),
        "absent": _pairs(fit.absent, "reason"),
        "missing": list(fit.missing),
        "left_over": list(fit.left_over),
        "misshapen": _pairs(fit.misshapen, "is"),
        "contradictions": _pairs(fit.contradictions, "is"),
    }
    return {
        "format": "carpus.import-report",
        "version": 1,
        "complete": fit.complete,
        "fits_instead": list(fits_instead),
        "source": dict(source),
        "network": dict(network),
        "counts": {"in_file": len(weights.state), **{kind: len(entries) for kind, entries in lists.items()}},
        "groups": _groups(fit.copied, weights.state),
        **lists,
    }


def report_lines(report: Mapping[str, Any], *, every_key: bool = False) -> list[str]:
    """A report for the terminal; what does not match is listed in full, unless all of it fits another variant.

    Args:
        report: see `make_report`.
        every_key: list the keys that match as well.
    """
    counts, source, network = report["counts"], report["source"], report["network"]
    lines = [f"{source['file']}: {network['family']} {network['variant']}, {_about(network)}"]
    lines += [f"  {line}" for line in _about_source(source)]
    numbers = sum(group["numbers"] for group in report["groups"].values())
    lines.append(f"used: {counts['used']} of {counts['in_file']} keys, {numbers:,} numbers")
    lines += _wrapped(f"{name} {group['keys']}" for name, group in report["groups"].items())
    if every_key:
        lines += [f"    {name}" for name in report["used"]]
    if counts["through_another_name"]:
        lines.append(f"filled through another name of the same tensor: {counts['through_another_name']}")
        lines += [f"    {name}" for name in report["through_another_name"] if every_key]
    for kind, title in _SAID:
        for reason, names in _by_reason(report[kind]).items():
            lines.append(f"{title}: {len(names)} ({_pattern(names)}; {reason})")
            lines += [f"    {name}" for name in names if every_key]
    for kind, title in _WRONG:
        if counts[kind]:
            lines.append(f"{title}: {counts[kind]}")
            shown = report[kind][:_FEW] if report["fits_instead"] and not every_key else report[kind]
            lines += [f"    {name if isinstance(name, str) else ' '.join(name.values())}" for name in shown]
            if len(shown) < counts[kind]:
                lines.append(f"    and {counts[kind] - len(shown)} more, which --every-key lists")
    if report["complete"]:
        lines.append("missing 0, left over 0, of another shape 0")
    return lines


def _about(network: Mapping[str, Any]) -> str:
    height, width = network["input_size"]
    if network["part"] == "transformer":
        return f"the transformer of its backbone alone, for {width}x{height} px"
    return f"{network['num_classes']} classes ({network['class_names_from']}), {width}x{height} px"


def _about_source(source: Mapping[str, Any]) -> list[str]:
    averaged = ", averaged weights (EMA)" if source["averaged"] else ""
    others = f"; not taken: {', '.join(source['other_weights'])}" if source["other_weights"] else ""
    lines = [f"read under {source['layout']}{averaged}{others}"]
    if source["prefix_removed"]:
        lines.append(f"every name begins with {source['prefix_removed']!r}, which was taken away")
    if source["objects_not_made"]:
        top = Counter(name.split(".")[0] for name in source["objects_not_made"])
        which = ", ".join(f"{name} ({count})" for name, count in top.items())
        lines.append(f"objects of classes that were not imported, and no code of theirs run: {which}")
    if source["says"]:
        lines.append("says of itself: " + ", ".join(f"{key} {value}" for key, value in source["says"].items()))
    return lines


def _groups(names: Sequence[str], state: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """Keys and numbers by the first part of the name; by the first two where all begin alike."""
    depth = 1 if len({name.split(".")[0] for name in names}) > 1 else 2
    groups: dict[str, dict[str, int]] = {}
    for name in names:
        group = groups.setdefault(".".join(name.split(".")[:depth]), {"keys": 0, "numbers": 0})
        group["keys"] += 1
        group["numbers"] += state[name].numel()
    return groups


def _pairs(entries: Iterable[tuple[str, str]], key: str) -> list[dict[str, str]]:
    return [{"name": name, key: text} for name, text in entries]


def _by_reason(entries: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entry in entries:
        found.setdefault(entry["reason"], []).append(entry["name"])
    return found


def _pattern(names: Sequence[str]) -> str:
    """One or two names, or what many have in common."""
    if len(names) <= 2:
        return ", ".join(names)
    last = {name.rsplit(".", 1)[-1] for name in names}
    return f"*.{last.pop()}" if len(last) == 1 else f"{names[0]}, ..."


def _wrapped(parts: Iterable[str]) -> list[str]:
    return textwrap.wrap(", ".join(parts), _WIDTH, initial_indent="  ", subsequent_indent="  ")
