"""From published weights to other classes: everything but the classification rows is kept, in every family."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from carpus.cli.main import main
from carpus.export.source import load_source
from carpus.models.build import FAMILIES, build_model
from carpus.models.data.coco import CategoryMap
from carpus.models.engine_checkpoint import load_checkpoint, load_trained_weights
from carpus.models.engine_init import initialise
from carpus.runtime.errors import DataError
from tests.official_files import official_state, schema_folder
from tests.test_train_run import FAMILY_RECIPE, configuration, run
from tests.toy_coco import write_toy

CATEGORIES = CategoryMap(("bottle", "widget", "cup"), (1, 2, 3))
FILES = [("deimv2", "atto", 9), ("lw_detr", "tiny", 28), ("mamba_yolo", "T", 6), ("yolo_master", "v0_1-n", 6)]
"""Family, variant, and the entries that hold a row a class."""
OF_INPUT_SIZE = r"decoder\.(anchors|valid_mask)"
SIZES = {"deimv2": (160, 160), "lw_detr": (192, 192), "mamba_yolo": (64, 64), "yolo_master": (64, 64)}
"""Small inputs [px]."""


@functools.cache
def official(family: str, variant: str) -> dict[str, Tensor]:
    """Not to be changed."""
    return official_state(schema_folder(family, variant))


def fresh(family: str, variant: str) -> Any:
    torch.manual_seed(5)
    return build_model(family, variant, len(CATEGORIES), SIZES[family])


@pytest.mark.parametrize(("family", "variant", "rows"), FILES)
def test_all_but_the_classification_rows_is_kept(family: str, variant: str, rows: int, tmp_path: Path) -> None:
    state = official(family, variant)
    torch.save({"model": state}, tmp_path / "w.pth")
    model = fresh(family, variant)
    line = initialise(model, family, tmp_path / "w.pth", CATEGORIES)
    count = 91 if family == "lw_detr" else 80
    assert f"for 3 classes instead of {count} the classification rows start anew: {rows} entries" in line
    unlike = []
    for name, value in model.state_dict().items():
        if re.fullmatch(OF_INPUT_SIZE, name):
            continue
        if value.shape != state[name].shape:
            unlike.append(name)
            assert value.shape[1:] == state[name].shape[1:]
            assert len(value) in (3, 4)
        else:
            assert torch.equal(value.to(state[name].dtype), state[name]), name
    assert len(unlike) == rows
    assert all(re.fullmatch(FAMILIES[family].published.class_rows, name) for name in unlike)
    assert model.eval()(torch.rand(1, 3, *model.config.input_size))["pred_logits"].shape[-1] == 3


@pytest.mark.parametrize(("family", "variant", "rows"), FILES)
def test_imported_weights_keep_the_rows_of_known_classes(family: str, variant: str, rows: int, tmp_path: Path) -> None:
    state = official(family, variant)
    torch.save({"model": state}, tmp_path / "w.pth")
    arguments = ["--family", family, "--variant", variant, "--out", str(tmp_path / "in")]
    assert main(["import", str(tmp_path / "w.pth"), *arguments]) == 0
    model, before = fresh(family, variant), fresh(family, variant).state_dict()
    line = initialise(model, family, tmp_path / "in", CATEGORIES)
    assert line.endswith("imported from w.pth, 2 of 3 classes known to it, the rows of others start anew)")
    offset = 44 if family == "lw_detr" else 39  # bottle, as COCO's category id and in its order
    cup = 47 if family == "lw_detr" else 41
    seen = 0
    for name, value in model.state_dict().items():
        if re.fullmatch(FAMILIES[family].published.class_rows, name):
            seen += 1
            assert torch.equal(value[0], state[name][offset]), name
            assert torch.equal(value[2], state[name][cup]), name
            if value.shape == before[name].shape:
                assert torch.equal(value[1], before[name][1]), name
        elif not re.fullmatch(OF_INPUT_SIZE, name):
            assert torch.equal(value.to(state[name].dtype), state[name]), name
    assert seen == rows


def test_wrong_starts(tmp_path: Path) -> None:
    torch.save({"model": official("lw_detr", "tiny")}, tmp_path / "w.pth")
    with pytest.raises(DataError, match=r"does not fit LW-DETR small .* This file is lw_detr tiny\.$"):
        initialise(fresh("lw_detr", "small"), "lw_detr", tmp_path / "w.pth", CATEGORIES)
    assert main(["import", str(tmp_path / "w.pth"), "--out", str(tmp_path / "in")]) == 0
    with pytest.raises(DataError, match=r"holds lw_detr tiny; train that family, or start from deimv2 weights"):
        initialise(fresh("deimv2", "atto"), "deimv2", tmp_path / "in", CATEGORIES)
    with pytest.raises(DataError, match=r"Checkpoint .*gone to start from does not exist"):
        initialise(fresh("deimv2", "atto"), "deimv2", tmp_path / "gone", CATEGORIES)


def test_the_same_seed_gives_the_same_new_rows(tmp_path: Path) -> None:
    torch.save({"model": official("mamba_yolo", "T")}, tmp_path / "w.pth")
    models = [fresh("mamba_yolo", "T") for _ in range(2)]
    for model in models:
        torch.manual_seed(8)
        initialise(model, "mamba_yolo", tmp_path / "w.pth", CATEGORIES)
    assert all(torch.equal(a, b) for a, b in zip(*(model.state_dict().values() for model in models), strict=True))
    assert models[0].head.class_width == 80


@pytest.mark.slow
def test_training_from_imported_weights_stops_and_goes_on(tmp_path: Path) -> None:
    """The class branch is wider than a network for three classes has it, also in what is resumed and exported."""
    torch.save({"model": official("yolo_master", "esmoe-n")}, tmp_path / "w.pth")
    assert main(["import", str(tmp_path / "w.pth"), "--out", str(tmp_path / "in")]) == 0
    root = write_toy(tmp_path / "data", train=6, heldout=2)
    options: dict[str, Any] = {"family": "yolo_master", "variant": "esmoe-n", "input_size": (64, 64), "eval_every": 9}
    options |= {"recipe": FAMILY_RECIPE, "init": tmp_path / "in", "picture_every": 0, "tensorboard": False}
    stopped, listener = run(configuration(root, tmp_path / "out", **options), step=1)
    assert not stopped.finished
    assert any("starting from" in text and "imported from w.pth" in text for text in listener.messages)
    width = load_checkpoint(tmp_path / "out" / "last.pt")["model"]["model.25.cv3.0.2.weight"].shape[1]
    assert width == 80
    result, _ = run(configuration(root, tmp_path / "out", **options))
    assert result.finished
    trained = load_trained_weights(result.best_checkpoint)
    assert trained.state_dict["model.25.cv3.0.2.weight"].shape[:2] == (3, 80)
    module = load_source(result.best_checkpoint).module
    for name, value in module.state_dict().items():
        assert torch.equal(value, trained.state_dict[name]), name
