"""Training from a published file, whatever its classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from carpus.models.published.fit import Fit, fill
from carpus.models.published.reader import PublishedWeights, read_published
from carpus.models.published.rules import Rules

__all__ = ["start_from", "start_with"]


def start_from(model: nn.Module, path: Path, rules: Rules) -> str:
    """Start a network from a published file; with another number of classes all but the classification rows is kept.

    Returns:
        One line that says what was taken.

    Raises:
        DataError: an unreadable file, or weights of another architecture.
    """
    return start_with(model, read_published(path), rules)


def start_with(model: Any, weights: PublishedWeights, rules: Rules) -> str:
    """The same from weights that were read."""
    fit = fill(model, weights.state, rules, f"checkpoint {weights.path}", other_classes=True)
    return f"starting from {weights.path} ({_what(model, weights, fit, rules)})"


def _what(model: Any, weights: PublishedWeights, fit: Fit, rules: Rules) -> str:
    averaged = "averaged weights" if weights.choice == "ema" else "weights"
    taken = f"published {averaged} under {weights.layout}; {len(fit.copied)} entries kept"
    if not fit.renewed:
        return f"{taken}, the classification rows among them"
    return (
        f"{taken}, for {model.config.num_classes} classes instead of {rules.count_classes(weights.state)} the "
        f"classification rows start anew: {len(fit.renewed)} entries"
    )
