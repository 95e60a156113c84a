"""What export needs to know about each model family: a table that later families join."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn

from carpus.models.deimv2.checkpoint import load_state
from carpus.models.deimv2.deploy import deploy
from carpus.models.deimv2.model import DEIMv2
from carpus.models.lw_detr import checkpoint as lw_detr_checkpoint
from carpus.models.lw_detr.deploy import deploy as deploy_lw_detr
from carpus.models.lw_detr.model import LWDETR
from carpus.models.lw_detr.preprocess import lw_detr_preprocess
from carpus.models.predict import deimv2_preprocess
from carpus.runtime.errors import DataError
from carpus.runtime.names import lookup
from carpus.runtime.spec import Preprocess

__all__ = ["EXPORT_FAMILIES", "ExportFamily", "get_family"]


@dataclass(frozen=True)
class ExportFamily:
    """How a family leaves training.

    Attributes:
        deploy: trained module -> a copy in the form that is exported, with the same outputs.
        preprocess: (trained module, input size (height, width)) -> how images enter the network, in training
            evaluation and everywhere.
        input_size: trained module -> the (height, width) it was built for [px].
        load: (module, weights by name, source named in errors) -> fills the module, which they must fit exactly.
        stride: greatest stride of the feature maps [px].
        top_k: most detections an image.
    """

    deploy: Callable[[nn.Module], nn.Module]
    preprocess: Callable[[nn.Module, tuple[int, int]], Preprocess]
    input_size: Callable[[nn.Module], tuple[int, int]]
    load: Callable[[nn.Module, Mapping[str, Tensor], str], None]
    stride: int = 32
    top_k: int = 300


def _as_deimv2(module: nn.Module) -> DEIMv2:
    if not isinstance(module, DEIMv2):
        raise DataError(f"family 'deimv2' exports a DEIMv2 module, got {type(module).__name__}")
    return module


def _deploy_deimv2(module: nn.Module) -> nn.Module:
    return deploy(_as_deimv2(module))


def _deimv2_input_size(module: nn.Module) -> tuple[int, int]:
    return _as_deimv2(module).config.input_size


def _preprocess_deimv2(module: nn.Module, input_size: tuple[int, int]) -> Preprocess:
    return deimv2_preprocess(input_size, normalise=_as_deimv2(module).config.imagenet_normalisation)


def _load_deimv2(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    load_state(_as_deimv2(module), state, source)


def _as_lw_detr(module: nn.Module) -> LWDETR:
    if not isinstance(module, LWDETR):
        raise DataError(f"family 'lw_detr' exports an LWDETR module, got {type(module).__name__}")
    return module


def _deploy_lw_detr(module: nn.Module) -> nn.Module:
    return deploy_lw_detr(_as_lw_detr(module))


def _lw_detr_input_size(module: nn.Module) -> tuple[int, int]:
    return _as_lw_detr(module).config.input_size


def _preprocess_lw_detr(module: nn.Module, input_size: tuple[int, int]) -> Preprocess:
    return lw_detr_preprocess(input_size)


def _load_lw_detr(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    lw_detr_checkpoint.load_state(_as_lw_detr(module), state, source)


EXPORT_FAMILIES: Mapping[str, ExportFamily] = MappingProxyType(
    {
        "deimv2": ExportFamily(_deploy_deimv2, _preprocess_deimv2, _deimv2_input_size, _load_deimv2),
        "lw_detr": ExportFamily(_deploy_lw_detr, _preprocess_lw_detr, _lw_detr_input_size, _load_lw_detr),
    }
)
"""Families by name."""


def get_family(name: str) -> ExportFamily:
    """A family by name.

    Raises:
        DataError: unknown; the message suggests the nearest.
    """
    return lookup("model family", name, EXPORT_FAMILIES)
