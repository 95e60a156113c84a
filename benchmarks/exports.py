"""Every variant of every family to ONNX and OpenVINO, through the parity gate, as a table.

    python benchmarks/exports.py [FAMILY/VARIANT ...] [--size 320] [--pictures 2] [--out FILE.jsonl]

Networks are random, with what makes an answer depend on the picture: norms with the statistics of pictures, a head that
is sure of some boxes. A line of FILE is one variant; those that are there already are not done again. Exits 1 when an
fp32 artefact fails.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from carpus.export.families import get_family
from carpus.export.images import procedural_images, shrink
from carpus.export.pipeline import ExportSource, export_bundle
from carpus.models.build import FAMILIES, build_model, find_family
from carpus.runtime.errors import CarpusError
from carpus.runtime.parity import ParityError
from carpus.runtime.spec import ClassInfo, ParityRecord

MOST_NOISE = 5e-6
"""Greatest change of a score that a change of 1e-6 in the pixels may make."""

ENOUGH_APART = 0.3
"""Difference of a score between two pictures at which no better mixture is looked for."""

CLASSES = tuple(ClassInfo(f"class {index}", index) for index in range(20))


def make_network(
    family: str, variant: str, size: tuple[int, int], compared: Sequence[np.ndarray], seed: int = 0
) -> tuple[nn.Module, float]:
    """A random network in eval mode whose answers depend on the picture and are sure of some boxes.

    Random layers with norms that fit one another exactly answer tiny changes with large ones, as no trained network
    does; norms that fit less well pass on little of the picture. Of several mixtures the first is taken that keeps a
    change of 1e-6 small and tells pictures well apart, or else the one that tells them apart best.

    Args:
        family: of the network.
        variant: of the family.
        size: (height, width) of the input [px].
        compared: at least two pictures (H, W, 3) uint8 that it will be asked about.
        seed: of the weights.

    Returns:
        The network, and the greatest difference of a score between two pictures.
    """
    family_of = get_family(family)
    preprocess = family_of.preprocess(_start(family, variant, size, seed), size)
    seen = [picture.pixels for picture in procedural_images(4, seed=seed + 1)]
    seen_images, images = (torch.from_numpy(preprocess(list(some))[0]) for some in (seen, compared))
    moved_images = images + 1e-6 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    best: tuple[float, dict[str, torch.Tensor]] | None = None
    for he_normal in (False, True):
        for share in (1.0, 0.85, 0.7, 0.5):
            network = _start(family, variant, size, seed, he_normal=he_normal)
            _settle(network, seen_images, share)
            _make_sure(network, family, variant, images)
            with torch.no_grad():
                scores, moved = (network(x)["pred_logits"].sigmoid() for x in (images, moved_images))
            noise, difference = float((scores - moved).abs().max()), float((scores[0] - scores[1]).abs().max())
            if noise < MOST_NOISE and (best is None or difference > best[0]):
                best = (difference, network.state_dict())
                if difference > ENOUGH_APART:
                    return network, difference
    if best is None:
        raise SystemExit(f"{family} {variant}: no random network of the mixtures tried is steady enough to compare")
    network.load_state_dict(best[1])
    return network, best[0]


def _start(family: str, variant: str, size: tuple[int, int], seed: int, *, he_normal: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    network = build_model(family, variant, len(CLASSES), size).eval()
    for name, module in network.named_modules():
        if he_normal and isinstance(module, nn.Conv2d) and module.weight.requires_grad:
            nn.init.normal_(module.weight, 0.0, (2.0 / module.weight[0].numel()) ** 0.5)
        if isinstance(module, nn.BatchNorm2d) and ("attn" in name or "mlp" in name):
            nn.init.constant_(module.weight, 0.3)
    for values in network.parameters():  # what starts at zero would say nothing
        if values.requires_grad and values.dim() > 1 and not values.any():
            nn.init.normal_(values, 0.0, 0.3 * values[0].numel() ** -0.5)
    return network


def _settle(network: nn.Module, images: torch.Tensor, share: float) -> None:
    """Move the norms' statistics by a share towards those of some images."""
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = share
    with torch.no_grad():
        network(images)
    for norm, momentum in zip(norms, usual, strict=True):
        norm.eval().momentum = momentum


def _make_sure(network: nn.Module, family: str, variant: str, images: torch.Tensor) -> None:
    """Scale and shift the class rows so that a few places in a hundred score above a half."""
    rows = re.compile(find_family(family, variant).published.class_rows)
    heads = [(name, values) for name, values in network.named_parameters() if rows.fullmatch(name)]
    with torch.no_grad():
        for _ in range(2):  # what a head is given may depend on what the head before it said
            best = network(images)["pred_logits"].amax(2).flatten()
            middle, high = best.quantile(0.5), best.quantile(0.97)
            gain = float(4.0 / (high - middle).clamp(min=1e-3))
            for name, values in heads:
                values.mul_(gain)
                if name.endswith("bias"):
                    values.sub_(gain * middle + 4.0)


def run(family: str, variant: str, size: tuple[int, int], pictures: int) -> dict[str, Any]:
    """Export one variant and hold it to the limits."""
    shown = procedural_images(max(pictures, 2), seed=7)
    compared = [picture.pixels for picture in [*shown, *(shrink(picture, 320) for picture in shown)]]
    network, apart = make_network(family, variant, size, compared)
    source = ExportSource(network, family, variant, size, CLASSES, name=f"{family}-{variant}")
    row: dict[str, Any] = {"family": family, "variant": variant, "size": size, "score_apart": apart, "error": ""}
    steps: list[tuple[float, str]] = []
    started = time.process_time()
    with tempfile.TemporaryDirectory(prefix="carpus-exports-") as folder:
        out = Path(folder) / "one.carpus"
        try:
            records = export_bundle(
                source,
                out,
                images=shown[:pictures],
                num_threads=1,
                progress=lambda line: steps.append((time.process_time(), line)),
            ).parity
            row["megabytes"] = (out / "model.onnx").stat().st_size / 1e6
        except ParityError as error:
            records = error.records
            row["error"] = str(error)
        except CarpusError as error:
            records = ()
            row["error"] = str(error)
    asked = next((when for when, line in steps if line.startswith("asking")), time.process_time())
    row["export_cpu_seconds"] = asked - started
    row["all_cpu_seconds"] = time.process_time() - started
    row["parameters"] = sum(values.numel() for values in network.parameters())
    row["peak_gigabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    row["records"] = [_figures(record) for record in records]
    return row


def _figures(record: ParityRecord) -> dict[str, Any]:
    kept = ("max_box_px", "max_score", "detections", "detections_differ", "suppression_differs")
    return {
        "backend": record.backend,
        "precision": record.precision,
        "passed": record.passed,
        "worst": record.worst,
        **{name: record.metrics[name] for name in kept if name in record.metrics},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", help="FAMILY/VARIANT; all by default")
    parser.add_argument("--size", type=int, default=320, help="side of the square input [px]")
    parser.add_argument("--pictures", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    wanted = options.variants or [f"{family}/{name}" for family, entry in FAMILIES.items() for name in entry.variants]
    done = options.out.read_text().splitlines() if options.out is not None and options.out.is_file() else []
    rows = [json.loads(line) for line in done]
    have = {f"{row['family']}/{row['variant']}" for row in rows}
    for item in wanted:
        if item in have:
            continue
        family, _, variant = item.partition("/")
        row = run(family, variant, (options.size, options.size), options.pictures)
        rows.append(row)
        print(_line(row), flush=True)
        if options.out is not None:
            with options.out.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
    print("\n" + "\n".join(_line(row) for row in rows))
    fp32 = [record for row in rows for record in row["records"] if record["precision"] == "fp32"]
    return 0 if fp32 and all(record["passed"] for record in fp32) and all(row["records"] for row in rows) else 1


def _line(row: dict[str, Any]) -> str:
    """One row of the table in docs/export.md."""
    cells = [f"{row['family']} {row['variant']}", f"{row['parameters'] / 1e6:.1f}"]
    for backend, precision in (("onnxruntime", "fp32"), ("openvino", "fp32"), ("openvino", "fp16")):
        found = [r for r in row["records"] if (r["backend"], r["precision"]) == (backend, precision)]
        if not found:
            cells.append(row["error"][:80] or "-")
            continue
        mark = "" if found[0]["passed"] else "**fails** "
        cells.append(f"{mark}{found[0]['max_box_px']:.1e} px, {found[0]['max_score']:.1e}")
    compared = max((record["detections"] for record in row["records"]), default=0)
    size = f"{row['megabytes']:.1f}" if "megabytes" in row else f"{row['parameters'] * 4 / 1e6:.0f}"
    return "| " + " | ".join([*cells, f"{compared:.0f}", size, f"{row['export_cpu_seconds']:.0f}"]) + " |"


if __name__ == "__main__":
    sys.exit(main())
