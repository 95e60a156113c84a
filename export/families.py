"""What export needs to know about each model family: a table that later families join."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import nn

from carpus.models.deimv2.deploy import deploy as deploy_deimv2
from carpus.models.deimv2.model import DEIMv2
from carpus.models.lw_detr.deploy import deploy as deploy_lw_detr
from carpus.models.lw_detr.model import LWDETR
from carpus.models.lw_detr.preprocess import lw_detr_preprocess
from carpus.models.mamba_yolo.deploy import deploy as deploy_mamba_yolo
from carpus.models.mamba_yolo.model import MambaYOLO
from carpus.models.predict import deimv2_preprocess
from carpus.models.yolo.letterbox import yolo_postprocess, yolo_preprocess
from carpus.models.yolo_master.deploy import deploy as deploy_yolo_master
from carpus.models.yolo_master.model import YOLOMaster
from carpus.runtime.errors import DataError
from carpus.runtime.names import lookup
from carpus.runtime.spec import Postprocess, Preprocess

__all__ = ["EXPORT_FAMILIES", "ExportFamily", "get_family"]


@dataclass(frozen=True)
class ExportFamily:
    """How a family leaves training.

    Attributes:
        name: of the family.
        network: class of its networks, which have their input size (height, width) in ``config.input_size`` [px].
        deployed: trained network -> a copy in the form that is exported, with the same outputs.
        preprocessed: (trained network, input size) -> how images enter it, in training evaluation and everywhere.
        postprocess: how a bundle of the family reads its graph's outputs.
        stride: greatest stride of the feature maps [px].
        exact: pattern of the names of weights that stay float32 in a 16-bit artefact.
    """

    name: str
    network: type[nn.Module]
    deployed: Callable[[Any], nn.Module]
    preprocessed: Callable[[Any, tuple[int, int]], Preprocess]
    postprocess: Postprocess = field(default_factory=Postprocess)
    stride: int = 32
    exact: str | None = None

    def exact_weights(self, module: nn.Module) -> list[np.ndarray]:
        """The weights that stay float32 in a 16-bit artefact."""
        if self.exact is None:
            return []
        pattern = re.compile(self.exact)
        return [
            values.detach().float().cpu().numpy()
            for name, values in self._own(module).named_parameters()
            if pattern.fullmatch(name)
        ]

    def deploy(self, module: nn.Module) -> nn.Module:
        """A copy of a trained network in the form that is exported.

        Raises:
            DataError: a network of another family; here and below.
        """
        return self.deployed(self._own(module))

    def preprocess(self, module: nn.Module, input_size: tuple[int, int]) -> Preprocess:
        """How images enter a trained network at an input size (height, width) [px]."""
        return self.preprocessed(self._own(module), input_size)

    def input_size(self, module: nn.Module) -> tuple[int, int]:
        """The (height, width) that a network was built for [px]."""
        config: Any = self._own(module).config
        height, width = config.input_size
        return height, width

    def _own(self, module: nn.Module) -> nn.Module:
        if not isinstance(module, self.network):
            raise DataError(
                f"family {self.name!r} exports a module of class {self.network.__name__}, got {type(module).__name__}"
            )
        return module


def _preprocess_deimv2(network: DEIMv2, input_size: tuple[int, int]) -> Preprocess:
    return deimv2_preprocess(input_size, normalise=network.config.imagenet_normalisation)


def _preprocess_lw_detr(network: LWDETR, input_size: tuple[int, int]) -> Preprocess:
    return lw_detr_preprocess(input_size)


def _preprocess_yolo(network: nn.Module, input_size: tuple[int, int]) -> Preprocess:
    return yolo_preprocess(input_size)


# Scores leave the graph in place of logits, so that its suppression can be repeated from them to the last bit.
_YOLO = replace(yolo_postprocess(), logits="pred_scores", activation="none", in_graph=True)

# Each rank of the first stage has learned rows of its own, so that a swap of two near-equal scores changes answers:
# rounding these 8 % of the weights moves five times as many ranks as rounding the whole backbone does.
_LW_DETR_SELECTION = r"transformer\.enc_(output|output_norm|out_class_embed)\.0\..*"

EXPORT_FAMILIES: Mapping[str, ExportFamily] = MappingProxyType(
    {
        family.name: family
        for family in (
            ExportFamily("deimv2", DEIMv2, deploy_deimv2, _preprocess_deimv2),
            ExportFamily("lw_detr", LWDETR, deploy_lw_detr, _preprocess_lw_detr, exact=_LW_DETR_SELECTION),
            ExportFamily("mamba_yolo", MambaYOLO, deploy_mamba_yolo, _preprocess_yolo, _YOLO),
            ExportFamily("yolo_master", YOLOMaster, deploy_yolo_master, _preprocess_yolo, _YOLO),
        )
    }
)
"""Families by name."""


def get_family(name: str) -> ExportFamily:
    """A family by name.

    Raises:
        DataError: unknown; the message suggests the nearest.
    """
    return lookup("model family", name, EXPORT_FAMILIES)
