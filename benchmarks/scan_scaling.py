"""Time and peak memory against input size: the selective scan of Mamba-YOLO-T beside the attention of LW-DETR-tiny.

    python benchmarks/scan_scaling.py [--sizes 320 448 640 896 1280] [--rounds 5] [--threads 1] [--picture FILE.png]

One square image in eval mode. Whole networks, and their mixers alone on the map of stride 16: SS2D (four scans) and the
attention of a block that sees all tokens. Within a round every size and subject takes its turn; medians. Memory is the
peak above what the process held before the pass, in a fresh process each. With one thread the clock counts the
processor's time for this process, which other processes on the machine disturb least. Exponents are least-squares fits
of log(value) on log(pixels), over all sizes and between the two largest.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from carpus.models.lw_detr.config import get_config as lw_detr_config
from carpus.models.lw_detr.model import LWDETR
from carpus.models.lw_detr.vit import Attention, Block
from carpus.models.mamba_yolo.config import get_config as mamba_yolo_config
from carpus.models.mamba_yolo.model import MambaYOLO
from carpus.models.mamba_yolo.ss2d import SS2D

NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "Mamba-YOLO-T": lambda: MambaYOLO(mamba_yolo_config("T")),
    "LW-DETR-tiny": lambda: LWDETR(lw_detr_config("tiny")),
}
MIXERS = {"SS2D": "Mamba-YOLO-T", "global attention": "LW-DETR-tiny"}
SUBJECTS = (*NETWORKS, *MIXERS)
STRIDE = 16
WARM_UP = 192
"""Input [px] of the pass that loads libraries before memory is measured."""
Values = Mapping[str, Mapping[int, float]]
"""Subject -> size [px] -> value."""


def subject(name: str) -> Callable[[int], object]:
    """What is measured, as a function of the size [px]."""
    network = NETWORKS[MIXERS.get(name, name)]().eval()
    if name in NETWORKS:
        return lambda size: network(_image(size, 3))
    mixer, channels = _mixer(network)
    if name == "SS2D":
        return lambda size: mixer(_image(size // STRIDE, channels))
    return lambda size: mixer(_image(size // STRIDE, channels).flatten(2).transpose(1, 2))


def _mixer(network: nn.Module) -> tuple[nn.Module, int]:
    """The mixer on the map of stride 16 and its channels."""
    for module in network.modules():
        if isinstance(module, Block) and module.windows > 1 and isinstance(module.attn, Attention):
            return module.attn, module.attn.qkv.in_features
    scans = [module for module in network.modules() if isinstance(module, SS2D)]
    widths = sorted({scan.in_proj.in_channels for scan in scans})
    # the stages have strides 4, 8, 16, 32
    width = widths[int(math.log2(STRIDE)) - 2]
    return next(scan for scan in scans if scan.in_proj.in_channels == width), width


def _image(size: int, channels: int) -> Tensor:
    return torch.rand(1, channels, size, size, generator=torch.Generator().manual_seed(size))


@torch.inference_mode()
def times(options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Median seconds."""
    clock = time.process_time if options.threads == 1 else time.perf_counter
    runs = {name: subject(name) for name in SUBJECTS}
    taken: dict[tuple[str, int], list[float]] = {(name, size): [] for name in SUBJECTS for size in options.sizes}
    for run in runs.values():
        run(WARM_UP)
    for turn in range(options.rounds):
        for size in options.sizes if turn % 2 else reversed(options.sizes):
            for name, run in runs.items():
                # short passes are repeated, so that every median stands on some time
                repeats = 1 if name in NETWORKS else 3
                for _ in range(repeats):
                    start = clock()
                    run(size)
                    taken[name, size].append(clock() - start)
    return {name: {size: statistics.median(taken[name, size]) for size in options.sizes} for name in SUBJECTS}


def memory(options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Peak MiB above what the process held before, each in a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    result: dict[str, dict[int, float]] = {}
    for name in SUBJECTS:
        for size in options.sizes:
            command = [sys.executable, __file__, "--child", name, str(size), "--threads", str(options.threads)]
            output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            result.setdefault(name, {})[size] = float(json.loads(output))
    return result


@torch.inference_mode()
def measure_memory(name: str, size: int) -> float:
    """In the child: MiB."""
    run = subject(name)
    run(WARM_UP)
    # what the warm-up freed goes back to the system, and the peak starts anew
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run(size)
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    """A line of this process's status [KiB]."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {field}")


def exponent(sizes: Sequence[int], values: Mapping[int, float]) -> float:
    """Slope of log(value) on log(pixels)."""
    pixels = 2.0 * np.log(np.array(sizes, float))
    return float(np.polyfit(pixels, np.log([values[size] for size in sizes]), 1)[0])


def table(title: str, sizes: Sequence[int], values: Values, digits: int) -> None:
    """Print values by size with their exponents."""
    print(f"\n{title:<18}" + "".join(f"{size:>9}" for size in sizes) + "   exponent  largest two")
    for name, row in values.items():
        numbers = "".join(f"{row[size]:>9.{digits}f}" for size in sizes)
        print(f"{name:<18}{numbers}{exponent(sizes, row):>11.2f}{exponent(sizes[-2:], row):>13.2f}")


def draw(path: Path, sizes: Sequence[int], figures: Mapping[str, Values]) -> None:
    """A panel a quantity, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure, panels = pyplot.subplots(1, len(figures), figsize=(5.2 * len(figures), 4.4), constrained_layout=True)
    colours = {"Mamba-YOLO-T": "tab:blue", "LW-DETR-tiny": "tab:orange"}
    for panel, (title, values) in zip(panels, figures.items(), strict=True):
        for name, row in values.items():
            style = {"color": colours[MIXERS.get(name, name)], "marker": "o" if name in NETWORKS else "s"}
            line = "-" if name in NETWORKS else "--"
            label = f"{name}: pixels^{exponent(sizes, row):.2f}"
            panel.loglog(sizes, [row[size] for size in sizes], line, label=label, **style)
        panel.set(xlabel="side of the square image [px]", ylabel=title)
        panel.set_xticks(sizes)
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3, which="both")
        panel.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[320, 448, 640, 896, 1280])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--picture", type=Path, help="where to draw the figures (.png)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.child:
        sys.stdout.write(json.dumps(measure_memory(options.child[0], int(options.child[1]))))
        return 0
    if len(options.sizes) < 2 or any(size % 64 or size < WARM_UP for size in options.sizes):
        parser.error(f"--sizes must be two or more multiples of 64 from {WARM_UP} px, got {options.sizes}")
    options.sizes.sort()
    clock = "cpu" if options.threads == 1 else "wall"
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.threads} thread(s), "
        f"batch 1, {options.rounds} rounds in turns, {clock} clock; mixers on the map of stride {STRIDE}"
    )
    seconds = times(options)
    table("time [s]", options.sizes, seconds, 4)
    peaks = memory(options)
    table("peak memory [MiB]", options.sizes, peaks, 1)
    if options.picture:
        draw(options.picture, options.sizes, {"time [s]": seconds, "peak memory [MiB]": peaks})
    return 0


if __name__ == "__main__":
    sys.exit(main())
