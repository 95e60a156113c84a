"""The stages of the demonstration: each is one command of Carpus, what it leaves behind and what it is for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Layout", "Stage", "build_stages"]

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Layout:
    """Where the demonstration keeps its files, all below one folder.

    Attributes:
        out: work folder.
        report: the page that `make demo` ends with.
    """

    out: Path
    report: Path

    @property
    def adapt(self) -> Path:
        """Pictures of the new site to fine-tune on."""
        return self.out / "adapt" / "site"

    @property
    def check(self) -> Path:
        """Other pictures of that site, only ever evaluated on."""
        return self.out / "check" / "site"

    @property
    def shipped_bundle(self) -> Path:
        """The weights that ship, exported."""
        return self.out / "shipped.carpus"

    @property
    def site_bundle(self) -> Path:
        """The fine-tuned detector, exported and verified."""
        return self.out / "site.carpus"

    @property
    def weights(self) -> Path:
        """The weights that ship."""
        return ROOT / "weights" / "deimv2-atto-tabletop.pt"


@dataclass(frozen=True)
class Stage:
    """One step.

    Attributes:
        name: short name, also of the mark that says it is done.
        title: what a person reads while it runs.
        commands: argument lists, run one after the other.
        outputs: files that exist when the stage is done.
        stdout: file that takes what the commands print, instead of the terminal.
        scratch: folder in which an interrupted stage goes on; emptied when what the stage does has changed.
    """

    name: str
    title: str
    commands: tuple[tuple[str, ...], ...]
    outputs: tuple[Path, ...]
    stdout: Path | None = None
    scratch: Path | None = None


def _carpus(*args: object) -> tuple[str, ...]:
    return (sys.executable, "-m", "carpus.cli.main", *map(str, args))


def build_stages(layout: Layout, *, images: int, check_images: int, epochs: int, seconds: float) -> tuple[Stage, ...]:
    """The whole chain.

    Args:
        layout: where the files go.
        images: pictures to fine-tune on.
        check_images: pictures to evaluate on.
        epochs: passes of the fine-tuning.
        seconds: how long the ROS 2 graph runs [s].
    """
    out = layout.out
    run = out / "finetune"
    first = layout.check / "images" / "000000.jpg"
    graph = (
        str(ROOT / "scripts" / "with_ros.sh"), sys.executable, "-m", "carpus_ros.run_graph",
        "--bundle", str(layout.site_bundle), "--output", str(out / "ros"), "--duration", str(seconds),
        "--domain", "site",
    )  # fmt: skip
    return (
        Stage(
            "render",
            f"render {images} + {check_images} labelled pictures of a new site",
            tuple(
                _carpus("sim", "dataset", out / name, "--train", 0, "--heldout", 0, "--site", count, "--seed", seed)
                for name, count, seed in (("adapt", images, 101), ("check", check_images, 202))
            ),
            (layout.adapt / "annotations.json", layout.check / "annotations.json"),
        ),
        Stage(
            "before",
            "measure the shipped detector there",
            (
                _carpus("export", layout.weights, "--out", layout.shipped_bundle, "--precision", "onnx"),
                _carpus("evaluate", layout.shipped_bundle, layout.check, "--json", out / "before.json"),
            ),
            (out / "before.json",),
        ),
        Stage(
            "finetune",
            f"fine-tune it for {epochs} epochs",
            (
                _carpus(
                    "train", "--data", layout.adapt, "--out", run, "--init", layout.weights, "--epochs", epochs,
                    "--batch-size", 8, "--lr", 4e-4, "--mosaic-prob", 0.0, "--input-scales", 0, 1.0,
                ),
            ),
            (run / "best.pt", run / "history.json"),
            scratch=run,
        ),
        Stage(
            "export",
            "export it to a bundle, with the parity gate on real pictures",
            (_carpus("export", run / "best.pt", "--out", layout.site_bundle, "--images", layout.adapt / "images"),),
            (layout.site_bundle / "manifest.json",),
        ),
        Stage(
            "verify",
            "verify every backend of this machine",
            (_carpus("verify", layout.site_bundle),),
            (),
        ),
        Stage(
            "after",
            "measure it on both backends",
            tuple(
                _carpus("evaluate", layout.site_bundle, layout.check, "--backend", b, "--json", out / f"after_{b}.json")
                for b in ("onnxruntime", "openvino")
            ),
            (out / "after_onnxruntime.json", out / "after_openvino.json"),
        ),
        Stage(
            "pictures",
            "draw its detections",
            (_carpus("detect", layout.site_bundle, layout.check / "images", "--out", out / "detections"),),
            (out / "detections" / "detections.json",),
        ),
        Stage(
            "bench",
            "time its parts on every backend",
            (_carpus("bench", layout.site_bundle, "--runs", 100, "--json", "--image", first),),
            (out / "bench.json",),
            out / "bench.json",
        ),
        Stage(
            "ros",
            "run the ROS 2 graph: simulated camera -> detector -> recorder",
            (graph,),
            (out / "ros" / "summary.json",),
        ),
    )  # fmt: skip
