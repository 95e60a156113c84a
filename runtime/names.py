"""Names that people type: looked up in a table, with the nearest ones suggested when they are not in it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from carpus.runtime.errors import DataError

__all__ = ["lookup", "nearest", "unknown"]

_CUTOFF = 0.6
_SUGGESTIONS = 3

Value = TypeVar("Value")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names most like the given one, best first; none when nothing is alike.

    Case and the kind of separator do not count, and the beginning of a name, or a part of it between separators, is
    near the whole: ``xl`` to ``xlarge``, ``n`` to ``esmoe-n``.

    Args:
        name: what was typed.
        known: what there is.
    """
    wanted = _plain(name)
    scores = {
        candidate: difflib.SequenceMatcher(None, wanted, _plain(candidate), autojunk=False).ratio()
        for candidate in known
    }
    for candidate in scores:
        plain = _plain(candidate)
        if wanted and (plain.startswith(wanted) or wanted in plain.split("-")):
            scores[candidate] = max(scores[candidate], _CUTOFF)
    best = sorted((candidate for candidate, score in scores.items() if score >= _CUTOFF), key=lambda c: -scores[c])
    return [candidate for candidate in best if scores[candidate] > scores[best[0]] - 0.1][:_SUGGESTIONS]


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is not there: what is nearest, and all there is.

    Args:
        what: what kind of thing is named, such as "DEIMv2 variant"; its plural ends in "s" or "ies".
        name: what was typed.
        known: what there is.
    """
    known = list(known)
    near = nearest(name, known)
    hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
    kind = what.split()[-1]
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    return f"unknown {what} {name!r}{hint}; known {plural}: {', '.join(known)}"


def lookup(what: str, name: str, table: Mapping[str, Value]) -> Value:
    """The table's entry of that name.

    Args:
        what: what kind of thing is named, for the message.
        name: what was typed.
        table: entries by name.

    Raises:
        DataError: no such entry; the message suggests the nearest and lists all.
    """
    if name not in table:
        raise DataError(unknown(what, name, table))
    return table[name]


def _plain(name: str) -> str:
    """Lower case, with one kind of separator."""
    return name.casefold().translate(str.maketrans("_. ", "---"))
