"""What can be done with a detector variant, as the tables that do it say."""

from __future__ import annotations

from dataclasses import dataclass

from carpus.export.families import EXPORT_FAMILIES
from carpus.models.build import find_family
from carpus.models.figures import licence_of
from carpus.models.recipe_table import RECIPES
from carpus.models.train_families import TRAIN_FAMILIES

__all__ = ["Support", "support_of"]


@dataclass(frozen=True)
class Support:
    """What works for a variant.

    Attributes:
        recipes: names of the training recipes that exist for it.
        published: whether its authors publish weights, which `carpus import` reads.
        onnx: it exports to ONNX.
        openvino: it exports to OpenVINO.
    """

    recipes: tuple[str, ...]
    published: bool
    onnx: bool
    openvino: bool


def support_of(family: str, variant: str) -> Support:
    """What works for a variant.

    Raises:
        DataError: unknown family or variant.
    """
    find_family(family, variant)
    recipes = tuple(name for name, families in RECIPES.items() if variant in families.get(family, {}))
    # Every bundle is written with both forms, and neither when one fails the gate.
    exported = family in EXPORT_FAMILIES
    return Support(
        recipes=recipes if family in TRAIN_FAMILIES else (),
        published=licence_of(family, variant) is not None,
        onnx=exported,
        openvino=exported,
    )
