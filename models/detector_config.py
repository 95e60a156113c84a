"""What the configurations of all detector families have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from carpus.runtime.errors import DataError
from carpus.runtime.names import lookup

__all__ = ["DetectorConfig", "find_config"]

Config = TypeVar("Config", bound="DetectorConfig")


class DetectorConfig:
    """Base of a family's frozen configuration, which names these fields among its own.

    Attributes:
        variant: name in the family's ``VARIANTS``.
        num_classes: object classes.
        input_size: (height, width) [px], multiples of ``input_stride``.
    """

    variant: str
    num_classes: int
    input_size: tuple[int, int]

    @property
    def input_stride(self) -> int:
        """What the sides of the input must be multiples of [px]."""
        return 32

    def check_sizes(self) -> None:
        """Refuse numbers that no network can be built with.

        Raises:
            DataError: fewer than one class, or an input that does not divide.
        """
        if self.num_classes < 1:
            raise DataError(f"{type(self).__name__}.num_classes must be at least 1, got {self.num_classes}")
        stride = self.input_stride
        if any(side < stride or side % stride for side in self.input_size):
            raise DataError(
                f"{type(self).__name__}.input_size must be (height, width), multiples of {stride} px, "
                f"got {self.input_size}"
            )

    def with_num_classes(self: Config, num_classes: int) -> Config:
        """The same network for another number of classes."""
        return replace(self, num_classes=num_classes)  # type: ignore[type-var]

    def with_input_size(self: Config, height: int, width: int) -> Config:
        """The same network for another input size [px]."""
        return replace(self, input_size=(height, width))  # type: ignore[type-var]


def find_config(family: str, variants: Mapping[str, Config], variant: str, num_classes: int | None) -> Config:
    """A family's configuration by name.

    Args:
        family: the family's name for people, for the message.
        variants: the family's configurations by name.
        variant: name to find.
        num_classes: object classes; None keeps those of the published weights.

    Raises:
        DataError: unknown variant; the message suggests the nearest and lists all.
    """
    config = lookup(f"{family} variant", variant, variants)
    return config if num_classes is None else config.with_num_classes(num_classes)
