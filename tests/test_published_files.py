"""Layouts of published files: what is found in each, what is preferred, and what is refused without running it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from carpus.models.published.reader import read_published
from carpus.runtime.errors import DataError
from tests.official_files import deimv2_training, lw_detr_training, pickled_detector

STATE = {
    "model.0.conv.weight": torch.arange(12.0).reshape(2, 6),
    "model.0.bn.running_mean": torch.tensor([1.0, -2.0]),
    "model.0.bn.num_batches_tracked": torch.tensor(7),
    "model.1.dfl.conv.weight": torch.arange(4.0).reshape(1, 4, 1, 1),
}
OTHER = {name: value + 1 for name, value in STATE.items()}


def prefixed(prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in STATE.items()}


@pytest.mark.parametrize(
    ("content", "layout", "choice", "others"),
    [
        (STATE, "the top, state dict", "model", ()),
        ({"model": STATE, "last_epoch": 3}, "'model', state dict", "model", ()),
        ({"state_dict": STATE}, "'state_dict', state dict", "model", ()),
        (deimv2_training(STATE, OTHER), "'ema.module', state dict", "ema", ("'model'",)),
        (lw_detr_training(STATE), "'model', state dict", "model", ()),
        (lw_detr_training(OTHER, STATE), "'ema_model', state dict", "ema", ("'model'",)),
        ({"model": STATE, "ema_model": {}}, "'model', state dict", "model", ()),
        ({"model": OTHER, "ema": STATE}, "'ema', state dict", "ema", ("'model'",)),
        ({"model": prefixed("module.")}, "'model', state dict", "model", ()),
        (prefixed("_orig_mod.module."), "the top, state dict", "model", ()),
        (prefixed("model."), "the top, state dict", "model", ()),
    ],
)
def test_state_dicts(content: Any, layout: str, choice: str, others: tuple[str, ...], tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pth")
    found = read_published(tmp_path / "w.pth")
    assert (found.layout, found.choice, found.others) == (layout, choice, others)
    assert list(found.state) == list(STATE)
    assert all(torch.equal(found.state[name], value) for name, value in STATE.items())


def test_trained_weights_on_request(tmp_path: Path) -> None:
    torch.save(lw_detr_training(OTHER, STATE), tmp_path / "w.pth")
    found = read_published(tmp_path / "w.pth", "model")
    assert (found.layout, found.others) == ("'model', state dict", ("'ema_model'",))
    assert torch.equal(found.state["model.0.bn.running_mean"], OTHER["model.0.bn.running_mean"])
    assert found.not_made == ("argparse.Namespace",)
    assert found.facts == {"epoch": 59}


def test_the_format_of_old_torch(tmp_path: Path) -> None:
    torch.save(lw_detr_training(STATE), tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert torch.equal(read_published(tmp_path / "w.pth").state["model.0.conv.weight"], STATE["model.0.conv.weight"])


def test_safetensors(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "w.safetensors")
    found = read_published(tmp_path / "w.safetensors")
    assert found.layout == "safetensors"
    assert all(torch.equal(found.state[name], value) for name, value in STATE.items())
    with pytest.raises(DataError, match="holds one set of weights; leave 'ema' out"):
        read_published(tmp_path / "w.safetensors", "ema")


@pytest.mark.parametrize(
    ("wrap", "place", "choice"),
    [
        (lambda net: {"model": net, "ema": None, "epoch": -1, "version": "8.2.29"}, "'model'", "model"),
        (lambda net: {"model": None, "ema": net, "updates": 10}, "'ema'", "ema"),
        (lambda net: net, "the top", "model"),
    ],
    ids=["stripped", "training", "alone"],
)
def test_pickled_modules(wrap: Callable[[nn.Module], Any], place: str, choice: str, tmp_path: Path) -> None:
    with pickled_detector(STATE, {1: "mug", 0: "can"}) as net:
        torch.save(wrap(net), tmp_path / "w.pt")
    found = read_published(tmp_path / "w.pt")
    assert (found.layout, found.choice) == (f"{place}, pickled module foreign_detector.DetectionModel", choice)
    assert found.class_names == ("can", "mug")
    assert found.facts["scale"] == "n"
    assert "foreign_detector.Block" in found.not_made
    assert list(found.state) == list(STATE)  # without the buffer that is not persistent
    for name, value in STATE.items():
        expected = value.half() if value.is_floating_point() else value
        assert torch.equal(found.state[name], expected), name


class Evil:
    """Would make a folder when it is unpickled the usual way."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


class Settings:
    """A plain object of a class of its own."""

    def __init__(self) -> None:
        self.lr = 1e-3


def _torchscript(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(1, 1)), path)


def _cut(path: Path) -> None:
    torch.save({"model": STATE}, path)
    path.write_bytes(path.read_bytes()[:900])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.mkdir(), "is a directory"),
        (_cut, "is cut off; copy it again"),
        (lambda p: p.write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 99), "no file of torch.save .* starts with b'.x89P'"),
        (lambda p: p.write_bytes(b"\xff\xd8\xff\xe0\0\x10JFIF"), "no file of torch.save .* starts with b'.xff.xd8'"),
        (_torchscript, "TorchScript archive, which is a program and not weights"),
        (lambda p: torch.save({"model": {}}, p), "holds no weights; expected tensors by name"),
        (lambda p: torch.save({"model": {**STATE, "lr": 3}}, p), "'lr' under 'model' is a int"),
        (lambda p: torch.save(torch.zeros(3), p), "holds no weights"),
        (lambda p: torch.save({"model": nn.Identity()}, p), "a module without a single weight under 'model'"),
        (
            lambda p: torch.save({"model": Settings()}, p),
            "an object of tests.test_published_files.Settings under 'model', .* save model.state_dict\\(\\)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_refused(write: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    write(path)
    with pytest.raises(DataError, match=message) as caught:
        read_published(path)
    assert "w.pth" in str(caught.value)


@pytest.mark.parametrize("key", ["model", "args", "extra"])
def test_a_file_that_would_run_code_is_refused_and_not_run(key: str, tmp_path: Path) -> None:
    torch.save({"model": STATE, key: Evil(tmp_path / "made")}, tmp_path / "w.pth")
    with pytest.raises(
        DataError, match=rf"would run code .* it calls {os.mkdir.__module__}\.mkdir\. Nothing of it was"
    ):
        read_published(tmp_path / "w.pth")
    assert not (tmp_path / "made").exists()


def test_harmless_objects_beside_weights_are_left_alone(tmp_path: Path) -> None:
    content = {"model": STATE, "args": argparse.Namespace(path=Path("runs")), "settings": Settings()}
    torch.save(content, tmp_path / "w.pth")
    found = read_published(tmp_path / "w.pth")
    assert "tests.test_published_files.Settings" in found.not_made
    assert list(found.state) == list(STATE)
