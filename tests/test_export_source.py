"""Checkpoints to sources: what is read, and what each wrong file is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from carpus.cli.main import main
from carpus.export.source import load_source
from carpus.models.build import build_model
from carpus.models.data.coco import CategoryMap
from carpus.models.engine_checkpoint import save_atomic
from carpus.models.published.classes import read_class_names
from carpus.runtime.errors import DataError

NAMES = ["cup", "杯"]


def state(num_classes: int = 2, variant: str = "atto") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return build_model("deimv2", variant, num_classes).state_dict()


def training_content(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "family": "deimv2",
        "variant": "atto",
        "input_size": [320, 320],
        "classes": {"names": NAMES, "dataset_ids": [4, 9]},
        "ema": {"module": state()},
        "progress": {"epoch": 3},
        "metrics": {"ap": 0.5, "per_class": {"cup": 0.5}},
        "recipe": {"lr": 1e-3},
        "seed": 7,
    }
    content.update(changes)
    return content


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    save_atomic(training_content(), tmp_path / "best.pt")
    return tmp_path / "best.pt"


def test_training_checkpoint(trained: Path) -> None:
    source = load_source(trained, name="cups", description="Two cups.")
    assert (source.family, source.variant, source.input_size) == ("deimv2", "atto", (320, 320))
    assert [(info.name, info.dataset_id) for info in source.classes] == [("cup", 4), ("杯", 9)]
    assert (source.name, source.description) == ("cups", "Two cups.")
    assert source.checkpoint_sha256 is not None
    assert len(source.checkpoint_sha256) == 64
    assert dict(source.recipe) == {"epochs": "3", "seed": "7", "recipe.lr": "0.001", "metrics.ap": "0.5"}
    assert not source.module.training
    expected = state()
    for name, value in source.module.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"model": s}, lambda s: {"ema": {"module": s}, "model": {}}])
def test_published_weights(wrap: Callable[[dict[str, torch.Tensor]], Any], tmp_path: Path) -> None:
    path = tmp_path / "published.pth"
    torch.save(wrap(state(80)), path)
    source = load_source(path, family="deimv2", variant="atto")
    assert source.name == "deimv2-atto"
    assert (source.classes[0].name, source.classes[0].dataset_id) == ("person", 1)
    assert (source.classes[79].name, source.classes[79].dataset_id) == ("toothbrush", 90)


def write(content: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path)


def without(name: str) -> dict[str, torch.Tensor]:
    found = state()
    del found[name]
    return found


GIVEN = {"family": "deimv2", "variant": "atto"}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda path: None, {}, r"Checkpoint .*x.pt does not exist; give a file such as runs/NAME/best.pt"),
        (lambda path: path.mkdir(), {}, r"Checkpoint .*x.pt is a directory"),
        (
            lambda path: path.write_text("hello"),
            GIVEN,
            r"x.pt cannot be read: it is no file of torch.save and no .safetensors, but starts with b'he'",
        ),
        (
            write([1, 2]),
            GIVEN,
            r"x.pt holds no weights; expected tensors by name under 'ema.module', 'ema_model', 'model'",
        ),
        (write(state()), {}, r"is not a Carpus training checkpoint, .* give --family and --variant"),
        (write(state()), GIVEN, r"has 2 classes and does not name them; give --class-names or --dataset"),
        (
            write(state(80)),
            {**GIVEN, "variant": "huge"},
            r"unknown deimv2 variant 'huge'; known variants: atto",
        ),
        (write(state(80)), {**GIVEN, "family": "yolo"}, r"unknown model family 'yolo'"),
        (write(state(80)), {**GIVEN, "variant": "pico"}, r"does not fit DEIMv2 pico with 80 classes: .* missing: "),
        (write({"a.weight": torch.zeros(2)}), GIVEN, r"has no head of classes, so it is not a deimv2 atto"),
        (
            lambda path: save_atomic(training_content(ema={"module": without("decoder.enc_score_head.bias")}), path),
            {},
            r"does not fit DEIMv2 atto with 2 classes: 1 missing: decoder.enc_score_head.bias",
        ),
        (
            lambda path: save_atomic(training_content(variant="femto"), path),
            {},
            r"does not fit DEIMv2 femto with 2 classes: .* of another shape: ",
        ),
        (
            lambda path: save_atomic(training_content(), path),
            {"variant": "femto"},
            r"holds variant 'atto', not 'femto'; leave --variant out",
        ),
        (
            lambda path: save_atomic(training_content(), path),
            {"classes": CategoryMap(("a", "b", "c"), (1, 2, 3))},
            r"has 2 classes, 3 were given; leave them out to take the checkpoint's own",
        ),
        (
            lambda path: save_atomic({key: v for key, v in training_content().items() if key != "classes"}, path),
            {},
            r"x.pt lacks the field 'classes'",
        ),
    ],
)
def test_wrong_checkpoints(make: Callable[[Path], None], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    make(path)
    with pytest.raises(DataError, match=message):
        load_source(path, **options)


def test_class_names_file(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("cup\n\nBecher ü\n", encoding="utf-8")
    assert read_class_names(path) == CategoryMap(("cup", "Becher ü"), (0, 1))
    path.write_text("\n")
    with pytest.raises(DataError, match="expected one name a line, the file is empty"):
        read_class_names(path)
    path.write_text("cup\ncup\n")
    with pytest.raises(DataError, match="'cup' is used by more than one class"):
        read_class_names(path)
    with pytest.raises(DataError, match="cannot be read as a text file"):
        read_class_names(tmp_path / "absent.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-images", "0"], "--num-images: expected at least 1, got 0"),
        (["--class-names", "a.txt", "--dataset", "d"], "give --class-names or --dataset, not both"),
        (["--images", "/no/such/folder"], "images '/no/such/folder': no such folder"),
    ],
)
def test_command_refuses(
    arguments: list[str], message: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained), "--out", str(tmp_path / "out.carpus"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.carpus").exists()


@pytest.mark.slow
def test_command_exports_a_zip_that_verifies(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "my.carpus"
    assert main(["export", str(trained), "--out", str(out), "--zip", "--num-images", "2", "--precision", "fp16"]) == 0
    assert "2 artefacts" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "my.carpus.zip")]) == 0
