"""`carpus train`: trains or fine-tunes a detector on a dataset in COCO format."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from carpus.models.build import FAMILIES
from carpus.models.data.augment_config import AugmentConfig
from carpus.models.engine_events import LogListener, StepReport, TrainListener
from carpus.models.recipe import Classification, Recipe
from carpus.models.recipe_table import get_recipe
from carpus.models.train import train
from carpus.models.train_config import TrainConfig
from carpus.runtime.names import lookup

__all__ = ["Train"]


@dataclass(frozen=True)
class Train:
    """Train or fine-tune a detector on data in COCO format.

    Ctrl-C finishes the step, saves and exits with 130; the same command goes on from there. Best weights: OUT/best.pt,
    figures: OUT/history.json and OUT/learning_curve.png. Options without a value here take the recipe's.
    """

    data: Path
    """Training split (annotations.json, images/), root with train/ and heldout/ or val/, or COCO JSON file."""
    out: Path
    """Folder of the run."""
    val: Path | None = None
    """Validation split; without it heldout/ or val/ below the root of DATA, if there."""
    images: Path | None = None
    """Image folder of DATA, when it is not images/ beside the annotations."""
    val_images: Path | None = None
    """Image folder of VAL, likewise."""
    family: str = "deimv2"
    """Model family: deimv2, lw_detr, mamba_yolo or yolo_master."""
    variant: str | None = None
    """Member of the family, see `carpus models`; without it the smallest."""
    recipe: str = "tabletop"
    """Base recipe: `tabletop` for small data on a processor, `official` for COCO on accelerators."""
    init: Path | None = None
    """Checkpoint to start from: of this project, imported, or an official one; without it weights are random."""
    seed: int = 0
    """Same seed, same data, same number of threads on a CPU: same weights."""

    epochs: int | None = None
    """Length of training; every epoch of the recipe moves in proportion."""
    max_minutes: float | None = None
    """Fit the number of epochs into this time instead."""
    batch_size: int | None = None
    """Images per step, over all processes."""
    lr: float | None = None
    """Learning rate of encoder and decoder."""
    backbone_lr_factor: float | None = None
    """Backbone's learning rate relative to LR."""
    layer_decay: float | None = None
    """Factor on the learning rate per layer of the backbone, from its last to its first; 1 is off."""
    component_decay: float | None = None
    """Factor on the learning rate per component, from the heads towards the image; 1 is off."""
    optimizer: Literal["adamw", "sgd"] | None = None
    """AdamW, or SGD with Nesterov's momentum."""
    momentum: float | None = None
    """Momentum of SGD."""
    weight_decay: float | None = None
    """Weight decay."""
    clip_norm: float | None = None
    """Gradients are scaled to at most this norm; 0 leaves them."""
    warmup_iterations: int | None = None
    """Steps of warm-up."""
    falling: Literal["cosine", "linear"] | None = None
    """Rise and fall of the learning rate: quadratic and as a cosine, or in straight lines."""
    flat_epochs: int | None = None
    """Epochs at full learning rate."""
    final_lr_factor: float | None = None
    """Learning rate at the end relative to LR."""
    no_aug_epochs: int | None = None
    """Closing epochs at the final rate without strong augmentation."""
    strong_from: int | None = None
    """First epoch (from 0) with strong augmentation."""
    mosaic_until: int | None = None
    """First epoch without mosaic and batch mixing."""
    strong_until: int | None = None
    """First epoch without any strong augmentation."""
    mosaic_prob: float | None = None
    """Probability of a mosaic instead of zoom-out and crop."""
    photometric_prob: float | None = None
    """Probability of each distortion of colour."""
    zoom_out_prob: float | None = None
    """Probability of shrinking the image into black."""
    crop_prob: float | None = None
    """Probability of a crop."""
    min_box_size: float | None = None
    """Smallest side of a target after augmentation [px]."""
    mixup_prob: float | None = None
    """Probability that a batch is mixed up."""
    mixup_epochs: tuple[int, int] | None = None
    """Range of epochs with that."""
    copyblend_prob: float | None = None
    """Probability that objects are pasted into a batch."""
    copyblend_epochs: tuple[int, int] | None = None
    """Range of epochs with that."""
    input_scales: tuple[tuple[int, float], ...] | None = None
    """Pairs of first epoch and factor on the input size: `0 0.6 20 0.8 40 1.0` trains on small images first."""
    matcher_change_epoch: int | None = None
    """Epoch from which pairs are made by IoU^4 times score."""
    classification: Classification | None = None
    """Classification loss of DEIMv2 (mal, vfl) and LW-DETR (ia_bce, mal, vfl)."""
    query_groups: int | None = None
    """Groups of queries in training (Group DETR, LW-DETR only); 1 turns it off."""
    dense_o2o: bool = True
    """Mosaic, mixup and copy-blend as the recipe has them; `--no-dense-o2o` leaves them out."""
    dense_supervision: bool | None = None
    """Also teach every encoder position, which shortens training from random weights."""
    num_denoising: int | None = None
    """Denoising queries; 0 turns them off."""
    ema_decay: float | None = None
    """Decay of the averaged weights."""
    multi_scale_repeat: int | None = None
    """Random sizes of 0.75 to 1.25 for each batch, among which its own counts this often; 0 turns them off."""
    ema_warmups: int | None = None
    """Updates over which that decay rises."""

    bad_boxes: Literal["drop", "refuse"] = "drop"
    """Boxes without area, not finite or outside their image: leave them out, or refuse the dataset."""
    freeze_norm: bool = False
    """Keep batch normalisation at its running statistics (fine-tuning with very small batches)."""
    input_size: tuple[int, int] | None = None
    """Height and width of the input [px]; without it the variant's own."""
    eval_every: int = 5
    """Epochs between evaluations."""
    eval_images: int = 0
    """Validation images used before the last epoch; 0 takes all."""
    workers: int = 1
    """Processes that augment; the weights do not depend on it."""
    threads: int | None = None
    """Threads of torch."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to train."""
    devices: int = 1
    """Processes on this machine, one a GPU."""
    num_nodes: int = 1
    """Machines, each started with the same command by torchrun."""
    precision: str | None = None
    """Arithmetic as Lightning Fabric names it; without it mixed 16-bit on a GPU, 32-true elsewhere."""
    channels_last: bool = True
    """Memory format of activations."""
    compile: bool = False
    """Compile the model with torch.compile."""
    cache_gb: float = 6.0
    """Memory for decoded training images [GB]."""
    cache_scale: float = 1.5
    """Keep training images with a shorter side of at most this times the input size; 0 keeps them whole."""
    checkpoint_minutes: float = 5.0
    """Time between checkpoints inside an epoch; 0 saves only at its end."""
    picture_every: int = 10
    """Epochs between sample pictures; 0 makes none."""
    tensorboard: bool = True
    """Write TensorBoard event files to OUT/tensorboard."""

    def config(self) -> TrainConfig:
        """The configuration that these options stand for."""
        variant = (
            self.variant if self.variant is not None else lookup("model family", self.family, FAMILIES).variants[0]
        )
        recipe = get_recipe(self.recipe, self.family, variant)
        if not self.dense_o2o:
            recipe = recipe.without_dense_o2o()
        if self.epochs is not None:
            recipe = recipe.scaled(self.epochs)
        augment = dataclasses.replace(recipe.augment, **self._given(AugmentConfig))
        changes = {"augment": augment, **self._given(Recipe, "epochs")}
        if self.multi_scale_repeat and not recipe.multi_scale_until:
            changes["multi_scale_until"] = recipe.epochs - recipe.no_aug_epochs
        shared = {field.name for field in dataclasses.fields(TrainConfig)} & {f.name for f in dataclasses.fields(Train)}
        options = {name: getattr(self, name) for name in shared - {"recipe", "variant"}}
        return TrainConfig(recipe=dataclasses.replace(recipe, **changes), variant=variant, **options)

    def _given(self, kind: type, *leave: str) -> dict[str, Any]:
        """The options that belong to a configuration class and were given."""
        names = {field.name for field in dataclasses.fields(kind)} - set(leave)
        return {name: getattr(self, name) for name in names if getattr(self, name, None) is not None}

    def run(self) -> int:
        """Trains; 0 when complete, 130 when interrupted."""
        config = self.config()
        with _listener() as listener:
            result = train(config, listener)
        if not result.finished:
            return 130
        best = result.best
        score = f"AP {best['ap']:.3f} (epoch {best['epoch']})" if best.get("ap") is not None else "no validation data"
        listener.on_message(f"done: {score}; weights in {result.best_checkpoint}")
        return 0


@contextlib.contextmanager
def _listener() -> Iterator[TrainListener]:
    """A progress bar on a terminal, log lines elsewhere."""
    if not sys.stderr.isatty():
        yield LogListener()
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as progress:
        yield _BarListener(progress)


class _BarListener:
    """One bar over all steps, and one while evaluating."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._steps = progress.add_task("training", total=None, detail="")
        self._evaluation = progress.add_task("evaluating", total=None, detail="", visible=False)
        self._rate: float | None = None

    def on_message(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def on_step(self, report: StepReport) -> None:
        rate = report.images / max(report.seconds, 1e-9)
        self._rate = rate if self._rate is None else 0.95 * self._rate + 0.05 * rate
        total = report.epochs * report.batches
        self._progress.update(
            self._steps,
            description=f"epoch {report.epoch + 1}/{report.epochs}",
            completed=total - report.steps_left,
            total=total,
            detail=f"loss {report.losses.total:.2f}  {self._rate:.0f} images/s",
        )

    def on_evaluation(self, done: int, total: int) -> None:
        self._progress.update(self._evaluation, completed=done, total=total, visible=done < total)

    def on_epoch(self, record: Mapping[str, Any]) -> None:
        if record.get("ap") is not None:
            line = (
                f"epoch {record['epoch']}: loss {record['loss']:.3f}, AP {record['ap']:.3f}, AP50 {record['ap50']:.3f}"
            )
            self.on_message(line)
