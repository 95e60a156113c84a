"""Published weights: every layout, and what is said when they do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from carpus.models.deimv2.checkpoint import RULES, load_into
from carpus.models.deimv2.config import get_config
from carpus.models.deimv2.model import DEIMv2
from carpus.models.published.fit import fill
from carpus.models.published.reader import read_published
from carpus.runtime.errors import DataError


def fresh(num_classes: int = 4, seed: int = 0) -> DEIMv2:
    torch.manual_seed(seed)
    return DEIMv2(get_config("atto", num_classes).with_input_size(160, 160))


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return fresh(seed=1).state_dict()


def same(model: DEIMv2, state: dict[str, Tensor], but: str = " ") -> bool:
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items() if but not in name)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"model": s, "last_epoch": 3},
        lambda s: {"state_dict": s},
        lambda s: {"model": {k: v * 0 for k, v in s.items()}, "ema": {"module": s, "updates": 9}},
        lambda s: {"model": {f"module.{name}": value for name, value in s.items()}},
    ],
    ids=["plain", "model", "state_dict", "ema", "data-parallel"],
)
def test_pth_layouts(wrap, state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(wrap(state), tmp_path / "w.pth")
    model = fresh()
    report = fill(model, read_published(tmp_path / "w.pth").state, RULES, "w.pth")
    assert same(model, state)
    assert report.renewed == ()


def test_safetensors_without_aliases(state: dict[str, Tensor], tmp_path: Path) -> None:
    shared = ("decoder.decoder.up", "decoder.decoder.reg_scale", "decoder.dec_bbox_head.0", "decoder.dec_bbox_head.1")
    kept = {name: value for name, value in state.items() if not name.startswith(shared)}
    assert len(kept) < len(state)
    save_file(kept, tmp_path / "w.safetensors")
    model = fresh()
    assert "the classification rows among them" in load_into(model, tmp_path / "w.safetensors")
    assert same(model, state)


def test_constants_as_floats_and_other_input_size(state: dict[str, Tensor]) -> None:
    changed = {**state, "decoder.reg_scale": torch.tensor([4.0]), "decoder.anchors": torch.zeros(1, 7, 4)}
    model = fresh()
    fill(model, changed, RULES, "w")
    assert same(model, state)


def test_other_classes_keep_the_rest(tmp_path: Path) -> None:
    source = fresh(num_classes=80, seed=2).state_dict()
    torch.save({"model": source}, tmp_path / "w.pth")
    model = fresh(num_classes=4)
    heads = {name: value.clone() for name, value in model.state_dict().items() if "score_head" in name}
    line = load_into(model, tmp_path / "w.pth")
    assert "for 4 classes instead of 80 the classification rows start anew: 9 entries" in line
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in heads.items())
    unlike = [name for name in after if not torch.equal(after[name], source[name])]
    assert {name.split(".")[1] for name in unlike} == {"enc_score_head", "dec_score_head", "denoising_class_embed"}


def without(name: str):
    return lambda s: {key: value for key, value in s.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("backbone.stem.stem1.conv.weight"), "1 missing: backbone.stem.stem1.conv.weight"),
        (lambda s: {**s, "backbone.extra": torch.zeros(1)}, "1 left over: backbone.extra"),
        (
            lambda s: {**s, "backbone.stem.stem1.bn.bias": torch.zeros(3)},
            r"1 of another shape: backbone.stem.stem1.bn.bias is \(3,\), expected \(16,\)",
        ),
        (
            lambda s: {**s, "decoder.enc_score_head.bias": torch.zeros(80)},
            r"decoder.enc_score_head.bias is \(80,\), expected \(4,\)",
        ),
        (lambda s: {**s, "decoder.reg_scale": torch.tensor([8.0])}, r"decoder.reg_scale is 8.0, expected 4.0"),
        (lambda s: {}, "missing: .*, .*, .*, .*, ...; .* does not fit|does not fit .* missing"),
    ],
)
def test_what_does_not_fit(change, message: str, state: dict[str, Tensor]) -> None:
    model = fresh()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(DataError, match=message):
        fill(model, change(state), RULES, "weights.pth")
    assert same(model, before)


class Evil:
    def __reduce__(self):
        return (print, ("never",))


def _spoil_header(path: Path) -> None:
    path.write_bytes((20).to_bytes(8, "little") + b"{" * 20)


def _spoil_offsets(path: Path) -> None:
    text = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)


def _spoil_type(path: Path) -> None:
    text = json.dumps({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("none.pth", lambda p: None, "does not exist"),
        (
            "text.pth",
            lambda p: p.write_text("no"),
            "is no file of torch.save and no .safetensors, but starts with b'no'",
        ),
        ("picture.pth", lambda p: p.write_bytes(b"\xff\xd8\xff\xe0\0\x10JFIF"), "is no file of torch.save and no"),
        ("evil.pth", lambda p: torch.save({"model": Evil()}, p), "would run code .* it calls __builtin__.print"),
        ("empty.pth", lambda p: torch.save({"model": {}}, p), "holds no weights"),
        ("list.pth", lambda p: torch.save([torch.zeros(1)], p), "holds no weights"),
        ("short.safetensors", lambda p: p.write_bytes(b"abc"), "cut off or no safetensors file"),
        ("header.safetensors", _spoil_header, "cut off or no safetensors file .*eader"),
        ("offsets.safetensors", _spoil_offsets, "cut off or no safetensors file"),
        ("type.safetensors", _spoil_type, "cut off or no safetensors file"),
    ],
)
def test_unreadable_files(name: str, write, message: str, tmp_path: Path) -> None:
    write(tmp_path / name)
    with pytest.raises(DataError, match=message):
        read_published(tmp_path / name)
