"""What the authors of the detectors state about them: figures, licences, and why counts here differ.

Sources: the model zoos in the repositories of DEIMv2 (commit 0fff8d4), LW-DETR (d5e6e6c), Mamba-YOLO (b26cbda) and
YOLO-Master (156bbf6); for YOLO-Master variants that the zoo leaves out, the comments in the authors' configuration
files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

__all__ = ["FAMILY_FACTS", "NOTES", "PUBLISHED", "FamilyFacts", "Published", "licence_of"]


@dataclass(frozen=True)
class Published:
    """What the authors print about a variant.

    Attributes:
        params_m: parameters [1e6], or None.
        gflops: operations of one image of the variant's own size [1e9], in the authors' way of counting.
        ap: box AP on COCO val2017 [%], or None where none is given.
        latency_ms: latency [ms] as printed, or None; the authors measure on different machines.
        params_note, gflops_note: keys of ``NOTES`` that explain a difference from what is counted here.
        source: where this is printed.
    """

    params_m: float
    gflops: float
    ap: float | None = None
    latency_ms: float | None = None
    params_note: str | None = None
    gflops_note: str | None = None
    source: Literal["model zoo", "configuration file"] = "model zoo"


@dataclass(frozen=True)
class FamilyFacts:
    """What is stated about a family as a whole.

    Attributes:
        title: the family's name for people.
        paper: arXiv number.
        licence: licence of the published weights.
        counted_form: whose parameters the authors print: the network in training, or in the form they deploy.
        mac_operations: operations that the authors count for a multiply-accumulate.
        without_weights: beginnings of names of variants for which the authors publish no weights.
    """

    title: str
    paper: str
    licence: str
    counted_form: Literal["training", "inference"]
    mac_operations: int = 2
    without_weights: tuple[str, ...] = ()


FAMILY_FACTS: Mapping[str, FamilyFacts] = MappingProxyType(
    {
        "deimv2": FamilyFacts("DEIMv2", "2509.20787", "Apache-2.0", "inference"),
        "lw_detr": FamilyFacts(
            "LW-DETR", "2406.03459", "Apache-2.0", "training", mac_operations=1, without_weights=("resnet",)
        ),
        "yolo_master": FamilyFacts("YOLO-Master", "2512.23273", "AGPL-3.0", "inference", without_weights=("paper-",)),
        "mamba_yolo": FamilyFacts(
            "Mamba-YOLO", "2406.05835", "AGPL-3.0", "training", without_weights=("paper-", "mamba3-")
        ),
    }
)
"""Facts by family."""

_DINOV3 = "Apache-2.0, backbone from DINOv3 weights (DINOv3 License)"
_DISTILLED = "Apache-2.0, backbone distilled from DINOv3 (DINOv3 License)"
_LICENCES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("deimv2", "s"): _DISTILLED,
        ("deimv2", "m"): _DISTILLED,
        ("deimv2", "l"): _DINOV3,
        ("deimv2", "x"): _DINOV3,
    }
)
"""Where a variant's licence says more than its family's."""


def licence_of(family: str, variant: str) -> str | None:
    """Licence of a variant's published weights; None where the authors publish none."""
    facts = FAMILY_FACTS[family]
    if variant.startswith(facts.without_weights or ("\0",)):
        return None
    return _LICENCES.get((family, variant), facts.licence)


def _deimv2(params_m: float, gflops: float, ap: float, latency_ms: float) -> Published:
    return Published(params_m, gflops, ap, latency_ms, gflops_note="deimv2-gflops")


def _lw_detr(params_m: float, gflops: float, ap: float, latency_ms: float) -> Published:
    return Published(params_m, gflops, ap, latency_ms, gflops_note="lw-detr-gflops")


def _mamba(params_m: float, gflops: float, ap: float, params_note: str, gflops_note: str) -> Published:
    return Published(params_m, gflops, ap, params_note=params_note, gflops_note=gflops_note)


def _esmoe(params_m: float, gflops: float, ap: float | None = None, note: str | None = None) -> Published:
    source: Literal["model zoo", "configuration file"] = "configuration file" if ap is None else "model zoo"
    return Published(params_m, gflops, ap, params_note=note, gflops_note="yolo-master-gflops", source=source)


def _v0_1(params_m: float, gflops: float, ap: float | None) -> Published:
    source: Literal["model zoo", "configuration file"] = "configuration file" if ap is None else "model zoo"
    return Published(params_m, gflops, ap, gflops_note="v0-1-gflops", source=source)


PUBLISHED: Mapping[tuple[str, str], Published] = MappingProxyType(
    {
        ("deimv2", "atto"): _deimv2(0.5, 0.8, 23.8, 1.10),
        ("deimv2", "femto"): _deimv2(1.0, 1.7, 31.0, 1.45),
        ("deimv2", "pico"): _deimv2(1.5, 5.2, 38.5, 2.13),
        ("deimv2", "n"): _deimv2(3.6, 6.8, 43.0, 2.32),
        ("deimv2", "s"): _deimv2(9.7, 25.6, 50.9, 5.78),
        ("deimv2", "m"): _deimv2(18.1, 52.2, 53.0, 8.80),
        ("deimv2", "l"): _deimv2(32.2, 96.7, 56.0, 10.47),
        ("deimv2", "x"): _deimv2(50.3, 151.6, 57.8, 13.75),
        ("lw_detr", "tiny"): _lw_detr(12.1, 11.2, 42.6, 2.0),
        ("lw_detr", "small"): _lw_detr(14.6, 16.6, 48.0, 2.9),
        ("lw_detr", "medium"): _lw_detr(28.2, 42.8, 52.5, 5.6),
        ("lw_detr", "large"): _lw_detr(46.8, 71.6, 56.1, 8.8),
        ("lw_detr", "xlarge"): _lw_detr(118.0, 174.2, 58.3, 19.1),
        ("mamba_yolo", "T"): _mamba(5.8, 13.2, 44.5, "mamba-params", "mamba-gflops"),
        ("mamba_yolo", "B"): _mamba(19.1, 45.4, 49.1, "mamba-params", "mamba-gflops"),
        ("mamba_yolo", "L"): _mamba(57.6, 156.2, 52.1, "mamba-params", "mamba-gflops"),
        ("mamba_yolo", "paper-T"): _mamba(5.8, 13.2, 44.5, "mamba-params", "mamba-gflops"),
        ("mamba_yolo", "paper-B"): _mamba(19.1, 45.4, 49.1, "mamba-params", "mamba-gflops"),
        ("mamba_yolo", "paper-L"): _mamba(57.6, 156.2, 52.1, "mamba-params", "mamba-gflops"),
        ("yolo_master", "esmoe-n"): _esmoe(2.68, 8.7, 42.7),
        ("yolo_master", "esmoe-s"): _esmoe(9.69, 29.1, 48.9),
        ("yolo_master", "esmoe-m"): _esmoe(34.88, 97.4, 53.0, "esmoe-m-params"),
        ("yolo_master", "esmoe-l"): _esmoe(30.163180, 119.7),
        ("yolo_master", "esmoe-x"): _esmoe(67.439724, 266.1),
        ("yolo_master", "v0_1-n"): _v0_1(7.54, 10.1, 42.9),
        ("yolo_master", "v0_1-s"): _v0_1(29.15, 36.0, 48.9),
        ("yolo_master", "v0_1-m"): _v0_1(52.17, 116.7, 52.8),
        ("yolo_master", "v0_1-l"): _v0_1(58.41, 138.1, 53.9),
        ("yolo_master", "v0_1-x"): _v0_1(131.160728, 311.0, None),
    }
)
"""Published figures by (family, variant)."""

NOTES: Mapping[str, str] = MappingProxyType(
    {
        "deimv2-gflops": (
            "The authors' counter sees convolutions and linear maps, not the products between tokens inside attention "
            "(n 0.2, s 24.0, x 48.2); `alike` leaves them out."
        ),
        "lw-detr-gflops": (
            "The authors count a multiply-accumulate once, five operations for every number that passes a softmax or "
            "a norm, the first stage's box head at every position (here only at those selected), and transposed "
            "convolutions (large, xlarge) twice; `alike` counts that way."
        ),
        "mamba-params": (
            "The printed T and B fit no configuration: T comes near the paper's backbone repeats [3, 6, 6, 3] "
            "(5.88 M), B is unexplained. The printed L is the shipped one, [3, 3, 9, 3]. The authors' configuration "
            "files state 6.1, 21.8 and 57.6 M, which are counted here."
        ),
        "mamba-gflops": (
            "The authors' counter sees layers and norms (eight operations a number), neither the products with the "
            "scan's projections nor the scan; `alike` counts that way and gives what the authors' configuration files "
            "state for T, B and L (14.3, 49.7, 156.2). The printed L is that; the printed T and B are unexplained."
        ),
        "yolo-master-gflops": (
            "The authors' counter sees layers and norms (eight operations a number), not the products of area "
            "attention; `alike` counts that way."
        ),
        "v0-1-gflops": (
            "The authors' counter sees layers and norms (eight operations a number), not the products of area "
            "attention, and runs at 32 x 32 px to scale up, where routers do not pool their input and cost 16 times as "
            "much; `alike` counts that way and comes within 2 % of what the authors' configuration files state (n 9.9, "
            "s 34.8). The printed 10.1 and 36.0 are unexplained."
        ),
        "esmoe-m-params": (
            "The printed 34.88 M is unexplained; the authors' configuration file states 23.9 M, which is counted here."
        ),
    }
)
"""Explanations of differences of more than 2 %, by key."""
