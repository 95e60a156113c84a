"""LW-DETR's encoder with its tokens in window-major order beside the same weights in row-major order.

    python benchmarks/window_order.py [--variants tiny small medium] [--sizes 320 640] [--rounds 15] [--threads 1]

The row-major peer cuts the map into windows before every windowed block and puts it together after, as plain ViT
detectors do; the window-major order does so once. Both give the same maps, which is checked. They take turns within one
run; with one thread the clock counts the processor's time for this process. Exits 1 when the maps differ.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time

import torch
from torch import Tensor

from carpus.models.lw_detr.config import VARIANTS, ViTConfig
from carpus.models.lw_detr.vit import ViT, from_window_major, to_window_major

TOLERANCE = 1e-4  # of the largest value; sums run in another order


def row_major(vit: ViT, images: Tensor) -> list[Tensor]:
    """What ``vit`` computes, with tokens in row-major order between the blocks."""
    x = vit.patch_embed(images)
    height, width = x.shape[1:3]
    x = x + vit.positions(height, width)
    grid = vit.config.window_grid
    maps = []
    for i, block in enumerate(vit.blocks):
        if i in vit.config.windowed:
            x = from_window_major(block(to_window_major(x, grid)), grid, height, width).permute(0, 2, 3, 1)
        else:
            # a block joins its rows to whole images for attention; the order inside an image is its own
            x = block(x.reshape(grid**2, -1, x.shape[-1])).reshape(x.shape)
        if i in vit.config.taken:
            maps.append(x.permute(0, 3, 1, 2).contiguous())
    return maps


@torch.inference_mode()
def compare(variant: str, size: int, rounds: int, threads: int) -> bool:
    """Time both in turns, print a row; whether their maps are equal."""
    torch.manual_seed(0)
    config = VARIANTS[variant].encoder
    if not isinstance(config, ViTConfig):
        raise SystemExit(f"{variant} has no windows")
    vit = ViT(config).eval()
    images = torch.rand(1, 3, size, size)
    orders = {"window": lambda: vit(images), "row": lambda: row_major(vit, images)}
    differ = max(
        float((ours - theirs).abs().max() / theirs.abs().max())
        for ours, theirs in zip(*(run() for run in orders.values()), strict=True)
    )
    clock = time.process_time if threads == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in orders}
    for turn in range(rounds + 2):
        for name in orders if turn % 2 else reversed(orders):
            start = clock()
            orders[name]()
            taken[name].append((clock() - start) * 1e3)
    window, row = (statistics.median(values[2:]) for values in taken.values())
    pairs = [b / a for a, b in zip(taken["window"][2:], taken["row"][2:], strict=True)]
    least, most = statistics.quantiles(pairs, n=4)[::2]
    print(
        f"{variant:<8}{size:>6}{window:>12.1f}{row:>12.1f}{statistics.median(pairs):>9.3f}"
        f"{least:>9.3f} to {most:.3f}{differ:>12.1e}",
        flush=True,
    )
    return differ <= TOLERANCE


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["tiny", "small", "medium"], choices=list(VARIANTS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[320, 640])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.threads} thread(s), "
        f"batch 1, {options.rounds} rounds in turns, {'cpu' if options.threads == 1 else 'wall'} clock"
    )
    print("variant   size  window [ms]    row [ms]  row / window, middle half     differ")
    fine = [
        compare(variant, size, options.rounds, options.threads)
        for variant in options.variants
        for size in options.sizes
    ]
    print("maps are equal" if all(fine) else f"maps DIFFER by more than {TOLERANCE:g} of their largest value")
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
