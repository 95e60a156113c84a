"""Weights by name against a network: what is taken, what is known and not taken, and what does not fit."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from carpus.models.published.rules import Rules
from carpus.runtime.errors import DataError

__all__ = ["Fit", "UnfitError", "compare", "fill", "listing", "spaced"]

logger = logging.getLogger(__name__)

Entry = tuple[str, str]
"""A name, and what there is to say of it."""


class UnfitError(DataError):
    """Weights do not fit a network."""


@dataclass(frozen=True)
class Fit:
    """How weights fit a network. Names are in the network's order, those it does not have in the file's.

    Attributes:
        copied: taken over.
        shared: of the network, and filled through another name of the same tensor.
        constants: compared and found equal, with the reason for not copying them.
        not_taken: of the file, known and not taken, with the reason.
        absent: of the network, known and not in the file, with the reason.
        renewed: left as they are because the number of classes differs.
        missing: of the network, and not in the file.
        left_over: of the file, and not known.
        misshapen: with both shapes.
        contradictions: constants, copies of one tensor or numbers that cannot be, with the values.
    """

    copied: tuple[str, ...]
    shared: tuple[str, ...]
    constants: tuple[Entry, ...]
    not_taken: tuple[Entry, ...]
    absent: tuple[Entry, ...]
    renewed: tuple[str, ...]
    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    misshapen: tuple[Entry, ...]
    contradictions: tuple[Entry, ...]

    @property
    def complete(self) -> bool:
        """Whether everything matched."""
        return not self.problems()

    def problems(self) -> dict[str, tuple[str, ...]]:
        """What does not match, in words, by kind."""
        kinds = {
            "missing": self.missing,
            "left over": self.left_over,
            "of another shape": tuple(f"{name} is {text}" for name, text in self.misshapen),
            "contradictory": tuple(f"{name} {text}" for name, text in self.contradictions),
        }
        return {kind: entries for kind, entries in kinds.items() if entries}


def compare(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], rules: Rules, *, other_classes: bool = False
) -> Fit:
    """Hold weights against a network's entries.

    Args:
        own: the network's ``state_dict(keep_vars=True)``; names of one tensor are recognised. Tensors of the meta
            device are compared by shape alone.
        state: weights by official names.
        rules: of the family.
        other_classes: accept another number of classes.
    """
    sharing: dict[int, list[str]] = {}
    for name, tensor in own.items():
        sharing.setdefault(id(tensor), []).append(name)
    copied: list[str] = []
    shared: list[str] = []
    renewed: list[str] = []
    missing: list[str] = []
    constants: list[Entry] = []
    not_taken: list[Entry] = []
    absent: list[Entry] = []
    misshapen: list[Entry] = []
    contradictions: list[Entry] = []
    for name, target in own.items():
        known = rules.find(name)
        given = state.get(name)
        if known is not None and known.treatment == "derived":
            (absent if given is None else not_taken).append((name, known.reason))
        elif given is None:
            if any(other in state for other in sharing[id(target)]):
                shared.append(name)
            elif known is not None and known.treatment == "optional":
                absent.append((name, known.reason))
            else:
                missing.append(name)
        elif known is not None and known.treatment == "constant":
            difference = _constant_difference(given, target)
            (contradictions if difference else constants).append((name, difference or known.reason))
        elif given.shape != target.shape:
            if other_classes and rules.of_other_classes(name, given, target):
                renewed.append(name)
            else:
                misshapen.append((name, f"{tuple(given.shape)}, expected {tuple(target.shape)}"))
        else:
            copied.append(name)
            if given.is_complex():
                contradictions.append((name, "has complex values"))
            elif not (target.is_meta or given.is_meta or torch.isfinite(_cast(given, target)).all()):
                contradictions.append((name, "has values that are not finite"))
    contradictions += _differing_copies(sharing.values(), state, set(copied))
    left_over = []
    for name in state:
        known = None if name in own else rules.find(name)
        if known is not None and known.treatment == "unused":
            not_taken.append((name, known.reason))
        elif name not in own:
            left_over.append(name)
    return Fit(
        copied=tuple(copied),
        shared=tuple(shared),
        constants=tuple(constants),
        not_taken=tuple(not_taken),
        absent=tuple(absent),
        renewed=tuple(renewed),
        missing=tuple(missing),
        left_over=tuple(left_over),
        misshapen=tuple(misshapen),
        contradictions=tuple(contradictions),
    )


def fill(
    model: nn.Module, state: Mapping[str, Tensor], rules: Rules, source: str, *, other_classes: bool = False
) -> Fit:
    """Fill a network from weights with the official names.

    Names that share a tensor (one box head for all layers) may be given once.

    Args:
        model: network to fill; its weights stay as they were when an error is raised.
        state: weights by name, of any floating type.
        rules: of the family.
        source: named in errors.
        other_classes: accept another number of classes; the classification rows keep what they have.

    Raises:
        UnfitError: anything unmatched; all kinds are listed.
    """
    rules.adapt(model, state)
    own = model.state_dict(keep_vars=True)
    fit = compare(own, state, rules, other_classes=other_classes)
    if not fit.complete:
        raise UnfitError(
            f"{source} does not fit {_describe(model, rules)}: {listing(fit.problems())}. Choose the "
            f"variant and the number of classes that it was trained with.{spaced(rules.hint)}"
        )
    with torch.no_grad():
        for name in fit.copied:
            own[name].copy_(state[name])
    if fit.renewed:
        logger.info("%s: another number of classes; %d entries start anew", source, len(fit.renewed))
    return fit


def _cast(given: Tensor, target: Tensor) -> Tensor:
    """Numbers as the network will hold them: those of 64 bits may be too large for it."""
    return given.to(target.dtype) if target.is_floating_point() else given


def listing(problems: Mapping[str, Sequence[str]], count: int = 4) -> str:
    """Problems in a line, the first few of each kind."""
    return "; ".join(
        f"{len(entries)} {kind}: {', '.join(entries[:count])}"
        + (f" and {len(entries) - count} more" if len(entries) > count else "")
        for kind, entries in problems.items()
    )


def spaced(sentence: str) -> str:
    """A sentence to go on with, if there is one."""
    return f" {sentence}" if sentence else ""


def _constant_difference(given: Tensor, target: Tensor) -> str:
    """What is wrong with a constant; empty when it is the network's, up to the rounding of its own type."""
    if given.numel() != target.numel():
        return f"has {given.numel()} values, expected {target.numel()}"
    if target.is_meta or given.is_meta:
        return ""
    tolerance = max(1e-6, torch.finfo(given.dtype).eps) if given.is_floating_point() else 1e-6
    values, expected = given.flatten().double(), target.detach().flatten().double()
    if torch.allclose(values, expected, rtol=tolerance, atol=0.0):
        return ""
    shown = values[:4].tolist() if len(values) > 1 else values.item()
    return f"is {shown}, expected {expected[:4].tolist() if len(expected) > 1 else expected.item()}"


def _differing_copies(groups: Any, state: Mapping[str, Tensor], copied: set[str]) -> Iterator[Entry]:
    for names in groups:
        first, *others = [name for name in names if name in copied] or [""]
        for name in others:
            if not (state[name].is_meta or torch.equal(state[name], state[first])):
                yield name, f"differs from {first}, which is the same tensor"


def _describe(model: Any, rules: Rules) -> str:
    """Family, variant and number of classes of a network, for messages."""
    return f"{rules.title} {model.config.variant} with {model.config.num_classes} classes"
