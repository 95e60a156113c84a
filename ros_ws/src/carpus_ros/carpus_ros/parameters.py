"""Parameters as data: declared with descriptions and ranges, checked together before any of them changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor
from rclpy.node import Node

__all__ = ["ParameterSpec", "as_names", "declare", "refusal"]


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of a node.

    Attributes:
        name: as users write it.
        default: value and, by its type, the parameter's type; a tuple makes a list of strings.
        description: one sentence for ``ros2 param describe``.
        least: lower bound of a number.
        greatest: upper bound of a number.
        choices: valid strings.
        changeable: "always", only while the node is "unconfigured", or at "start" alone.
    """

    name: str
    default: bool | int | float | str | tuple[str, ...]
    description: str
    least: float | None = None
    greatest: float | None = None
    choices: tuple[str, ...] = ()
    changeable: Literal["always", "unconfigured", "start"] = "always"

    def descriptor(self) -> ParameterDescriptor:
        """The descriptor that ROS tools show."""
        descriptor = ParameterDescriptor(name=self.name, description=self.description)
        if self.choices:
            descriptor.additional_constraints = "one of " + ", ".join(self.choices)
        descriptor.read_only = self.changeable == "start"
        # An empty list in YAML or from a tool has no type of its own, so lists accept any and are checked here.
        descriptor.dynamic_typing = isinstance(self.default, tuple)
        if self.least is not None and self.greatest is not None:
            if isinstance(self.default, float):
                descriptor.floating_point_range = [
                    FloatingPointRange(from_value=float(self.least), to_value=float(self.greatest))
                ]
            else:
                descriptor.integer_range = [IntegerRange(from_value=int(self.least), to_value=int(self.greatest))]
        return descriptor

    def problem(self, value: Any) -> str | None:
        """Say why a value cannot be used, or None."""
        if isinstance(self.default, tuple):
            if not isinstance(value, Sequence) or isinstance(value, str) or any(not isinstance(v, str) for v in value):
                return f"{self.name}: expected a list of strings, got {value!r}"
        elif isinstance(value, float) and not math.isfinite(value):
            return f"{self.name}: expected a finite number, got {value}"
        elif self.choices and value not in self.choices:
            return f"{self.name}: expected one of {', '.join(self.choices)}, got {value!r}"
        elif self.least is not None and self.greatest is not None and not self.least <= value <= self.greatest:
            return f"{self.name}: expected {self.least} to {self.greatest}, got {value}"
        return None


def as_names(value: Any) -> tuple[str, ...]:
    """A list of names from a list parameter; empty strings, which YAML needs to give an empty list a type, fall out."""
    return tuple(name for name in (value or ()) if name)


def declare(node: Node, specs: Sequence[ParameterSpec]) -> None:
    """Declare parameters on a node.

    Raises:
        ValueError: a value given at start is not valid; the message names it and what is.
    """
    for spec in specs:
        default = list(spec.default) or [""] if isinstance(spec.default, tuple) else spec.default
        node.declare_parameter(spec.name, default, spec.descriptor())
    for spec in specs:
        value = node.get_parameter(spec.name).value
        problem = spec.problem(() if value is None and isinstance(spec.default, tuple) else value)
        if problem is not None:
            raise ValueError(f"parameter {problem}")


def refusal(specs: Sequence[ParameterSpec], changes: Mapping[str, Any], *, configured: bool) -> str | None:
    """Say why a set of changes must be refused as a whole, or None.

    Args:
        specs: the node's parameters; names outside them are left to others.
        changes: new values by name.
        configured: whether the node is configured (inactive or active).
    """
    known = {spec.name: spec for spec in specs}
    for name, value in changes.items():
        spec = known.get(name)
        if spec is None:
            continue
        if spec.changeable == "start":
            return f"{name}: is fixed when the node starts; start it with -p {name}:={value}"
        if spec.changeable == "unconfigured" and configured:
            return f"{name}: can change only while the node is unconfigured; deactivate it and clean it up first"
        problem = spec.problem(value)
        if problem is not None:
            return problem
    return None
