"""Whole trainings: they learn, and stop and go on without leaving a trace in the weights."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from carpus.models.build import FAMILIES
from carpus.models.data.augment_config import AugmentConfig
from carpus.models.engine import TrainingError
from carpus.models.engine_checkpoint import load_checkpoint, load_trained_weights
from carpus.models.engine_events import StepReport
from carpus.models.engine_interrupt import InterruptGuard
from carpus.models.recipe import Recipe
from carpus.models.train import TrainResult, train
from carpus.models.train_config import TrainConfig
from carpus.runtime.errors import DataError
from tests.toy_coco import write_toy

RECIPE = Recipe(
    epochs=4,
    batch_size=4,
    lr=3e-3,
    backbone_lr_factor=1.0,
    clip_norm=1.0,
    warmup_iterations=2,
    flat_epochs=4,
    augment=AugmentConfig(strong_from=1, mosaic_until=2, strong_until=3, copyblend_prob=0.5, copyblend_epochs=(2, 3)),
    num_denoising=8,
    ema_decay=0.8,
    ema_warmups=2,
)


def configuration(root: Path, out: Path, **changes: Any) -> TrainConfig:
    options: dict[str, Any] = {"eval_every": 2, "eval_images": 2, "picture_every": 2, "threads": 1, "workers": 0}
    options |= {"input_size": (160, 160), "accelerator": "cpu", **changes}
    return TrainConfig(data=root, out=out, **{"recipe": RECIPE, **options})


class Interrupter:
    """A listener that asks for a stop at given steps, and at the first evaluation if told to."""

    def __init__(self, guard: InterruptGuard, step: int | None = None, *, evaluation: bool = False) -> None:
        self.guard, self.step, self.evaluation = guard, step, evaluation
        self.losses: list[float] = []
        self.messages: list[str] = []

    def on_message(self, text: str) -> None:
        self.messages.append(text)

    def on_step(self, report: StepReport) -> None:
        self.losses.append(report.losses.total)
        if len(self.losses) == self.step:
            self.guard.request()

    def on_evaluation(self, done: int, total: int) -> None:
        if self.evaluation:
            self.guard.request()

    def on_epoch(self, record: Mapping[str, Any]) -> None:
        pass


def run(config: TrainConfig, step: int | None = None, *, evaluation: bool = False) -> tuple[TrainResult, Interrupter]:
    guard = InterruptGuard()
    listener = Interrupter(guard, step, evaluation=evaluation)
    return train(config, listener, guard), listener


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("data"), train=12, heldout=4)


@pytest.fixture(scope="module")
def whole(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainResult, Interrupter]:
    return run(configuration(root, tmp_path_factory.mktemp("whole")))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in ("seconds", "images_per_second")} for record in history]


def test_training_reduces_the_loss_and_leaves_its_results(whole: tuple[TrainResult, Interrupter]) -> None:
    result, listener = whole
    assert result.finished
    assert len(listener.losses) == 12
    assert sum(listener.losses[-3:]) < 0.92 * sum(listener.losses[:3])
    out = result.out
    history = json.loads((out / "history.json").read_text(encoding="utf-8"))
    assert [record["epoch"] for record in history] == [1, 2, 3, 4]
    assert [record.get("images") for record in history] == [None, 2, None, 4]
    assert history[0]["loss"] == pytest.approx(sum(listener.losses[:3]) / 3)
    assert (out / "learning_curve.png").read_bytes()[:4] == b"\x89PNG"
    pictures = sorted(path.name for path in (out / "pictures").iterdir())
    assert pictures == ["batch_0001.png", "batch_0003.png", "batch_0004.png", "validation_0004.png"]
    assert any((out / "tensorboard").iterdir())
    weights = load_trained_weights(result.best_checkpoint)
    assert (weights.family, weights.variant, weights.input_size) == ("deimv2", "atto", (160, 160))
    assert weights.categories.names == ("grün", "rot", "青")
    assert weights.metrics["images"] == 4
    assert result.best_checkpoint.stat().st_size < 3_000_000


def test_interrupted_training_ends_in_the_same_bits(
    root: Path, whole: tuple[TrainResult, Interrupter], tmp_path: Path
) -> None:
    config = configuration(root, tmp_path)
    first, _ = run(config, step=4)  # in the second epoch
    assert not first.finished
    assert load_checkpoint(tmp_path / "last.pt")["progress"] == {"epoch": 1, "batch": 1, "step": 4}
    second, _ = run(replace(config, workers=1), evaluation=True)  # in the evaluation after it
    assert not second.finished
    assert load_checkpoint(tmp_path / "last.pt")["progress"] == {"epoch": 1, "batch": 3, "step": 6}
    third, listener = run(config, step=3)  # with the last step of the third epoch
    assert not third.finished
    assert "resuming at epoch 2 of 4, batch 3" in listener.messages
    last, _ = run(config)
    assert last.finished
    ours, theirs = load_checkpoint(tmp_path / "last.pt"), load_checkpoint(whole[0].out / "last.pt")
    for part in ("model", "ema", "optimizer", "metrics", "progress"):
        assert same(ours[part], theirs[part]), part
    assert timeless(ours["history"]) == timeless(theirs["history"])


FAMILY_RECIPE = replace(
    RECIPE, epochs=2, batch_size=6, lr=1e-3, num_denoising=0, augment=AugmentConfig(strong_from=5), clip_norm=1.0
)


@pytest.mark.parametrize(
    ("family", "variant", "side", "changes"),
    [
        ("lw_detr", "tiny", 192, {"query_groups": 2, "layer_decay": 0.8, "component_decay": 0.7}),
        ("mamba_yolo", "T", 64, {"backbone_lr_factor": 0.5}),
        ("yolo_master", "esmoe-n", 64, {"optimizer": "sgd", "falling": "linear"}),
    ],
)
def test_every_family_trains_stops_and_goes_on(
    root: Path, tmp_path: Path, family: str, variant: str, side: int, changes: dict[str, Any]
) -> None:
    recipe = replace(FAMILY_RECIPE, **changes)
    options = {"family": family, "variant": variant, "input_size": (side, side), "recipe": recipe, "eval_every": 9}
    stopped, first = run(configuration(root, tmp_path / "run", **options, picture_every=0), step=3)
    assert not stopped.finished
    finished, rest = run(configuration(root, tmp_path / "run", **options, picture_every=0))
    assert finished.finished
    losses = first.losses + rest.losses
    assert len(losses) == 4
    assert all(math.isfinite(value) for value in losses)
    weights = load_trained_weights(finished.best_checkpoint)
    assert (weights.family, weights.variant, weights.input_size) == (family, variant, (side, side))
    assert weights.metrics["images"] == 4


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("yolo_master", {"dense_supervision": True}, "yolo_master has no such thing"),
        ("mamba_yolo", {"num_denoising": 10}, "num_denoising is 10, but mamba_yolo"),
        ("deimv2", {"query_groups": 2}, "query_groups is 2, but deimv2 has no such thing"),
        ("lw_detr", {"query_groups": 14}, "the network has 13 groups"),
        ("lw_detr", {"classification": "focal"}, "'focal' is not available for lw_detr; take one of ia_bce, mal, vfl"),
        ("mamba_yolo", {"classification": "mal"}, "not available for mamba_yolo; leave it out"),
    ],
)
def test_recipes_that_a_family_cannot_follow_are_refused(
    root: Path, tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    variant = FAMILIES[family].variants[0]
    recipe = replace(FAMILY_RECIPE, **changes)
    with pytest.raises(DataError, match=message):
        run(configuration(root, tmp_path, family=family, variant=variant, recipe=recipe, input_size=(192, 192)))


def test_finished_training_is_left_alone(root: Path, whole: tuple[TrainResult, Interrupter]) -> None:
    before = (whole[0].out / "last.pt").read_bytes()
    again, listener = run(configuration(root, whole[0].out))
    assert again.finished
    assert listener.losses == []
    assert again.best == whole[0].best
    assert (whole[0].out / "last.pt").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"recipe": replace(RECIPE, lr=1e-3)}, "recipe.lr is 0.003 there and 0.001 here"),
        ({"recipe": replace(RECIPE, augment=AugmentConfig())}, "recipe.augment.strong_from is 1 there and 4 here"),
    ],
)
def test_folders_of_other_runs_are_refused(
    root: Path, whole: tuple[TrainResult, Interrupter], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        run(configuration(root, whole[0].out, **change))
    assert "Give the run another folder, or delete this one." in str(caught.value)


def test_folders_of_runs_on_other_data_are_refused(whole: tuple[TrainResult, Interrupter], tmp_path: Path) -> None:
    other = write_toy(tmp_path, train=4, heldout=1)
    with pytest.raises(DataError, match="its training data is not"):
        run(configuration(other, whole[0].out))


def test_fine_tuning_starts_from_the_averaged_weights(
    root: Path, whole: tuple[TrainResult, Interrupter], tmp_path: Path
) -> None:
    still = replace(RECIPE, epochs=1, lr=0.0, ema_decay=0.0)
    config = configuration(root, tmp_path, recipe=still, init=whole[0].best_checkpoint, freeze_norm=True)
    _, listener = run(config)
    assert any(
        m.endswith("(deimv2-atto, epoch 4, 3 of 3 classes known to it, the rows of others start anew)")
        for m in listener.messages
    )
    given = load_trained_weights(whole[0].best_checkpoint).state_dict
    got = load_trained_weights(tmp_path / "best.pt").state_dict
    changed = [name for name in given if not torch.equal(given[name], got[name])]
    assert changed == []
    assert load_checkpoint(whole[0].best_checkpoint)["init"] is None
    assert load_checkpoint(tmp_path / "best.pt")["init"] == str(whole[0].best_checkpoint)


def test_diverged_training_says_so_and_keeps_its_checkpoint(root: Path, tmp_path: Path) -> None:
    wild = replace(RECIPE, lr=1e18, clip_norm=0.0, warmup_iterations=0)
    with pytest.raises(
        TrainingError, match=r"The loss is (nan|inf) at epoch 0, batch \d .*lower learning rate"
    ) as caught:
        run(configuration(root, tmp_path, recipe=wild))
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_size": (96, 96)}, "Input of 96 x 96 px has 45 positions for 100 queries of atto"),
        (
            {"recipe": replace(RECIPE, input_scales=((0, 0.5),))},
            r"\(the factor 0.5 of input_scales or of a random size\) has ",
        ),
        ({"init": Path("/nowhere.pt")}, "Checkpoint /nowhere.pt to start from does not exist"),
        ({"variant": "huge"}, "unknown deimv2 variant 'huge'"),
        ({"val": Path("/nowhere")}, "No dataset at /nowhere"),
    ],
)
def test_impossible_runs_are_refused(root: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        run(configuration(root, tmp_path, **change))


@pytest.mark.slow
def test_second_stage_starts_from_the_best_weights(root: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, epochs=3, ema_restart_epoch=1)
    result, _ = run(configuration(root, tmp_path, recipe=recipe))
    assert result.finished
    assert [record.get("images") for record in result.history] == [None, 2, 4]
    assert "model" in load_checkpoint(tmp_path / "best.pt")


@pytest.mark.slow
def test_time_budget_fixes_the_epochs_before_the_first_step(root: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, input_scales=((0, 1.2), (2, 1.0)))
    config = configuration(root, tmp_path, recipe=recipe, max_minutes=30.0)
    result, listener = run(config, step=1)
    assert not result.finished
    epochs = load_checkpoint(tmp_path / "last.pt")["recipe"]["epochs"]
    assert epochs > 4
    assert any(
        f"{epochs} epochs fit into 30 minutes (--epochs {epochs} repeats this run)" in m for m in listener.messages
    )
    again, _ = run(config, step=1)
    assert load_checkpoint(tmp_path / "last.pt")["recipe"]["epochs"] == epochs
    assert not again.finished


def command(root: Path, out: Path, *more: str) -> list[str]:
    options = "--epochs 2 --batch-size 4 --input-size 160 160 --threads 1 --eval-every 9 --picture-every 0"
    options += " --no-tensorboard --accelerator cpu --input-scales 0 1.0"
    return ["-m", "carpus.cli.main", "train", "--data", str(root), "--out", str(out), *options.split(), *more]


@pytest.mark.slow
def test_ctrl_c_on_the_command_saves_and_exits_130(root: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, *command(root, tmp_path)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 200
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline and process.poll() is None:
        assert process.stderr is not None
        if "held in memory" in process.stderr.readline():
            break
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
    _, error = process.communicate(timeout=200)
    assert process.returncode == 130, error
    assert "the same command goes on from" in error
    progress = load_checkpoint(tmp_path / "last.pt")["progress"]
    assert 1 <= progress["step"] < 6
    done = subprocess.run(
        [sys.executable, *command(root, tmp_path)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resuming at epoch" in done.stderr
    assert load_checkpoint(tmp_path / "last.pt")["progress"]["epoch"] == 2


@pytest.mark.slow
def test_two_processes_train_like_one(root: Path, tmp_path: Path) -> None:
    """Same global batches, losses and gradient norms. What couples the images of a batch is left out on purpose:

    batch statistics are per process (torch has no SyncBatchNorm on CPUs), denoising draws depend on the process's own
    batch, and batch mixing pairs images within a process.
    """
    shared = ["--freeze-norm", "--num-denoising", "0", "--epochs", "3", "--batch-size", "12", "--workers", "0"]
    shared += ["--dense-supervision", "True"]
    alone = [sys.executable, *command(root, tmp_path / "one", *shared)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both = [sys.executable, *launcher, *command(root, tmp_path / "two", *shared, "--devices", "2")]
    for arguments in (alone, both):
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / name / "history.json").read_text(encoding="utf-8")) for name in ("one", "two"))
    assert len(one) == len(two) == 3  # one step an epoch
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-5)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-3)
    # Later steps see weights on which rounding has acted through Adam.
    for a, b in zip(one[1:], two[1:], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-2)
