"""What is known of a family's published files: entries with a meaning of their own, and where the classes are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

__all__ = ["COUNTERS", "Known", "Rules", "Treatment"]

Treatment = Literal["derived", "constant", "optional", "unused"]
"""derived: the network makes it, whatever a file says. constant: fixed by the configuration, compared and not copied.
optional: copied where a file has it. unused: in some files, with no place in the network."""


@dataclass(frozen=True)
class Known:
    """Entries that are not simply copied.

    Attributes:
        pattern: expression that their whole names match.
        treatment: what is done with them.
        reason: why, in half a sentence.
    """

    pattern: str
    treatment: Treatment
    reason: str


COUNTERS = Known(r".*\.num_batches_tracked", "optional", "counts batches for norms without momentum; nothing reads it")
"""In the files of every family."""


@dataclass(frozen=True)
class Rules:
    """How the published files of a family are read.

    Attributes:
        title: the family's name for people.
        known: entries with a meaning of their own; the first that matches counts.
        class_head: expression for the name of one weight with exactly a row a class.
        class_rows: expression for the names of all entries whose first dimension is a row a class.
        adapter: (network, weights by name) -> gives the network what its configuration does not say and the weights
            do; None where the configuration says all.
        hint: what to know of the family's files when one does not fit.
    """

    title: str
    known: tuple[Known, ...]
    class_head: str
    class_rows: str
    adapter: Callable[[Any, Mapping[str, Tensor]], None] | None = None
    hint: str = ""

    def find(self, name: str) -> Known | None:
        """What is known of an entry; None when it is simply copied."""
        return next((known for known in self.known if re.fullmatch(known.pattern, name)), None)

    def adapt(self, model: Any, state: Mapping[str, Tensor]) -> None:
        """Give a network what its configuration does not say and the weights that it is about to get do."""
        if self.adapter is not None:
            self.adapter(model, state)

    def count_classes(self, state: Mapping[str, Tensor]) -> int | None:
        """The number of classes of weights by name; None when they have no such head."""
        head = re.compile(self.class_head)
        return next((len(tensor) for name, tensor in state.items() if head.fullmatch(name) and tensor.ndim), None)

    def of_other_classes(self, name: str, given: Tensor, target: Tensor) -> bool:
        """Whether two shapes of an entry may differ because the numbers of classes do."""
        same_rows = given.ndim == target.ndim and given.shape[1:] == target.shape[1:]
        return bool(re.fullmatch(self.class_rows, name)) and same_rows
