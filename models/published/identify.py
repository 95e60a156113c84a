"""Which family and variant weights belong to, by the names and shapes alone."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from carpus.models.build import FAMILIES, build_model
from carpus.models.deimv2.backbone_checkpoint import compare_transformer, is_transformer_only
from carpus.models.published.fit import Fit, compare
from carpus.runtime.errors import DataError

__all__ = ["Candidate", "fits_instead", "identify", "suggestion"]


@dataclass(frozen=True)
class Candidate:
    """How weights fit one variant.

    Attributes:
        family, variant: the variant.
        num_classes: classes of the weights; 0 for a transformer alone.
        fit: names and shapes held against it.
    """

    family: str
    variant: str
    num_classes: int
    fit: Fit

    @property
    def agreement(self) -> float:
        """Entries that fit, relative to those of the network and the file together; 1 when all do."""
        fitting = len(self.fit.copied) + len(self.fit.constants)
        return fitting / (fitting + sum(map(len, self.fit.problems().values()))) if fitting else 0.0

    def __str__(self) -> str:
        return f"{self.family} {self.variant}"


def identify(state: Mapping[str, Tensor], families: Iterable[str] | None = None) -> list[Candidate]:
    """The variants that share entries with weights, best first; those that fit completely are ahead of all others.

    Args:
        state: weights by official names.
        families: those to try; None tries all.
    """
    found = []
    for family in FAMILIES if families is None else families:
        for variant in FAMILIES[family].variants:
            candidate = _candidate(state, family, variant)
            if candidate is not None and candidate.agreement > 0.0:
                found.append(candidate)
    return sorted(found, key=lambda candidate: (-candidate.fit.complete, -candidate.agreement))


def fits_instead(state: Mapping[str, Tensor], family: str, variant: str) -> list[str]:
    """The variants that weights fit completely, when the one that was said is not among them."""
    fitting = [candidate for candidate in identify(state) if candidate.fit.complete]
    said = any((candidate.family, candidate.variant) == (family, variant) for candidate in fitting)
    return [] if said else [str(candidate) for candidate in fitting]


def suggestion(fitting: Sequence[str]) -> str:
    """A sentence that names what weights fit instead; nothing when they fit nothing."""
    return f" This file is {' or '.join(fitting)}." if fitting else ""


def _candidate(state: Mapping[str, Tensor], family: str, variant: str) -> Candidate | None:
    rules = FAMILIES[family].published
    count = rules.count_classes(state)
    transformer = family == "deimv2" and is_transformer_only(state)
    if count is None and not transformer:
        return None
    model = _shapes(family, variant, count or 1)
    with torch.device("meta"):
        rules.adapt(model, state)
    if not transformer:
        return Candidate(family, variant, count or 0, compare(model.state_dict(keep_vars=True), state, rules))
    try:
        return Candidate(family, variant, 0, compare_transformer(model, state, "the file").fit)
    except DataError:
        return None  # this variant has no transformer


@functools.lru_cache(maxsize=256)
def _shapes(family: str, variant: str, num_classes: int) -> nn.Module:
    """A network without numbers, which is built in a moment, whatever its size."""
    with torch.device("meta"):
        return build_model(family, variant, num_classes)
