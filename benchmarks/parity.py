"""torch, ONNX Runtime and OpenVINO on the same pictures: greatest differences, and the AP of each.

    python benchmarks/parity.py CHECKPOINT BUNDLE DATASET [--images 100] [--ap-images 1000] [--threads 1]

CHECKPOINT is what BUNDLE was exported from, DATASET a split's folder. torch runs the trained module itself, not fused.
Exits 1 when an fp32 artefact lies above its thresholds, or its AP differs from torch's in the third decimal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from carpus.export.families import get_family
from carpus.export.images import folder_images
from carpus.export.parity import TorchReference, reference_cases
from carpus.export.source import load_source
from carpus.models.data.coco import CategoryMap, CocoDataset, locate_split
from carpus.models.data.coco_reader import load_coco
from carpus.models.evaluate import evaluate_coco
from carpus.models.predict import ModelDetector
from carpus.models.train_families import TRAIN_FAMILIES
from carpus.runtime.backends import BACKENDS
from carpus.runtime.bundle import Bundle
from carpus.runtime.detections import Detections
from carpus.runtime.detector import Detector
from carpus.runtime.verify import measure

Predict = Callable[[Sequence[np.ndarray]], Sequence[Detections]]


def average_precision(predict: Predict, dataset: CocoDataset, what: str) -> float:
    """COCO AP, with a count on a terminal."""

    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{what}: {done} of {total} " + ("\n" if done == total else ""))

    return evaluate_coco(predict, dataset, progress=tell).ap


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--images", type=int, default=100, help="pictures for the differences")
    parser.add_argument("--ap-images", type=int, default=1000, help="images for AP; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    source = load_source(options.checkpoint)
    family = get_family(source.family)
    preprocess = family.preprocess(source.module, source.input_size)
    names = tuple(info.name for info in source.classes)
    reference = TorchReference(source.module, preprocess, family.postprocess, names)
    annotations, image_dir = locate_split(options.dataset)
    cases = reference_cases(reference, folder_images(image_dir, options.images))
    categories = CategoryMap(names, tuple(info.dataset_id for info in source.classes))
    dataset = load_coco(annotations, image_dir, categories=categories)
    scored = dataset.subset(options.ap_images) if options.ap_images else None

    print(f"{len(cases)} pictures, none square; AP on {len(scored) if scored else 0} images")
    print("backend       weights  boxes [px]  scores    others  detections  differ     AP")
    expected = None
    if scored is not None:
        spec = TRAIN_FAMILIES[source.family].postprocess
        detector = ModelDetector(source.module, names, preprocess, spec)
        expected = average_precision(detector, scored, "torch")
        print(
            f"{'torch ' + torch.__version__.partition('+')[0]:<13} fp32     {'-':>10}  {'-':>8}  {'-':>6}  {'-':>10}"
            f"  {'-':>6}  {expected:.4f}"
        )
    with Bundle.open(options.bundle) as bundle:
        artefacts = bundle.manifest.artefacts
    fine = True
    for artefact in artefacts:
        for name, info in BACKENDS.items():
            if artefact.format != info.formats[0] or not info.installed:
                continue
            record = measure(options.bundle, name, artefact.precision, cases, num_threads=options.threads)
            found = record.metrics
            line = (
                f"{name:<13} {artefact.precision:<7}  {found['max_box_px']:10.2e}  {found['max_score']:.2e}  "
                f"{found['replaced']:6.0f}  {found['detections']:10.0f}  {found['detections_differ']:6.0f}"
            )
            fine &= record.passed
            if scored is not None and expected is not None:
                with Detector.open(
                    options.bundle,
                    name,
                    precision=artefact.precision,
                    score_threshold=TRAIN_FAMILIES[source.family].postprocess.score_threshold,
                    evaluation=True,
                    num_threads=options.threads,
                ) as runtime:
                    ap = average_precision(runtime.detect_batch, scored, f"{name} {artefact.precision}")
                line += f"  {ap:.4f}"
                fine &= artefact.precision != "fp32" or round(ap, 3) == round(expected, 3)
            print(line, flush=True)
            if not record.passed:
                print(f"  above the thresholds: {record.worst}")
    print("all within the thresholds" if fine else "NOT within the thresholds")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
