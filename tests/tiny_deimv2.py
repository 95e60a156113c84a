"""A DEIMv2 small enough to export in seconds, with weights spread so that it is sure of some boxes."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import onnx
import torch
from torch import nn

from carpus.export.images import procedural_images
from carpus.export.pipeline import ExportSource, export_bundle, export_network
from carpus.models.deimv2.config import BackboneConfig, DecoderConfig, DEIMv2Config, EncoderConfig, StageConfig
from carpus.models.deimv2.model import DEIMv2
from carpus.models.predict import deimv2_preprocess
from carpus.runtime.spec import ClassInfo

SIZE = (96, 160)
CLASSES = (ClassInfo("cup", 3), ClassInfo("Becher \u00fc", 7), ClassInfo("杯", 90))

# With large random weights these answer tiny changes with large ones, as no trained network does.
_BOX_PARTS = ("bbox_head", "sampling_offsets", "query_pos_head")


def tiny_model(kind: str = "lite", seed: int = 0) -> DEIMv2:
    """One decoder layer, a query for every position, an input that is not square."""
    coarse = StageConfig(32, 8, 32, 1, True, True, 3, num_layers=1)
    stages = (
        StageConfig(16, 8, 16, 1, False, False, 3, num_layers=1),
        StageConfig(16, 8, 24, 1, True, False, 3, num_layers=1),
        StageConfig(24, 8, 32, 1, True, True, 3, num_layers=1),
    )
    hybrid = kind == "hybrid"
    config = DEIMv2Config(
        variant="atto",
        input_size=SIZE,
        hidden_dim=32,
        backbone=BackboneConfig("tiny", (*stages, coarse) if hybrid else stages, (2, 3) if hybrid else (2,)),
        encoder=EncoderConfig("hybrid", 0.5, 1, 32, 2) if hybrid else EncoderConfig("lite", 0.5, 1),
        decoder=DecoderConfig(75, (2, 1), 16, gateway=hybrid, share_bbox_head=not hybrid, num_layers=1, num_heads=2),
        num_classes=len(CLASSES),
    )
    generator = torch.Generator().manual_seed(seed)
    model = DEIMv2(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                fan_in = parameter[0].numel()
                gain = 0.7 if any(part in name for part in _BOX_PARTS) else 1.4
                parameter.normal_(0.0, gain * fan_in**-0.5, generator=generator)
            elif parameter.requires_grad and not name.endswith("scale"):
                parameter.normal_(0.0, 0.2, generator=generator)
    _settle_norms(model)
    return model.eval()


def _settle_norms(model: DEIMv2) -> None:
    """Give the norms the statistics of some pictures, so that what the network says depends on what it sees."""
    pictures = [picture.pixels for picture in procedural_images(4, seed=1)]
    images = torch.from_numpy(deimv2_preprocess(SIZE)(pictures)[0])
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train().encoder(model.backbone(images))
    for norm in norms:
        norm.momentum = 0.1


@functools.cache
def tiny_network() -> onnx.ModelProto:
    """The graph of the tiny model, exported once a test process."""
    return export_network(tiny_source())


@functools.cache
def tiny_bundle() -> Path:
    """A bundle of the tiny model, written once a test process. Copy it before changing anything in it."""
    folder = tempfile.mkdtemp(prefix="carpus-tiny-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return export_bundle(
        tiny_source(), Path(folder) / "tiny.carpus", images=procedural_images(4), network=tiny_network()
    ).path


def tiny_source(kind: str = "lite", seed: int = 0) -> ExportSource:
    """The tiny model as a source for export."""
    return ExportSource(tiny_model(kind, seed), "deimv2", "atto", SIZE, CLASSES, name="tiny", licence="MIT")
