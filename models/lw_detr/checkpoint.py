"""Published LW-DETR files: what stands in them, and what of it a network takes."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from carpus.models.lw_detr.resnet import is_resnet_only, load_resnet
from carpus.models.published.reader import read_published
from carpus.models.published.rules import COUNTERS, Rules
from carpus.models.published.start import start_with

__all__ = ["RULES", "load_into"]

RULES = Rules(
    title="LW-DETR",
    known=(COUNTERS,),
    class_head=r"class_embed\.weight",
    class_rows=r"(class_embed|transformer\.enc_out_class_embed\.\d+)\.(weight|bias)",
    hint="Files for COCO have 91 classes, which are its category ids.",
)


def load_into(model: nn.Module, path: Path) -> str:
    """Start a network from a published file; with another number of classes all but the classification rows is kept.

    A file of a ResNet alone, with torchvision's names, fills a ResNet encoder.

    Returns:
        One line that says what was taken.

    Raises:
        DataError: an unreadable file, or weights of another architecture.
    """
    weights = read_published(path)
    if not is_resnet_only(weights.state):
        return start_with(model, weights, RULES)
    fit = load_resnet(model.get_submodule("backbone.0.encoder"), weights.state, f"checkpoint {path}")
    unused = f"; not used: {', '.join(name for name, _ in fit.not_taken)}" if fit.not_taken else ""
    return f"encoder starts from {path} ({len(fit.copied)} entries{unused}); everything else from random weights"
