"""Files that were made to cost memory or time, or to pass for weights while they ask for calls."""

from __future__ import annotations

import pickle
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from carpus.models.pickled_module import Record, module_state, read_records
from carpus.models.published.fit import compare
from carpus.models.published.reader import read_published
from carpus.models.published.rules import Rules
from carpus.runtime.errors import DataError
from tests.official_files import pickled_detector

STATE = {"model.0.weight": torch.ones(2), "model.0.running_mean": torch.zeros(2)}


def write(path: Path, program: bytes) -> Path:
    """A file of torch.save whose object is what a program of the pickle machine makes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w/data.pkl", program)
    return path


def text(value: str) -> bytes:
    return b"\x8c" + struct.pack("<B", len(value)) + value.encode()


def called(module: str, name: str) -> bytes:
    """The instructions that take a function by its name and call it with nothing."""
    return text(module) + text(name) + b"\x93" + b")R"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (called("os", "abort"), r"would run code .* it calls os\.abort"),
        (called("torch.serialization", "os.system"), r"would run code .* it calls torch\.serialization:os\.system"),
        (called("foreign", "subprocess.Popen"), r"would run code .* it calls foreign:subprocess\.Popen"),
        (called("torch.hub", "load"), r"would run code .* it calls torch\.hub\.load"),
        (called("torch.storage", "_load_from_bytes"), r"would run code .* it calls torch\.storage\._load_from_bytes"),
        (called("numpy.f2py.crackfortran", "getlincoef"), r"would run code .* calls numpy\.f2py\.crackfortran"),
        (called("types", "FunctionType"), r"would run code .* it calls types\.FunctionType"),
        (called("foreign", "start"), r"would run code .* it calls foreign\.start"),
        (called("builtins", "getattr") + b")R", r"would run code .* it calls builtins\.getattr\(\)"),
        (b"(ios\nabort\n", r"it would run code by the instruction INST"),
        (b"(" + text("os") + text("abort") + b"\x93o", r"it would run code by the instruction OBJ"),
    ],
)
def test_calls_cannot_be_hidden(program: bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "w.pt", b"\x80\x04" + program + b".")
    with pytest.raises(DataError, match=message):
        read_published(path)


def test_settings_of_a_class_of_the_authors_are_no_program(tmp_path: Path) -> None:
    torch.save({"model": STATE}, tmp_path / "plain.pt")
    program = b"\x80\x04}" + text("args") + called("foreign.utils", "Settings") + b"s."
    assert read_records(write(tmp_path / "w.pt", program)).calls == ("foreign.utils.Settings",)
    with pytest.raises(DataError, match="holds no weights"):
        read_published(tmp_path / "w.pt")


def test_many_views_of_one_storage_take_the_memory_of_one(tmp_path: Path) -> None:
    whole = torch.zeros(1 << 20)
    torch.save([whole.view(1024, 1024) for _ in range(200)], tmp_path / "views.pt")
    found = read_records(tmp_path / "views.pt").content
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1


def test_modules_inside_two_others_are_not_walked_for_ever() -> None:
    def module(children: dict[str, Record], **parameters: Tensor) -> Record:
        made = Record()
        made.attributes |= {"_parameters": parameters, "_buffers": {}, "_modules": children}
        return made

    shared = module({}, weight=torch.ones(1))
    for _ in range(3):
        shared = module({"a": shared, "b": shared})
    assert len(module_state(shared)) == 8
    for _ in range(60):
        shared = module({"a": shared, "b": shared})
    started = time.perf_counter()
    with pytest.raises(DataError, match="its submodules stand in each other again and again"):
        module_state(shared)
    assert time.perf_counter() - started < 20.0


def test_a_device_is_a_name(tmp_path: Path) -> None:
    torch.save({"device": torch.device("cuda", 1), "model": STATE}, tmp_path / "good.pt")
    assert read_records(tmp_path / "good.pt").content["device"] in ("cuda:1", "cuda")
    program = b"\x80\x04ctorch\ndevice\n]\x85R."
    with pytest.raises(DataError, match="a device that is named by a list"):
        read_records(write(tmp_path / "w.pt", program))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickling(protocol: int, tmp_path: Path) -> None:
    with pickled_detector(STATE, half=False) as net:
        torch.save({"model": net}, tmp_path / "w.pt", pickle_protocol=protocol)
    found = read_published(tmp_path / "w.pt").state
    assert list(found) == list(STATE)  # without the buffer that a set names as not persistent
    assert protocol <= pickle.HIGHEST_PROTOCOL


@pytest.mark.parametrize("value", [1e300, float("nan"), float("-inf")])
def test_numbers_must_be_finite_as_the_network_holds_them(value: float) -> None:
    own: dict[str, Any] = dict(nn.Linear(1, 1, bias=False).state_dict())
    rules = Rules("a network", (), "", lambda state: None)
    given = torch.tensor([[value]], dtype=torch.float64)
    assert compare(own, {"weight": given}, rules).contradictions == (("weight", "has values that are not finite"),)
    assert compare(own, {"weight": torch.tensor([[3e38]], dtype=torch.float64)}, rules).complete
