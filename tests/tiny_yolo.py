"""A detector with the YOLO families' own head, small enough to export in seconds: colours to boxes, cell by cell."""

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import onnx
import torch
from torch import Tensor, nn

from carpus.export.families import ExportFamily, get_family
from carpus.export.images import procedural_images
from carpus.export.onnx import export_onnx
from carpus.export.pipeline import ExportSource, export_bundle
from carpus.export.suppression import with_suppression
from carpus.models.yolo.head import Detect
from carpus.models.yolo.letterbox import yolo_preprocess
from carpus.models.yolo.outputs import eval_outputs
from carpus.runtime.spec import ClassInfo

SIZE = (96, 160)
CLASSES = (ClassInfo("cup", 3), ClassInfo("Becher ü", 7), ClassInfo("杯", 90))


class TinyYOLO(nn.Module):
    """Mean colours of three cell sizes, lifted to 16 channels, and the head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = SimpleNamespace(input_size=SIZE)
        self.lift = nn.ModuleList(nn.Conv2d(3, 16, 3, padding=1) for _ in range(3))
        self.head = Detect([16, 16, 16], len(CLASSES), depthwise_class_branch=False)
        with torch.no_grad():
            for box, classes in zip(self.head.cv2, self.head.cv3, strict=True):
                box[-1].weight.mul_(6.0)
                classes[-1].weight.mul_(12.0)
                classes[-1].bias.fill_(-1.0)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(B, 3, H, W) -> outputs of all positions, before suppression."""
        maps = [
            torch.tanh(3.0 * lift(nn.functional.avg_pool2d(images, stride)))
            for lift, stride in zip(self.lift, self.head.strides, strict=True)
        ]
        return eval_outputs(self.head, self.head(maps), images)


def tiny_family() -> ExportFamily:
    """How it is exported: as the YOLO families are."""
    return ExportFamily(
        "tiny_yolo",
        TinyYOLO,
        copy.deepcopy,
        lambda network, size: yolo_preprocess(size),
        get_family("yolo_master").postprocess,
    )


def tiny_source(seed: int = 0) -> ExportSource:
    """The network as a source for export."""
    return ExportSource(TinyYOLO(seed).eval(), "tiny_yolo", "tiny", SIZE, CLASSES, name="tiny", licence="MIT")


@functools.cache
def tiny_network(*, suppress: bool = True) -> onnx.ModelProto:
    """Its graph, exported once a test process."""
    if suppress:
        return with_suppression(tiny_network(suppress=False), SIZE, tiny_family().postprocess)
    return export_onnx(tiny_source().module, SIZE)


@functools.cache
def tiny_bundle() -> Path:
    """A bundle of it, written once a test process; where ``get_family`` knows it."""
    folder = tempfile.mkdtemp(prefix="carpus-tiny-yolo-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return export_bundle(
        replace(tiny_source()), Path(folder) / "tiny.carpus", images=procedural_images(5), network=tiny_network()
    ).path
