"""Published DEIMv2 files: what stands in them, and what of it a network takes."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from torch import nn

from carpus.models.deimv2.backbone_checkpoint import is_transformer_only, load_transformer
from carpus.models.deimv2.model import DEIMv2
from carpus.models.published.reader import read_published
from carpus.models.published.rules import COUNTERS, Known, Rules
from carpus.models.published.start import start_with

__all__ = ["RULES", "load_into"]

RULES = Rules(
    title="DEIMv2",
    known=(
        COUNTERS,
        Known(r"decoder\.(anchors|valid_mask)", "derived", "follow from the input size"),
        Known(r"decoder\.(decoder\.)?(up|reg_scale)", "constant", "set by the configuration, never trained"),
        Known(
            r"decoder\.decoder\.layers\.\d+\.cross_attn\.num_points_scale",
            "constant",
            "one over the number of sampling points of a level",
        ),
        Known(
            r"backbone\.dinov3\.(_model\.)?rope_embed\.periods",
            "optional",
            "the same in every transformer of this head size",
        ),
    ),
    class_head=r"decoder\.enc_score_head\.weight",
    class_rows=r"decoder\.(enc_score_head|dec_score_head\.\d+|denoising_class_embed)\.(weight|bias)",
)


def load_into(model: nn.Module, path: Path) -> str:
    """Start a network from a published file; with another number of classes all but the classification rows is kept.

    A file with a transformer alone (a distilled backbone, or DINOv3's own) fills the backbone's transformer.

    Returns:
        One line that says what was taken.

    Raises:
        DataError: an unreadable file, or weights of another architecture.
    """
    weights = read_published(path)
    if is_transformer_only(weights.state):
        return load_transformer(cast(DEIMv2, model), weights.state, f"checkpoint {path}").describe(path)
    return start_with(model, weights, RULES)
