"""Names that people type, and what is suggested for those that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpus.cli.main import main
from carpus.export.families import EXPORT_FAMILIES, get_family
from carpus.models.build import FAMILIES, build_criterion, build_model
from carpus.models.deimv2 import config as deimv2
from carpus.models.lw_detr import config as lw_detr
from carpus.models.mamba_yolo import config as mamba_yolo
from carpus.models.yolo_master import config as yolo_master
from carpus.runtime.errors import DataError
from carpus.runtime.names import lookup, nearest, unknown

FAMILY_CONFIGS = {"deimv2": deimv2, "lw_detr": lw_detr, "mamba_yolo": mamba_yolo, "yolo_master": yolo_master}


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("smal", ("tiny", "small", "medium"), ["small"]),
        ("SMALL", ("tiny", "small", "medium"), ["small"]),
        ("xl", ("small", "large", "xlarge"), ["xlarge"]),
        ("t", ("T", "B", "L"), ["T"]),
        ("n", ("esmoe-n", "esmoe-s", "v0_1-n"), ["esmoe-n", "v0_1-n"]),
        ("v0.1-n", ("esmoe-n", "v0_1-n", "v0_1-s"), ["v0_1-n"]),
        ("lw-detr", tuple(FAMILIES), ["lw_detr"]),
        ("huge", ("tiny", "small", "medium"), []),
        ("", ("tiny", "small"), []),
        ("tiny", (), []),
    ],
)
def test_nearest(name: str, known: tuple[str, ...], expected: list[str]) -> None:
    assert nearest(name, known) == expected


def test_no_more_than_three_names_are_suggested() -> None:
    assert len(nearest("n", [f"size{i}-n" for i in range(9)])) == 3


def test_messages_name_the_kind_and_all_there_is() -> None:
    assert unknown("recipe", "tabeltop", ("official", "tabletop")) == (
        "unknown recipe 'tabeltop' (did you mean 'tabletop'?); known recipes: official, tabletop"
    )
    assert unknown("model family", "zzz", ("a", "b")) == "unknown model family 'zzz'; known families: a, b"
    assert lookup("recipe", "official", {"official": 1}) == 1
    with pytest.raises(DataError, match=r"unknown recipe 'offical' \(did you mean 'official'\?\)"):
        lookup("recipe", "offical", {"official": 1})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_a_variant_suggests_the_nearest(family: str) -> None:
    variant = FAMILIES[family].variants[-1]
    typed = f"{variant}{variant[-1]}"
    expected = rf"variant '{typed}' \(did you mean .*'{variant}'.*; known variants: {FAMILIES[family].variants[0]}, "
    for call in (
        lambda: build_model(family, typed, 3),
        lambda: build_criterion(family, typed, 3),
        lambda: FAMILY_CONFIGS[family].get_config(typed),
    ):
        with pytest.raises(DataError, match=expected):
            call()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_a_family_suggests_the_nearest(family: str) -> None:
    typed = family.replace("_", "-") + "s"
    expected = rf"model family '{typed}' \(did you mean .*'{family}'"
    for call in (lambda: build_model(typed, "n", 3), lambda: build_criterion(typed, "n", 3)):
        with pytest.raises(DataError, match=expected):
            call()
    if family in EXPORT_FAMILIES:
        with pytest.raises(DataError, match=expected):
            get_family(typed)


@pytest.mark.parametrize("family", FAMILIES)
def test_configurations_of_all_families_change_size_alike(family: str) -> None:
    variant = FAMILIES[family].variants[0]
    config = FAMILY_CONFIGS[family].get_config(variant, 7).with_input_size(192, 320)
    assert (config.num_classes, config.input_size, config.variant) == (7, (192, 320), variant)
    assert FAMILY_CONFIGS[family].get_config(variant) == FAMILY_CONFIGS[family].VARIANTS[variant]
    with pytest.raises(DataError, match="num_classes must be at least 1, got 0"):
        config.with_num_classes(0)
    with pytest.raises(DataError, match=rf"multiples of {config.input_stride} px, got \(192, 330\)"):
        config.with_input_size(192, 330)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "tabeltop"], "unknown recipe 'tabeltop' (did you mean 'tabletop'?)"),
        (["--family", "lw-detr"], "unknown model family 'lw-detr' (did you mean 'lw_detr'?)"),
        (["--family", "lw_detr", "--variant", "smal"], "unknown lw_detr variant 'smal' (did you mean 'small'?)"),
    ],
)
def test_training_suggests_too(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--data", str(tmp_path), "--out", str(tmp_path / "run"), *arguments]) == 2
    assert message in capsys.readouterr().err
