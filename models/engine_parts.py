"""What the training loop works with, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning_fabric
import torch
from torch import nn

from carpus.models.data.batch_augment import BatchAugmenter
from carpus.models.data.coco import CategoryMap, CocoDataset
from carpus.models.data.loader import BatchPlan, SampleAugmenter
from carpus.models.data.store import ImageStore
from carpus.models.ema import ModelEMA
from carpus.models.engine_events import TrainListener
from carpus.models.engine_history import EventWriter
from carpus.models.engine_step import TrainStep
from carpus.models.recipe import Recipe
from carpus.models.train_config import TrainConfig
from carpus.runtime.spec import Postprocess, Preprocess

__all__ = ["EngineParts", "Progress"]


@dataclass
class Progress:
    """Where training stands.

    Attributes:
        epoch: epoch in progress, from 0.
        batch: batches of it that are done.
        step: steps done in all.
        best: metrics of best.pt, with its ``epoch``; empty before there is one.
        history: a record an epoch.
        seconds: time spent in this epoch so far, interruptions left out [s].
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    best: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class EngineParts:
    """What the loop works with; `carpus.models.train` puts it together.

    Attributes:
        config: the run; its ``recipe`` is the wish, ``recipe`` below what is carried out.
        recipe: scaled and fitted to the run.
        fabric: devices, precision and processes.
        module: the `DetectionLoss` wrapped by ``fabric``.
        model: the detector in it, unwrapped.
        optimizer: unwrapped.
        step: carries out a step.
        ema: averaged weights.
        store, augmenter, plan: training data.
        mixer: batch-level augmentation.
        categories: the classes.
        val: validation data, or None.
        preprocess: how validation images enter the model.
        postprocess: how validation reads its outputs.
        fingerprint: SHA-256 of the training annotations.
        listener: hears about progress; None in all processes but the main one.
        writer: TensorBoard, or None.
    """

    config: TrainConfig
    recipe: Recipe
    fabric: lightning_fabric.Fabric
    module: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: TrainStep
    ema: ModelEMA
    store: ImageStore
    augmenter: SampleAugmenter
    plan: BatchPlan
    mixer: BatchAugmenter
    categories: CategoryMap
    val: CocoDataset | None
    preprocess: Preprocess
    postprocess: Postprocess
    fingerprint: str
    listener: TrainListener | None
    writer: EventWriter | None
