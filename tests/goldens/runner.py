"""Finds the cases in a folder, runs every kind that applies, prints a line a tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpus.runtime.errors import CarpusError
from tests.goldens import (
    lw_detr_train,
    mamba_yolo_blocks,
    mamba_yolo_forward,
    mamba_yolo_train,
    ssm_ops,
    yolo_loss_case,
    yolo_master_forward,
    yolo_master_train,
    yolo_moe_ops,
)
from tests.goldens.case import Case, Check, Kind, UnusableFolder
from tests.goldens.deimv2_deploy import check_deploy
from tests.goldens.deimv2_forward import ALTERNATIVE, check_alternative, check_forward, check_schema
from tests.goldens.deimv2_train import check_train_forward

__all__ = ["KINDS", "Summary", "find_cases", "run_folder"]


def _kinds() -> tuple[Kind, ...]:
    from tests.goldens.criterion_case import check_criterion

    return (
        Kind("schema", "deimv2", (), check_schema),
        Kind("forward", "deimv2", ("case.json", "io.npz"), check_forward),
        Kind("blocks", "deimv2", (f"{ALTERNATIVE}.json", f"{ALTERNATIVE}.npz"), check_alternative),
        Kind("deploy", "deimv2", ("deploy.json", "deploy.npz"), check_deploy),
        Kind("criterion", "deimv2", ("train.json", "train_criterion.npz"), check_criterion),
        Kind("training", "deimv2", ("train.json", "train_forward.npz"), check_train_forward),
        Kind("schema", "yolo_master", (), yolo_master_forward.check_schema),
        Kind("forward", "yolo_master", ("case.json", "io.npz"), yolo_master_forward.check_forward),
        Kind("training", "yolo_master", ("train_step.json", "train_step.npz"), yolo_master_train.check_train_step),
        Kind("loss", "yolo_loss", ("detection_loss.json", "detection_loss.npz"), yolo_loss_case.check_loss),
        Kind("letterbox", "yolo_loss", ("preprocess.json", "preprocess.npz"), yolo_loss_case.check_preprocess),
        Kind("blocks", "yolo_moe_ops", ("moe.json", "moe.npz"), yolo_moe_ops.check_operators),
        Kind("schema", "mamba_yolo", (), mamba_yolo_forward.check_schema),
        Kind("forward", "mamba_yolo", ("case.json", "io.npz"), mamba_yolo_forward.check_forward),
        Kind("training", "mamba_yolo", ("train_step.json", "train_step.npz"), mamba_yolo_train.check_train_step),
        Kind("blocks", "mamba_yolo_blocks", ("blocks.json", "blocks.npz"), mamba_yolo_blocks.check_blocks),
        *ssm_ops.KINDS,
        *lw_detr_train.KINDS,
    )


KINDS: tuple[Kind, ...] = _kinds()
"""Every kind of case, in the order in which they run; a further family adds its rows here."""

OPERATORS: Mapping[str, str] = {
    "detection_loss.json": "yolo_loss",
    "preprocess.json": "yolo_loss",
    "moe.json": "yolo_moe_ops",
    "blocks.json": "mamba_yolo_blocks",
    "index.json": "ssm_ops",
}
"""Folders without a schema, by a file they hold, and the family of their kinds."""

_MODEL_NAMES = (
    (re.compile(r"YOLO-Master EsMoE (\w)"), "yolo_master", "esmoe-", str.lower),
    (re.compile(r"YOLO-Master v0\.1 (\w)"), "yolo_master", "v0_1-", str.lower),
    (re.compile(r"Mamba-YOLO-(\w)"), "mamba_yolo", "", str.upper),
)


def identified(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with family and variant; where it does not state them they follow from its model's name."""
    if "family" not in schema and isinstance(schema.get("model"), str):
        for pattern, family, prefix, case in _MODEL_NAMES:
            match = pattern.fullmatch(schema["model"])
            if match:
                return {**schema, "family": family, "variant": prefix + case(match[1])}
    return schema


@dataclass
class Summary:
    """Count of checks made and failed."""

    total: int = 0
    failed: int = 0


def find_cases(folder: Path) -> list[Case]:
    """Cases in a folder: schema.json with the case beside it, in cases/, or in folders inside cases/.

    Raises:
        UnusableFolder: no such folder, no readable schema, or a family without checks.
    """
    if not folder.is_dir():
        raise UnusableFolder(f"{folder}: no such folder")
    path = folder / "schema.json"
    if not path.is_file():
        for name, family in OPERATORS.items():
            if (folder / name).is_file():
                return [Case(folder, {"family": family, "variant": folder.name})]
        raise UnusableFolder(f"{folder}: holds no schema.json; point at one variant's folder")
    try:
        schema = identified(json.loads(path.read_text(encoding="utf-8")))
        family, variant = str(schema["family"]), schema["variant"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnusableFolder(f"{path}: not a usable schema (family and variant are needed): {error!r}") from error
    known = sorted({kind.family for kind in KINDS})
    if family not in known:
        raise UnusableFolder(f"{path}: no checks for family {family!r}, variant {variant!r}; known: {', '.join(known)}")
    folders = [folder]
    if (folder / "cases").is_dir():
        folders += [folder / "cases", *sorted(p for p in (folder / "cases").iterdir() if p.is_dir())]
    return [Case(place, schema) for place in folders]


def run_folder(folder: Path, write: Callable[[str], None]) -> Summary:
    """Run everything in a folder.

    Args:
        folder: folder of one variant.
        write: receives the lines.

    Raises:
        UnusableFolder: nothing can be checked, or a file is broken.
    """
    summary = Summary()
    cases = find_cases(folder)
    applied: set[Path] = set()
    write(f"{folder}  ({cases[0].family} {cases[0].variant})")
    for case in cases:
        for kind in KINDS:
            if kind.family != case.family:
                continue
            applies = kind.applies(case) if kind.files else case is cases[0]
            if not applies:
                continue
            applied.add(case.folder)
            made = summary.total
            try:
                for check in kind.run(case):
                    summary.total += 1
                    summary.failed += not check.passed
                    write(_line(kind.name, check))
            except KeyError as error:
                raise UnusableFolder(f"{case.folder}: {kind.name}: field or array {error} is missing") from error
            except (CarpusError, AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
                raise UnusableFolder(f"{case.folder}: {kind.name}: {type(error).__name__}: {error}") from error
            if summary.total == made:
                raise UnusableFolder(f"{case.folder}: {kind.name}: the files describe nothing to compare")
    if len(cases) > 1 and not applied.intersection(case.folder for case in cases[1:]):
        raise UnusableFolder(f"{cases[1].folder}: holds no case; known are {_known_files(cases[0].family)}")
    for case in cases:
        known = {name for kind in KINDS if kind.family == case.family for name in kind.files}
        for path in sorted(set(case.folder.glob("*.npz")) - {case.folder / name for name in known}):
            write(f"  skip           {path.name}: no check knows this file")
    return summary


def _known_files(family: str) -> str:
    return "; ".join(" with ".join(kind.files) for kind in KINDS if kind.family == family and kind.files)


def _line(kind: str, check: Check) -> str:
    verdict = "ok" if check.passed else "FAIL"
    note = f"  {check.note}" if check.note else ""
    return f"  {verdict:4} {kind:9} {check.name:58} error {check.error:9.3g}  tolerance {check.tolerance:9.3g}{note}"
