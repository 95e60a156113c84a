"""Pickled modules are read without their classes and without running their code."""

from __future__ import annotations

import os
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from carpus.models.pickled_module import Record, module_state, read_records
from carpus.runtime.errors import DataError


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of classes that exists while files are written, and not when they are read."""
    module = types.ModuleType("foreign_models")

    class Block(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, channels, 3, bias=False)
            self.bn = nn.BatchNorm2d(channels)
            self.register_buffer("anchors", torch.arange(4.0))
            self.register_buffer("scratch", torch.ones(2), persistent=False)
            self.activation = nn.SiLU()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(Block(4), Block(2))
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.names = {0: "can", 1: "mug"}
            self.shape = torch.Size([1, 2])
            self.args = types.SimpleNamespace(task="detect")

    for made in (Block, Net):
        made.__module__, made.__qualname__ = module.__name__, made.__name__
        setattr(module, made.__name__, made)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_whole_module_gives_its_state_dict(foreign: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = foreign.Net().half()
    torch.save({"epoch": 3, "ema": net, "model": None}, tmp_path / "whole.pt")
    del sys.modules["foreign_models"]
    records = read_records(tmp_path / "whole.pt")
    content = records.content
    assert content["epoch"] == 3
    assert "foreign_models.Net" in records.classes
    assert "foreign_models.Net" not in records.calls
    assert content["model"] is None
    record = content["ema"]
    assert isinstance(record, Record)
    assert record.path == "foreign_models.Net"
    assert record.attributes["names"] == {0: "can", 1: "mug"}
    state, expected = module_state(record), net.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name], value), name


def test_views_of_one_storage_keep_their_place(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    torch.save([whole[2:8].view(2, 3).t(), whole], tmp_path / "views.pt")
    view, again = read_records(tmp_path / "views.pt").content
    assert torch.equal(view, whole[2:8].view(2, 3).t())
    assert torch.equal(again, whole)


def test_tensors_with_attributes_and_classes_of_their_own(tmp_path: Path) -> None:
    marked, plain = nn.Parameter(torch.ones(3)), torch.arange(3.0)
    marked._no_weight_decay = True
    plain.note = "of the authors"  # type: ignore[attr-defined]

    class Buffer(torch.Tensor):
        pass

    Buffer.__qualname__ = "Buffer"
    sys.modules[__name__].Buffer = Buffer  # type: ignore[attr-defined]
    torch.save([marked, plain, torch.arange(4.0).as_subclass(Buffer)], tmp_path / "marked.pt")
    del sys.modules[__name__].Buffer  # type: ignore[attr-defined]
    found = read_records(tmp_path / "marked.pt").content
    assert [type(value) for value in found] == [torch.Tensor] * 3
    assert [value.tolist() for value in found] == [[1.0] * 3, [0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]]


def test_a_module_inside_itself_is_damaged(foreign: Any, tmp_path: Path) -> None:
    net = foreign.Net()
    net._modules["again"] = net
    torch.save(net, tmp_path / "endless.pt")
    with pytest.raises(DataError, match=r"its submodules stand in each other again and again"):
        module_state(read_records(tmp_path / "endless.pt").content)


def test_a_number_that_would_take_all_memory_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "huge.pt", "w") as archive:
        archive.writestr("huge/data.pkl", b"\x80\x02}r" + (2**31).to_bytes(4, "little") + b".")
    with pytest.raises(DataError, match="object number 2147483648 in 9 bytes"):
        read_records(tmp_path / "huge.pt")


class Evil:
    """Would make a file when it is unpickled the usual way."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_no_code_of_the_file_runs(tmp_path: Path) -> None:
    torch.save({"model": Evil(tmp_path / "made")}, tmp_path / "evil.pt")
    records = read_records(tmp_path / "evil.pt")
    content = records.content
    assert records.calls == records.classes == (f"{os.mkdir.__module__}.mkdir",)
    assert isinstance(content["model"], Record)
    assert not (tmp_path / "made").exists()
    with pytest.raises(DataError, match="is no pickled module"):
        module_state(content["model"])


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save(torch.zeros(1).expand(1000, 1000), tmp_path / "wide.pt")
    with pytest.raises(DataError, match=r"a tensor of \(1000, 1000\) over 1 numbers"):
        read_records(tmp_path / "wide.pt")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    good = tmp_path / "good.pt"
    torch.save({"a": torch.ones(1000)}, good)
    (tmp_path / "cut.pt").write_bytes(good.read_bytes()[:600])
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, message in (
        ("none.pt", "does not exist"),
        ("cut.pt", "is cut off; copy it again"),
        ("text.pt", "is no file of torch.save and no .safetensors, but starts with b'he'"),
        ("old.pt", "is no file that torch.save wrote, or is damaged"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            read_records(tmp_path / name)
        assert name in str(caught.value)
