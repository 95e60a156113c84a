"""Carpus's ONNX graph beside a naive torch.onnx.export of the same module: same runtime, same run, taken in turns.

    python benchmarks/graph_speed.py [--variants atto n] [--runs 100] [--threads 1] [--batch 1] [--clock cpu]

The naive graph is what ``torch.onnx.export(module, ..., dynamo=True)`` gives for the module as training evaluates it.
Weights are random, which costs the same as any others. With one thread the clock counts the processor's time for this
process, which other processes on the machine disturb least. Exits 1 when Carpus's graph is the slower one anywhere.
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import openvino
import torch

from carpus.export.families import get_family
from carpus.export.onnx import OUTPUTS, export_onnx
from carpus.models.build import build_model

NOISE = 1.03  # medians of two runs of one graph lie this close; a ratio below 1 / NOISE counts as slower


class Positional(torch.nn.Module):
    """The module with its dictionary as a tuple; torch.onnx.export names outputs by position."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.module(images)
        return tuple(found[name] for name in OUTPUTS)


def used_model(variant: str) -> torch.nn.Module:
    """A network as training would leave it: no norm or affine is the identity it starts as, which exporters drop."""
    torch.manual_seed(0)
    module = build_model("deimv2", variant, 80)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name.endswith((".lab.scale", "norm.weight", "bn.weight", "running_var")):
                tensor.uniform_(0.7, 1.3)
            elif name.endswith((".lab.bias", "norm.bias", "bn.bias", "running_mean")):
                tensor.uniform_(-0.1, 0.1)
    return module.eval()


def naive_export(module: torch.nn.Module, size: tuple[int, int], path: Path) -> None:
    """What a user without Carpus would write."""
    program = torch.onnx.export(
        Positional(module).eval(),
        (torch.zeros(2, 3, *size),),
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        input_names=["images"],
        output_names=list(OUTPUTS),
        verbose=False,
    )
    program.save(path)


def runners(path: Path, images: np.ndarray, threads: int) -> dict[str, Callable[[], object]]:
    """One callable a runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    core = openvino.Core()
    network = core.read_model(path)
    network.reshape({"images": list(images.shape)})
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(network, "CPU", settings).create_infer_request()
    request.set_input_tensor(openvino.Tensor(images, shared_memory=True))
    return {"ONNX Runtime": lambda: session.run(None, {"images": images}), "OpenVINO": request.infer}


def compare(variant: str, options: argparse.Namespace, folder: Path) -> bool:
    """Export both forms, time them in turns, print a row a runtime; whether Carpus's is nowhere slower."""
    module = used_model(variant)
    family = get_family("deimv2")
    size = family.input_size(module)
    paths = {"naive": folder / f"{variant}-naive.onnx", "carpus": folder / f"{variant}-carpus.onnx"}
    naive_export(module, size, paths["naive"])
    onnx.save(export_onnx(family.deploy(module), size), paths["carpus"])
    images = np.random.default_rng(0).random((options.batch, 3, *size), np.float32)
    nodes = {name: len(onnx.load(path).graph.node) for name, path in paths.items()}
    forms = {name: runners(path, images, options.threads) for name, path in paths.items()}
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    fine = True
    for runtime in forms["naive"]:
        times: dict[str, list[float]] = {name: [] for name in forms}
        for turn in range(options.runs + 5):
            for name in forms if turn % 2 else reversed(forms):
                start = clock()
                forms[name][runtime]()
                times[name].append((clock() - start) * 1e3)
        medians = {name: statistics.median(values[5:]) for name, values in times.items()}
        least = {name: min(values) for name, values in times.items()}
        ratio = medians["naive"] / medians["carpus"]
        fine &= ratio * NOISE >= 1.0
        print(
            f"{variant:<6} {runtime:<13} {nodes['naive']:>6} {nodes['carpus']:>6}   {medians['naive']:7.2f} "
            f"{medians['carpus']:7.2f} {ratio:6.2f}   {least['naive']:7.2f} {least['carpus']:7.2f} "
            f"{least['naive'] / least['carpus']:6.2f}",
            flush=True,
        )
    return fine


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["atto", "n"])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--clock", choices=("cpu", "wall"), help="cpu for one thread, wall for more, by default")
    options = parser.parse_args()
    options.clock = options.clock or ("cpu" if options.threads == 1 else "wall")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, ONNX Runtime "
        f"{onnxruntime.__version__}, OpenVINO {openvino.__version__.partition('-')[0]}, {options.threads} thread(s), "
        f"batch {options.batch}, {options.runs} runs in turns, {options.clock} clock"
    )
    print("                     nodes           median [ms]             least [ms]")
    print("model  runtime        naive carpus     naive  carpus  ratio     naive  carpus  ratio")
    with tempfile.TemporaryDirectory() as folder:
        fine = [compare(variant, options, Path(folder)) for variant in options.variants]
    print("never slower" if all(fine) else "SLOWER somewhere", f"(ratio = naive / carpus, noise {NOISE - 1:.0%})")
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
