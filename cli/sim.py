"""`carpus sim dataset` and `carpus sim preview`: labelled pictures of the simulated tabletop."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from carpus.runtime.errors import DataError

__all__ = ["SimDataset", "SimPreview"]


@dataclass(frozen=True)
class SimDataset:
    """Render COCO datasets of the simulated tabletop. Interrupt at any time; the same command goes on where it stopped.

    Writes OUT/<split>/annotations.json and OUT/<split>/images/ for each split with more than 0 pictures. Same seed,
    same bytes, however many workers and however often interrupted.
    """

    out: Annotated[Path, tyro.conf.Positional]
    """Dataset folder."""
    train: int = 4000
    """Pictures for training."""
    heldout: int = 1000
    """Held-out pictures: textures, lights and layouts that training never shows."""
    site: int = 0
    """Pictures of one odd customer site, to fine-tune for."""
    seed: int = 0
    """Decides every picture."""
    robot: Literal["gr1t2", "primitive"] = "gr1t2"
    """Robot in view; `primitive` needs no robot description package."""
    height: int = 480
    """Picture height [px]."""
    width: int = 640
    """Picture width [px]."""
    workers: int = 1
    """Processes. The software renderer uses every core by itself, so more than one gains little."""
    quality: int = 92
    """JPEG quality, 1 to 100."""

    def run(self) -> int:
        """Render what is missing; return the exit code."""
        _quieten()
        from carpus.sim.dataset import generate_dataset

        counts = {"train": self.train, "heldout": self.heldout, "site": self.site}
        for split, count in counts.items():
            if count < 0:
                raise DataError(f"--{split} is {count}; expected 0 or more")
        if not any(counts.values()):
            raise DataError("nothing to render: --train, --heldout and --site are all 0")
        console = Console()
        columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) if console.is_terminal else nullcontext() as bar:
            for split, count in counts.items():
                if count:
                    path = generate_dataset(
                        self.out,
                        split,
                        count,
                        self.seed,
                        (self.height, self.width),
                        self.robot,
                        workers=self.workers,
                        quality=self.quality,
                        progress=_reporter(bar, split, count),
                    )
                    sys.stdout.write(f"{path}\n")
        return 0


def _quieten() -> None:
    """PyOpenGL reports at INFO that its optional accelerator is missing; nobody who renders needs to know."""
    logging.getLogger("OpenGL").setLevel(logging.WARNING)


def _reporter(bar: Progress | None, split: str, count: int) -> Callable[[int, int], None] | None:
    if bar is None:
        return None
    task = bar.add_task(split, total=count)
    return lambda done, total: bar.update(task, completed=done, total=total)


@dataclass(frozen=True)
class SimPreview:
    """Write a contact sheet (PNG) of rendered scenes with their visible boxes."""

    out: Annotated[Path, tyro.conf.Positional]
    """PNG file to write."""
    domain: Literal["train", "heldout", "site"] = "train"
    """Which randomisation."""
    rows: int = 3
    """Rows of pictures."""
    columns: int = 4
    """Columns of pictures."""
    seed: int = 0
    """Decides every picture; the first ones are those of `carpus sim dataset` with the same seed."""
    robot: Literal["gr1t2", "primitive"] = "gr1t2"
    """Robot in view."""
    height: int = 480
    """Height of one picture [px]."""
    width: int = 640
    """Width of one picture [px]."""

    def run(self) -> int:
        """Render and write the sheet; return the exit code."""
        _quieten()
        from carpus.sim.preview import contact_sheet, write_png

        if self.rows < 1 or self.columns < 1:
            raise DataError(f"--rows is {self.rows} and --columns is {self.columns}; expected 1 or more each")
        size = (self.height, self.width)
        sheet = contact_sheet(self.domain, self.rows, self.columns, self.seed, size, self.robot)
        write_png(self.out, sheet)
        sys.stdout.write(f"{self.out}\n")
        return 0
