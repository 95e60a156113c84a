"""Schedule, averaging, parameter groups, recipes and the time budget."""

from __future__ import annotations

import itertools
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from carpus.models import engine_interrupt
from carpus.models.build import build_model
from carpus.models.data.augment_config import get_augment_config
from carpus.models.data.coco import CategoryMap
from carpus.models.data.progressive import size_at
from carpus.models.deimv2.config import VARIANTS
from carpus.models.deimv2.optimizer import parameter_groups
from carpus.models.ema import ModelEMA
from carpus.models.engine_budget import StepCost, epochs_within
from carpus.models.engine_checkpoint import load_checkpoint, load_trained_weights, save_atomic
from carpus.models.engine_init import fill_from
from carpus.models.engine_interrupt import InterruptGuard
from carpus.models.engine_optimizer import make_optimizer
from carpus.models.recipe import Recipe
from carpus.models.recipe_table import RECIPES, get_recipe
from carpus.models.schedule import FlatCosine
from carpus.models.train_config import TrainConfig
from carpus.runtime.errors import DataError

# Factors sampled from the published schedules, 1,000 iterations an epoch.
ATTO_LR = [
    (0, 0.0),
    (1, 6.25e-08),
    (2000, 0.25),
    (4000, 1.0),
    (250000, 1.0),
    (250001, 0.9999999999740404),
    (375000, 0.6928655161208277),
    (467999, 0.5000000000259596),
    (468000, 0.5),
    (499999, 0.5),
]
N_LR = [(0, 0.0), (1, 2.5e-07), (1000, 0.25), (2000, 1.0), (2001, 1.0), (147999, 1.0), (159999, 1.0)]


@pytest.mark.parametrize(("variant", "samples"), [("atto", ATTO_LR), ("n", N_LR)])
def test_schedule_equals_the_published_one(variant: str, samples: list[tuple[int, float]]) -> None:
    schedule = get_recipe("official", "deimv2", variant).schedule(1000)
    for iteration, factor in samples:
        assert schedule.factor(iteration) == pytest.approx(factor, rel=1e-12, abs=1e-15)


def test_schedule_never_jumps() -> None:
    schedule = FlatCosine(warmup=50, flat=200, decayed=900, final=0.1)
    factors = [schedule.factor(i) for i in range(1000)]
    assert max(abs(b - a) for a, b in itertools.pairwise(factors)) < 0.05
    assert factors[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("values", "message"),
    [((-1, 0, 0, 0.5), "at least 0"), ((0, 0, 0, 1.5), r"final must be in 0..1, got 1.5")],
)
def test_impossible_schedules_are_refused(values: tuple[int, int, int, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        FlatCosine(*values)


@pytest.mark.parametrize(
    ("update", "decay"),
    [(1, 0.0009994002166083156), (100, 0.09515306570584407), (1000, 0.6320573467726748), (5000, 0.9931627267956145)],
)
def test_averaging_decay_equals_the_published_one(update: int, decay: float) -> None:
    ema = ModelEMA(nn.Linear(1, 1), decay=0.9999, warmups=1000)
    assert ema.current_decay(update) == pytest.approx(decay, rel=1e-12)


def test_average_follows_every_float_entry_and_copies_counters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    ema = ModelEMA(model, decay=0.9, warmups=5)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(1, 4):
        model(torch.randn(2, 3, 4, 4))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        ema.update()
        decay = 0.9 * (1 - math.exp(-step / 5))
        for name, value in model.state_dict().items():
            expected[name] = value if not value.is_floating_point() else decay * expected[name] + (1 - decay) * value
    for name, value in ema.module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
    assert ema.module[1].num_batches_tracked == 3
    assert not any(p.requires_grad for p in ema.module.parameters())


def test_average_counts_shared_tensors_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleList([shared, shared])
    ema = ModelEMA(model, decay=0.5, warmups=1)
    before = shared.weight.detach().clone()
    with torch.no_grad():
        shared.weight.add_(1.0)
    ema.update()
    torch.testing.assert_close(ema.module[0].weight, before + (1 - ema.current_decay(1)))


def test_average_survives_saving() -> None:
    model = nn.Linear(2, 2)
    ema = ModelEMA(model, decay=0.9, warmups=5)
    ema.update()
    other = ModelEMA(nn.Linear(2, 2), decay=0.5, warmups=5)
    other.load_state_dict(ema.state_dict())
    assert (other.updates, other.decay) == (1, 0.9)
    assert torch.equal(other.module.weight, model.weight)


# (lr, weight decay, tensors, elements) of the published parameter groups, for 80 classes.
GROUPS = {
    "atto": [(1e-3, 1e-4, 115, 230344), (2e-3, 0.0, 69, 2160), (2e-3, 1e-4, 117, 276479)],
    "femto": [(8e-4, 1e-4, 115, 389832), (1.6e-3, 0.0, 111, 7647), (1.6e-3, 1e-4, 75, 586464)],
    "pico": [(8e-4, 1e-4, 149, 749202), (1.6e-3, 0.0, 111, 8823), (1.6e-3, 1e-4, 75, 781512)],
    "n": [(4e-4, 1e-4, 186, 1850396), (8e-4, 0.0, 132, 14479), (8e-4, 1e-4, 87, 1735544)],
    "s": [(2.5e-5, 1e-4, 50, 5456064), (2.5e-5, 0.0, 97, 30144), (5e-4, 0.0, 194, 27356), (5e-4, 1e-4, 138, 4266272)],
    "m": [(2.5e-5, 1e-4, 50, 9634048), (2.5e-5, 0.0, 97, 40192), (5e-4, 0.0, 226, 41564), (5e-4, 1e-4, 154, 8641944)],
    "l": [
        (1.25e-5, 1.25e-4, 76, 21540096),
        (1.25e-5, 0.0, 99, 61056),
        (5e-4, 0.0, 226, 47500),
        (5e-4, 1.25e-4, 154, 10902560),
    ],
    "x": [
        (1e-5, 1.25e-4, 88, 28617984),
        (1e-5, 0.0, 111, 79488),
        (5e-4, 0.0, 290, 74838),
        (5e-4, 1.25e-4, 196, 22439424),
    ],
}


@pytest.mark.parametrize("variant", GROUPS)
def test_parameter_groups_equal_the_published_ones(variant: str) -> None:
    model = build_model("deimv2", variant, 80)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    found = [
        (pytest.approx(g.lr), g.weight_decay, len(g.names), sum(sizes[name] for name in g.names))
        for g in parameter_groups(model, get_recipe("official", "deimv2", variant))
    ]
    assert found == GROUPS[variant]


def test_optimizer_holds_every_trainable_parameter_once() -> None:
    model = build_model("deimv2", "atto", 3)
    recipe = get_recipe("tabletop", "deimv2", "atto")
    optimizer = make_optimizer(model, parameter_groups(model, recipe), recipe)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_official_recipes_carry_the_published_augmentation() -> None:
    for variant in VARIANTS:
        assert get_recipe("official", "deimv2", variant).augment == get_augment_config(variant)


def test_scaling_moves_every_epoch_in_proportion() -> None:
    scales = ((0, 0.5), (80, 1.2), (81, 1.0))
    recipe = replace(get_recipe("official", "deimv2", "n"), input_scales=scales).scaled(16)
    assert recipe.epochs == 16
    assert (recipe.flat_epochs, recipe.no_aug_epochs, recipe.matcher_change_epoch) == (780, 1, 14)
    assert recipe.ema_restart_epoch == 15
    assert recipe.input_scales == ((0, 0.5), (8, 1.2), (8, 1.0))
    augment = recipe.augment
    assert (augment.mosaic_until, augment.strong_until, augment.mixup_epochs) == (8, 15, (0, 8))
    assert (recipe.lr, recipe.warmup_iterations) == (8e-4, 2000)


def test_short_trainings_get_shorter_warmup_and_averaging() -> None:
    recipe = get_recipe("official", "deimv2", "atto")
    assert recipe.fitted(1_000_000) == recipe
    short = recipe.fitted(1000)
    assert short.warmup_iterations == 100
    assert 1 / (1 - short.ema_decay) == pytest.approx(100)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_survive_checkpoints(name: str) -> None:
    recipe = replace(get_recipe(name, "deimv2", "n"), input_scales=((0, 0.5), (3, 1.0)))
    assert Recipe.from_dict(recipe.as_dict()) == recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "Recipe.epochs must be at least 1, got 0"),
        ({"lr": -1.0}, "Recipe.lr must not be negative, got -1.0"),
        ({"final_lr_factor": 2.0}, "Recipe.final_lr_factor must be in 0..1, got 2.0"),
        ({"input_scales": ((5, 1.0), (0, 0.5))}, "must ascend by epoch"),
        ({"input_scales": ((0, 7.0),)}, "factors in 0.1..2"),
    ],
)
def test_impossible_recipes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(get_recipe("tabletop", "deimv2", "atto"), **change)


@pytest.mark.parametrize("epochs", [1, 2, 3, 5, 13, 40])
def test_the_last_epoch_of_a_short_training_is_at_full_size(epochs: int) -> None:
    scales = get_recipe("tabletop", "deimv2", "atto").scaled(epochs).input_scales
    assert size_at(epochs - 1, (320, 320), scales) == (320, 320)
    assert epochs < 3 or size_at(0, (320, 320), scales) == (192, 192)


def test_unknown_recipes_list_the_known_ones() -> None:
    with pytest.raises(DataError, match="unknown recipe 'quick'; known recipes: official, tabletop"):
        get_recipe("quick", "deimv2", "atto")
    with pytest.raises(DataError, match=r"unknown deimv2 variant 'xl'.*: atto, femto, pico, n"):
        get_recipe("official", "deimv2", "xl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": 3}, "batch of 16 images does not divide over 3 processes"),
        ({"eval_every": 0}, "eval_every must be at least 1"),
        ({"workers": -1}, "workers must not be negative"),
        ({"max_minutes": 0.0}, "max_minutes must be positive"),
    ],
)
def test_impossible_configurations_are_refused(change: dict[str, object], message: str) -> None:
    recipe = replace(get_recipe("tabletop", "deimv2", "atto"), batch_size=16)
    with pytest.raises(DataError, match=message):
        TrainConfig(data=Path(), out=Path(), recipe=recipe, **change)


def test_epochs_fill_the_time_and_not_more() -> None:
    recipe = replace(get_recipe("tabletop", "deimv2", "atto").scaled(40), input_scales=((0, 0.5), (20, 1.0)))
    cost = StepCost(fixed=0.1, per_area=0.4)
    budget = {"batches_per_epoch": 10, "full": (320, 320), "evaluation": 2.0, "eval_every": 5}
    epochs = epochs_within(100.0, recipe, cost, **budget)
    half = round(20 / 40 * epochs)

    def seconds(count: int, small: int) -> float:
        return 10 * (small * cost.seconds(0.25) + (count - small) * cost.seconds(1.0)) + math.ceil(count / 5) * 2.0

    assert seconds(epochs, half) <= 100.0 < seconds(epochs + 1, round(20 / 40 * (epochs + 1)))
    with pytest.raises(DataError, match=r"One epoch takes .* more than the 0\.05 minutes allowed"):
        epochs_within(3.0, recipe, StepCost(0.0, 1.0), **budget)


def test_checkpoints_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_atomic({"value": torch.ones(2)}, path)
    with pytest.raises(TypeError):
        save_atomic({"value": (i for i in range(3))}, path)  # generators cannot be written
    assert torch.equal(load_checkpoint(path)["value"], torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_unusable_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    missing, text, other, old = (tmp_path / name for name in ("a.pt", "b.pt", "c.pt", "d.pt"))
    text.write_text("hello")
    torch.save({"model": {}}, other)
    save_atomic({"version": 99}, old)
    for path, message in [
        (missing, "does not exist"),
        (text, "cannot be read"),
        (other, "is not a Carpus training checkpoint"),
        (old, "of version 99; this Carpus reads version 1"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            load_checkpoint(path)
        assert str(path) in str(caught.value)
    half = tmp_path / "half.pt"
    save_atomic({"classes": {"names": ["a"], "dataset_ids": [1]}}, half)
    with pytest.raises(DataError, match="lacks the field 'input_size'"):
        load_trained_weights(half)


def test_fine_tuning_keeps_what_it_knows_of_classes_by_name() -> None:
    torch.manual_seed(0)
    old, new = build_model("deimv2", "atto", 3), build_model("deimv2", "atto", 4, (224, 224))
    fresh = {name: value.clone() for name, value in new.state_dict().items()}
    shared = fill_from(new, old.state_dict(), ("mug", "can", "ball"), ("ball", "box", "mug", "can"), Path("x.pt"))
    assert shared == ["ball", "mug", "can"]
    given, filled = old.state_dict(), new.state_dict()
    head = "decoder.enc_score_head.weight"
    assert torch.equal(filled[head], torch.stack([given[head][2], fresh[head][1], given[head][0], given[head][1]]))
    embedding = "decoder.denoising_class_embed.weight"
    assert torch.equal(filled[embedding][4], given[embedding][3])
    stem = "backbone.stem.stem1.conv.weight"
    assert torch.equal(filled[stem], given[stem])
    assert torch.equal(filled["decoder.anchors"], fresh["decoder.anchors"])


def test_fine_tuning_from_another_variant_is_refused() -> None:
    state = build_model("deimv2", "pico", 3).state_dict()
    with pytest.raises(DataError, match=r"x.pt does not fit the model: .* has shape .* instead of .*; and \d+ more"):
        fill_from(build_model("deimv2", "atto", 3), state, ("a", "b", "c"), ("a", "b", "c"), Path("x.pt"))


def test_category_map_refuses_repetition() -> None:
    with pytest.raises(DataError, match="name 'a' is used by more than one class"):
        CategoryMap(("a", "a"), (1, 2))
    with pytest.raises(DataError, match="dataset id 1 is used by more than one class"):
        CategoryMap(("a", "b"), (1, 1))


def test_first_interrupt_asks_and_a_later_one_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(engine_interrupt.time, "monotonic", lambda: now[0])
    previous = signal.getsignal(signal.SIGINT)
    with InterruptGuard() as guard:
        os.kill(os.getpid(), signal.SIGINT)
        assert guard.requested
        os.kill(os.getpid(), signal.SIGTERM)  # the same wish, sent to the group and passed on by a parent
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += 1.5
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is previous
