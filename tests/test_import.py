"""`carpus import`: every key of the official files of all families, what is written, and what is refused."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from carpus.cli.main import main
from carpus.models.build import FAMILIES, build_model
from carpus.models.data.coco_classes import COCO_CLASSES
from carpus.models.engine_checkpoint import save_atomic
from carpus.models.published.folder import find_config, read_imported
from carpus.models.published.identify import identify
from carpus.models.torch_file import file_sha256
from carpus.runtime.errors import DataError
from tests.official_files import deimv2_training, lw_detr_training, official_state, pickled_detector, schema_folder

NAMES = {index: name for index, (name, _) in enumerate(COCO_CLASSES)}
SMALLEST = [("deimv2", "atto"), ("lw_detr", "tiny"), ("mamba_yolo", "T"), ("yolo_master", "esmoe-n")]


@functools.cache
def official(family: str, variant: str) -> dict[str, Tensor]:
    """Not to be changed."""
    return official_state(schema_folder(family, variant))


def apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each name with memory of its own, as safetensors wants it."""
    return {name: value.clone() for name, value in state.items()}


def write_official(family: str, state: Mapping[str, Tensor], path: Path, names: Mapping[int, str] = NAMES) -> None:
    """A file as the authors of the family publish it."""
    if family == "deimv2":
        torch.save(deimv2_training(dict(state)), path)
    elif family == "lw_detr":
        torch.save(lw_detr_training({name: value * 0 for name, value in state.items()}, dict(state)), path)
    else:
        with pickled_detector(state, names) as net:
            licence = "AGPL-3.0 License (https://example.org)"
            torch.save({"model": net, "ema": None, "epoch": -1, "license": licence}, path)


@pytest.mark.parametrize(("family", "variant"), [*SMALLEST, ("yolo_master", "v0_1-n"), ("deimv2", "s")])
def test_official_files(family: str, variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = official(family, variant)
    write_official(family, state, tmp_path / "published.pth")
    out = tmp_path / "imported"
    arguments = ["--family", family, "--variant", variant] if variant != "s" else []
    assert main(["import", str(tmp_path / "published.pth"), "--out", str(out), *arguments]) == 0
    said = capsys.readouterr().out
    assert f"published.pth: {family} {variant}, {91 if family == 'lw_detr' else 80} classes (COCO's, " in said
    assert "missing 0, left over 0, of another shape 0" in said
    averaged = family in ("deimv2", "lw_detr")
    assert ("averaged weights (EMA); not taken: 'model'" in said) == averaged

    config = json.loads((out / "config.json").read_text())
    yolo = family in ("mamba_yolo", "yolo_master")
    assert (config["family"], config["variant"], config["part"]) == (family, variant, "detector")
    assert config["input_size"] == ([320, 320] if variant == "atto" else [640, 640])
    assert config["classes"]["names"][1 if family == "lw_detr" else 0] == "person"
    assert config["classes"]["dataset_ids"][-1] == 90
    assert config["licence"] == ("AGPL-3.0" if yolo else "NOASSERTION")
    assert config["source"]["file"] == "published.pth"
    assert config["source"]["sha256"] == file_sha256(tmp_path / "published.pth")
    assert config["source"]["averaged"] == averaged

    written = load_file(out / "model.safetensors")
    assert sorted(written) == sorted(state)
    for name, value in state.items():
        if name not in ("decoder.anchors", "decoder.valid_mask"):
            expected = value.half().to(value.dtype) if yolo and value.is_floating_point() else value
            assert torch.equal(written[name].to(value.dtype), expected), name

    report = json.loads((out / "report.json").read_text())
    assert report["complete"]
    taken = [*report["used"], *(entry["name"] for kind in ("constants", "not_taken") for entry in report[kind])]
    assert sorted(taken) == sorted(state)
    assert all(entry["reason"] for kind in ("constants", "not_taken", "absent") for entry in report[kind])
    assert report["counts"] == config["report"]["counts"]
    assert sum(group["keys"] for group in report["groups"].values()) == len(report["used"])


def first(state: Mapping[str, Tensor], end: str) -> str:
    return next(name for name in state if name.endswith(end))


def without(end: str) -> Callable[[dict[str, Tensor]], str]:
    def change(state: dict[str, Tensor]) -> str:
        name = first(state, end)
        del state[name]
        return name

    return change


def added(state: dict[str, Tensor]) -> str:
    state["neck.extra.weight"] = torch.zeros(2)
    return "neck.extra.weight"


def reshaped(state: dict[str, Tensor]) -> str:
    name = first(state, "running_mean")
    state[name] = torch.zeros(len(state[name]) + 1)
    return f"{name} ({len(state[name])},), expected ({len(state[name]) - 1},)"


def spoilt(state: dict[str, Tensor]) -> str:
    name = first(state, "running_var")
    state[name] = state[name] * torch.nan
    return f"{name} has values that are not finite"


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("missing", without("running_mean")),
        ("left_over", added),
        ("misshapen", reshaped),
        ("contradictions", spoilt),
    ],
)
@pytest.mark.parametrize(("family", "variant"), SMALLEST)
def test_whatever_does_not_match_is_named_and_nothing_written(
    family: str,
    variant: str,
    kind: str,
    change: Callable[[dict[str, Tensor]], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = dict(official(family, variant))
    wrong = change(state)
    torch.save({"model": state}, tmp_path / "w.pth")
    options = ["--family", family, "--variant", variant, "--report", str(tmp_path / "report.json")]
    assert main(["import", str(tmp_path / "w.pth"), "--out", str(tmp_path / "out"), *options]) == 2
    told = capsys.readouterr()
    assert f"    {wrong}\n" in told.out
    assert f"does not match {family} {variant}: 1 " in told.err
    assert "Nothing was written." in told.err
    assert not (tmp_path / "out").exists()
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["complete"]
    assert report["counts"][kind] == 1
    assert wrong.startswith(report[kind][0] if isinstance(report[kind][0], str) else report[kind][0]["name"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--family", "lw_detr", "--variant", "large"], "does not match lw_detr large: .* This file is lw_detr tiny."),
        (["--family", "deimv2", "--variant", "atto"], "does not match deimv2 atto: .* This file is lw_detr tiny."),
        (["--family", "mamba_yolo"], "does not fit any variant of mamba_yolo, .* This file is lw_detr tiny."),
        (["--family", "lwdetr"], "unknown model family 'lwdetr' .did you mean 'lw_detr'"),
        (["--family", "lw_detr", "--variant", "hige"], "unknown lw_detr variant 'hige'"),
        (["--variant", "tiny"], "--variant tiny needs --family, one of: deimv2, lw_detr"),
        (["--weights", "ema"], "holds no averaged weights .'ema'.; it has weights under 'model'"),
    ],
)
def test_wrong_names(options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": official("lw_detr", "tiny")}, tmp_path / "w.pth")
    assert main(["import", str(tmp_path / "w.pth"), "--out", str(tmp_path / "out"), *options]) == 2
    told = capsys.readouterr()
    assert re.search(message, told.err), told.err
    assert len(told.out.splitlines()) < 60
    assert not (tmp_path / "out").exists()


def test_no_two_variants_are_alike() -> None:
    shapes = {}
    for family, entry in FAMILIES.items():
        for variant in entry.variants:
            with torch.device("meta"):
                state = build_model(family, variant, 80).state_dict()
            key = frozenset((name, tuple(tensor.shape)) for name, tensor in state.items())
            assert key not in shapes, (family, variant, shapes[key])
            shapes[key] = family, variant
    assert len(shapes) == sum(len(entry.variants) for entry in FAMILIES.values())


@pytest.mark.parametrize(
    ("family", "variant"), [("deimv2", "m"), ("mamba_yolo", "mamba3-B"), ("yolo_master", "paper-l")]
)
def test_a_variant_is_recognised_by_its_shapes(family: str, variant: str) -> None:
    with torch.device("meta"):
        state = build_model(family, variant, 13).state_dict()
    best, *others = identify(state, [family])
    assert (best.family, best.variant, best.num_classes, best.fit.complete) == (family, variant, 13, True)
    assert not any(other.fit.complete for other in others)
    assert best.agreement == 1.0


def test_a_file_that_fits_nothing_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = dict(official("yolo_master", "esmoe-n"))
    missing = without("running_mean")(state)
    torch.save(state, tmp_path / "w.pt")
    assert main(["import", str(tmp_path / "w.pt")]) == 2
    assert f"nearest is yolo_master esmoe-n: 1 missing: {missing}." in capsys.readouterr().err
    torch.save({"a": torch.zeros(1)}, tmp_path / "w.pt")
    assert main(["import", str(tmp_path / "w.pt")]) == 2
    assert "not even in part; its first names are a." in capsys.readouterr().err


def small(num_classes: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return build_model("deimv2", "atto", num_classes).state_dict()


def test_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, names, out = tmp_path / "w.pth", tmp_path / "names.txt", tmp_path / "out"
    torch.save(small(), path)
    assert main(["import", str(path), "--out", str(out)]) == 2
    assert "has 3 classes and does not name them; give --class-names or --dataset" in capsys.readouterr().err
    names.write_text("cup\nbox\n")
    assert main(["import", str(path), "--out", str(out), "--class-names", str(names)]) == 2
    assert "has 3 classes, 2 names were given" in capsys.readouterr().err
    names.write_text("cup\nbox\ncan\n")
    assert main(["import", str(path), "--out", str(out), "--class-names", str(names)]) == 0
    assert "deimv2 atto, 3 classes (as given)" in capsys.readouterr().out
    assert read_imported(out).categories.names == ("cup", "box", "can")


def test_names_of_classes_in_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = build_model("yolo_master", "esmoe-n", 2).state_dict()
    write_official("yolo_master", state, tmp_path / "w.pt", {0: "can", 1: "mug"})
    assert main(["import", str(tmp_path / "w.pt"), "--out", str(tmp_path / "out")]) == 0
    categories = read_imported(tmp_path / "out").categories
    assert (categories.names, categories.dataset_ids) == (("can", "mug"), (0, 1))


def test_options_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(apart(official("deimv2", "atto")), tmp_path / "w.safetensors")
    assert main(["import", "w.safetensors", "--licence", "Apache-2.0", "--input-size", "256", "320"]) == 0
    imported = read_imported(Path("deimv2-atto"))
    assert (imported.licence, imported.input_size) == ("Apache-2.0", (256, 320))
    assert imported.state_dict["decoder.anchors"].shape == (1, 16 * 20 + 8 * 10, 4)
    assert imported.source["layout"] == "safetensors"

    assert main(["import", "w.safetensors", "--out", "sub/mine.safetensors"]) == 0
    assert sorted(file.name for file in Path("sub").iterdir()) == [
        "mine.config.json",
        "mine.report.json",
        "mine.safetensors",
    ]
    for name in ("mine.safetensors", "mine.config.json"):
        assert find_config(Path("sub") / name) == Path("sub/mine.config.json")
    assert read_imported(Path("sub/mine.safetensors")).file == "mine.safetensors"
    assert find_config(Path("sub")) is None
    assert find_config(tmp_path / "w.safetensors") is None


def test_what_is_there_is_replaced_only_when_it_is_an_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(apart(official("deimv2", "atto")), tmp_path / "w.safetensors")
    out = tmp_path / "out"
    command = ["import", str(tmp_path / "w.safetensors"), "--out", str(out)]
    assert main(command) == 0
    assert main([*command, "--licence", "MIT"]) == 0
    assert read_imported(out).licence == "MIT"
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors", "report.json"]
    assert main(["import", str(out / "model.safetensors")]) == 2
    assert "is an import already" in capsys.readouterr().err
    (out / "config.json").write_text(json.dumps({"model_type": "something else"}))
    assert main(command) == 2
    assert "exists and is no import of weights; name another place" in capsys.readouterr().err


def test_altered_imports_are_refused(tmp_path: Path) -> None:
    save_file(apart(official("deimv2", "atto")), tmp_path / "w.safetensors")
    out = tmp_path / "out"
    assert main(["import", str(tmp_path / "w.safetensors"), "--out", str(out)]) == 0
    config: dict[str, Any] = json.loads((out / "config.json").read_text())

    def read_with(**changes: Any) -> None:
        (out / "config.json").write_text(json.dumps({**config, **changes}))
        read_imported(out)

    with pytest.raises(DataError, match=r"is of version 9; this Carpus reads version 1"):
        read_with(version=9)
    with pytest.raises(DataError, match=r"config.json is damaged .KeyError: 'names'"):
        read_with(classes={})
    with pytest.raises(DataError, match=r"is no import of weights .no config.json with format 'carpus.weights'"):
        read_with(format="other")
    with pytest.raises(DataError, match=r"belongs to gone.safetensors, which is not beside it"):
        read_with(weights={"file": "gone.safetensors", "sha256": "0"})
    save_file(apart(small(80)), out / "model.safetensors")
    with pytest.raises(DataError, match=r"model.safetensors was altered: config.json states another sha256"):
        read_with()


def test_a_training_checkpoint_needs_no_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_atomic({"family": "deimv2", "ema": {"module": small()}}, tmp_path / "best.pt")
    assert main(["import", str(tmp_path / "best.pt")]) == 2
    assert "is a Carpus training checkpoint" in capsys.readouterr().err


def test_a_transformer_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = "backbone.dinov3._model."
    state = official("deimv2", "s")
    vit = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    torch.save(vit, tmp_path / "vitt_distill.pt")
    assert main(["import", str(tmp_path / "vitt_distill.pt"), "--out", str(tmp_path / "vit")]) == 0
    assert "deimv2 s, the transformer of its backbone alone" in capsys.readouterr().out
    imported = read_imported(tmp_path / "vit")
    assert (imported.part, len(imported.categories)) == ("transformer", 0)
    assert all(torch.equal(imported.state_dict[name], value) for name, value in vit.items())
    torch.save({**vit, "head.weight": torch.zeros(2)}, tmp_path / "more.pt")
    command = ["import", str(tmp_path / "more.pt"), "--out", str(tmp_path / "more"), "--family", "deimv2"]
    assert main([*command, "--variant", "s"]) == 2
    assert "1 left over: head.weight" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()
