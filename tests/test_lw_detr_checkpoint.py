"""Published LW-DETR weights: every layout, another class set, and what is said when they do not fit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from carpus.models.data.coco import CategoryMap
from carpus.models.engine_init import initialise
from carpus.models.lw_detr.checkpoint import RULES
from carpus.models.lw_detr.model import LWDETR
from carpus.models.published.fit import fill
from carpus.models.published.reader import read_published
from carpus.models.published.start import start_from
from carpus.runtime.errors import DataError
from tests.tiny_lw_detr import small_config


def fresh(num_classes: int = 4, seed: int = 0) -> LWDETR:
    torch.manual_seed(seed)
    return LWDETR(small_config().with_num_classes(num_classes))


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return fresh(seed=1).state_dict()


class Settings:
    """Something that reading a file must not make."""


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"model": s},
        lambda s: {"model": s, "ema_model": {}, "epoch": 3, "args": argparse.Namespace(lr=1e-4, names=["a"])},
        lambda s: {"model": {f"module.{name}": value for name, value in s.items()}},
        lambda s: s,
    ],
    ids=["model", "training", "data-parallel", "plain"],
)
def test_official_layouts(wrap: Any, state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(wrap(state), tmp_path / "w.pth")
    model = fresh()
    line = start_from(model, tmp_path / "w.pth", RULES)
    assert f"{len(state)} entries kept, the classification rows among them" in line
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_training_starts_from_a_published_file(state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({"model": state}, tmp_path / "w.pth")
    model = fresh(num_classes=2)
    line = initialise(model, "lw_detr", tmp_path / "w.pth", CategoryMap(("cup", "box"), (1, 2)))
    rows = 2 * (model.config.decoder.num_groups + 1)
    assert line.endswith(f"for 2 classes instead of 4 the classification rows start anew: {rows} entries)")
    assert torch.equal(model.query_feat.weight, state["query_feat.weight"])


def test_averaged_weights_go_first(state: dict[str, Tensor], tmp_path: Path) -> None:
    zeros = {name: value * 0 for name, value in state.items()}
    torch.save({"model": zeros, "ema_model": state}, tmp_path / "w.pth")
    averaged = read_published(tmp_path / "w.pth")
    assert averaged.choice == "ema"
    assert averaged.others == ("'model'",)
    assert all(torch.equal(averaged.state[name], state[name]) for name in state)
    trained = read_published(tmp_path / "w.pth", "model")
    assert not any(value.any() for value in trained.state.values())
    torch.save({"model": zeros}, tmp_path / "none.pth")
    with pytest.raises(DataError, match=r"no averaged weights \('ema'\); it has weights under 'model'"):
        read_published(tmp_path / "none.pth", "ema")


def test_objects_of_other_classes_are_not_made(state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({"model": state, "args": Settings()}, tmp_path / "w.pth")
    weights = read_published(tmp_path / "w.pth")
    assert weights.not_made == (f"{Settings.__module__}.Settings",)
    assert all(torch.equal(weights.state[name], state[name]) for name in state)


def test_another_class_set_keeps_all_but_the_class_rows(state: dict[str, Tensor]) -> None:
    model = fresh(num_classes=7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = fill(model, state, RULES, "w", other_classes=True)
    groups = model.config.decoder.num_groups
    assert len(report.renewed) == 2 * (groups + 1)
    for name, value in model.state_dict().items():
        expected = before[name] if "class_embed" in name else state[name]
        assert ("class_embed" in name) == (name in report.renewed)
        assert torch.equal(value, expected), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("query_feat.weight"), "1 missing: query_feat.weight"),
        (lambda s: s.update(extra=torch.zeros(1)), "1 left over: extra"),
        (lambda s: s.update({"class_embed.bias": torch.zeros(9)}), r"class_embed.bias is \(9,\), expected \(4,\)"),
        (lambda s: s.update({"refpoint_embed.weight": torch.zeros(9, 4)}), r"refpoint_embed.weight is \(9, 4\)"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_loaded(change: Any, message: str, state: dict[str, Tensor]) -> None:
    wrong = dict(state)
    change(wrong)
    model = fresh()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(DataError, match=message):
        fill(model, wrong, RULES, "w")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
