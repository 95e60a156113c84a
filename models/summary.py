"""Parameters and arithmetic of every variant, counted here, beside what was published."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from carpus.models.build import FAMILIES, build_model, find_family
from carpus.models.counting import Count, count, shapes_only
from carpus.models.deimv2.deploy import deploy as deploy_deimv2
from carpus.models.figures import FAMILY_FACTS, PUBLISHED, Published, licence_of
from carpus.models.lw_detr.config import STRIDES
from carpus.models.lw_detr.deploy import deploy as deploy_lw_detr
from carpus.models.yolo.blocks import fuse_convs
from carpus.runtime.names import lookup

__all__ = ["TOLERANCE", "Difference", "ModelRow", "model_row", "model_table", "variants_of"]

TOLERANCE = 0.02
"""Differences beyond this share of the published figure are explained."""


@dataclass(frozen=True)
class Difference:
    """A figure counted here against a published one.

    Attributes:
        here: counted here.
        published: as printed, in the same unit.
        digits: decimals that were printed.
        note: key of ``carpus.models.figures.NOTES`` that explains a large difference.
    """

    here: float
    published: float
    digits: int
    note: str | None

    @property
    def relative(self) -> float:
        """(here - published) / published; 0 when the figure here, rounded as the published one, is the same."""
        if round(self.here, self.digits) == round(self.published, self.digits):
            return 0.0
        return self.here / self.published - 1.0

    @property
    def explained_by(self) -> str | None:
        """Key of the note that explains a difference beyond ``TOLERANCE``; None for smaller ones."""
        return self.note if abs(self.relative) > TOLERANCE else None


@dataclass(frozen=True)
class ModelRow:
    """One variant, counted with the classes of its published weights.

    Attributes:
        family, variant: what it is.
        input_size: (height, width) [px].
        num_classes: object classes.
        params_training: parameters that training updates.
        params_inference: parameters of the form that the authors deploy: training's own parts dropped, and norms folded
            into convolutions where the authors fold them.
        count: operations of one image in that form, in 1e9.
        alike: operations in 1e9 as the authors count them, a multiply-accumulate as two; None where nothing is
            published.
        published: the authors' figures, or None.
        licence: licence of the published weights, or None where there are none.
    """

    family: str
    variant: str
    input_size: tuple[int, int]
    num_classes: int
    params_training: int
    params_inference: int
    count: Count
    alike: float | None
    published: Published | None
    licence: str | None

    @property
    def published_gflops(self) -> float | None:
        """The authors' figure, with a multiply-accumulate as two operations."""
        return None if self.published is None else self.published.gflops * 2 / self._facts.mac_operations

    @property
    def params_difference(self) -> Difference | None:
        """Parameters against the published ones [1e6], of the form that the authors count."""
        if self.published is None:
            return None
        counted = self.params_training if self._facts.counted_form == "training" else self.params_inference
        return Difference(
            counted / 1e6, self.published.params_m, _digits(self.published.params_m), self.published.params_note
        )

    @property
    def gflops_difference(self) -> Difference | None:
        """Layers and products against the published figure."""
        return self._against_published(self.count.gflops)

    @property
    def alike_difference(self) -> Difference | None:
        """What is counted as the authors count it against the published figure."""
        return None if self.alike is None else self._against_published(self.alike)

    @property
    def notes(self) -> tuple[str, ...]:
        """Keys of the notes that this row needs."""
        found = [d.explained_by for d in (self.params_difference, self.gflops_difference) if d is not None]
        return tuple(note for note in dict.fromkeys(found) if note is not None)

    @property
    def _facts(self) -> Any:
        return FAMILY_FACTS[self.family]

    def _against_published(self, here: float) -> Difference | None:
        if self.published is None:
            return None
        share = self._facts.mac_operations / 2
        gflops = self.published.gflops
        return Difference(here * share, gflops, _digits(gflops), self.published.gflops_note)


@dataclass(frozen=True)
class _Counting:
    """How a family is counted.

    Attributes:
        inference: network in eval mode -> the form that the authors deploy; the network may change.
        alike: (network, its count) -> operations as the authors count them [1e9], a multiply-accumulate as two.
    """

    inference: Callable[[Any], nn.Module]
    alike: Callable[[Any, Count], float]


def _fused(model: nn.Module) -> nn.Module:
    fuse_convs(model)
    return model


def _alike_lw_detr(model: Any, counted: Count) -> float:
    """Softmax and norms cost five operations a number; transposed convolutions twice; the box head is everywhere."""
    config = model.config
    dim, (height, width) = config.decoder.hidden_dim, config.input_size
    positions = sum((height // s) * (width // s) for s in (STRIDES[level] for level in config.levels))
    head = 2 * (positions - config.decoder.num_queries) * (2 * dim**2 + 4 * dim) / 1e9
    # the authors count a multiply-accumulate once, beside operations of other kinds
    return counted.gflops + counted.transposed + head + 2 * 5 * (counted.softmax + counted.norms)


def _alike_yolo(model: Any, counted: Count) -> float:
    """Layers, and norms with eight operations a number; routers on maps that were not pooled first."""
    return counted.layers + 15 * counted.router + 8 * counted.norms


_COUNTING: Mapping[str, _Counting] = MappingProxyType(
    {
        "deimv2": _Counting(lambda m: deploy_deimv2(m, fuse="official"), lambda model, counted: counted.layers),
        "lw_detr": _Counting(lambda m: deploy_lw_detr(m, fuse=False), _alike_lw_detr),
        "yolo_master": _Counting(_fused, _alike_yolo),
        "mamba_yolo": _Counting(_fused, _alike_yolo),
    }
)


def variants_of(family: str | None = None, variant: str | None = None) -> list[tuple[str, str]]:
    """(family, variant) of all networks, of a family, or of one that is named.

    Raises:
        DataError: unknown names; the message suggests the nearest.
    """
    if family is None:
        return [(name, each) for name, entry in FAMILIES.items() for each in entry.variants]
    if variant is None:
        return [(family, each) for each in lookup("model family", family, FAMILIES).variants]
    find_family(family, variant)
    return [(family, variant)]


def model_table(family: str | None = None) -> Iterator[ModelRow]:
    """A row for every variant of a family, or of all, as they are counted."""
    return (model_row(*names) for names in variants_of(family))


def model_row(family: str, variant: str) -> ModelRow:
    """Count a variant.

    Raises:
        DataError: unknown names.
    """
    find_family(family, variant)
    how = _COUNTING[family]
    with shapes_only():
        model: Any = build_model(family, variant, _classes(family)).eval()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        inference = how.inference(model)
    config = model.config
    counted = count(inference, config.input_size)
    published = PUBLISHED.get((family, variant))
    return ModelRow(
        family=family,
        variant=variant,
        input_size=config.input_size,
        num_classes=config.num_classes,
        params_training=trained,
        params_inference=sum(p.numel() for p in inference.parameters()),
        count=counted,
        alike=None if published is None else how.alike(model, counted),
        published=published,
        licence=licence_of(family, variant),
    )


def _classes(family: str) -> int:
    """COCO's classes; LW-DETR has a logit for each of its category ids 0..90."""
    return 91 if family == "lw_detr" else 80


def _digits(figure: float) -> int:
    return len(repr(figure).partition(".")[2])
