"""The Mamba-YOLO detector: backbone and neck as one list of layers, then the detection head (arXiv:2406.05835)."""

from __future__ import annotations

from torch import Tensor, nn

from carpus.models.mamba_yolo.blocks import SimpleStem, VisionClueMerge, VSSBlock, XSSBlock
from carpus.models.mamba_yolo.config import MambaYOLOConfig
from carpus.models.yolo.blocks import SPPF, Concat, Conv
from carpus.models.yolo.head import Detect
from carpus.models.yolo.outputs import check_images, eval_outputs

__all__ = ["MambaYOLO"]


class MambaYOLO(nn.Module):
    """Mamba-YOLO detector.

    Args:
        config: sizes; see ``carpus.models.mamba_yolo.config.VARIANTS``.
    """

    def __init__(self, config: MambaYOLOConfig) -> None:
        super().__init__()
        self.config = config
        c2, c3, c4, c5 = config.channels
        n2, n3, n4, n5 = config.repeats
        # rows: layer, and the layers it reads; -1 is the one before
        rows: list[tuple[nn.Module, tuple[int, ...]]] = [
            (SimpleStem(3, c2), (-1,)),
            (self._stage(c2, n2), (-1,)),
            (VisionClueMerge(c2, c3), (-1,)),
            (self._stage(c3, n3), (-1,)),
            (VisionClueMerge(c3, c4), (-1,)),
            (self._stage(c4, n4), (-1,)),
            (VisionClueMerge(c4, c5), (-1,)),
            (self._stage(c5, n5), (-1,)),
            (SPPF(c5, c5), (-1,)),
            (nn.Upsample(scale_factor=2.0, mode="nearest"), (-1,)),
            (Concat(), (-1, 5)),
            (self._neck(c5 + c4, c4), (-1,)),
            (nn.Upsample(scale_factor=2.0, mode="nearest"), (-1,)),
            (Concat(), (-1, 3)),
            (self._neck(c4 + c3, c3), (-1,)),
            (Conv(c3, c3, 3, 2), (-1,)),
            (Concat(), (-1, 11)),
            (self._neck(c3 + c4, c4), (-1,)),
            (Conv(c4, c4, 3, 2), (-1,)),
            (Concat(), (-1, 8)),
            (self._neck(c4 + c5, c5), (-1,)),
            (
                Detect([c3, c4, c5], config.num_classes, depthwise_class_branch=False, reg_max=config.reg_max),
                (14, 17, 20),
            ),
        ]
        self.sources = tuple(sources for _, sources in rows)
        self.model = nn.ModuleList(layer for layer, _ in rows)

    def _stage(self, channels: int, repeats: int) -> nn.Module:
        """One block stands alone, several in a sequence: so the checkpoints name them."""
        config = self.config
        blocks = [VSSBlock(channels, channels, config.scan, config.gate_activation) for _ in range(repeats)]
        return blocks[0] if repeats == 1 else nn.Sequential(*blocks)

    def _neck(self, in_channels: int, channels: int) -> XSSBlock:
        config = self.config
        return XSSBlock(in_channels, channels, config.neck_repeats, config.scan, config.gate_activation)

    @property
    def head(self) -> Detect:
        """The detection head, which is the last layer."""
        return self.model[-1]  # type: ignore[return-value]

    def forward(self, images: Tensor, targets: object = None, denoising: object = None) -> dict:
        """Detect.

        Args:
            images: (B, 3, H, W) float RGB in 0..1; H and W multiples of 32.
            targets: not used; detectors of other families take them here.
            denoising: not used, as ``targets``.

        Returns:
            In eval mode {"pred_logits": (B, A, C), "pred_boxes": (B, A, 4) cxcywh in 0..1 of the input}, before
            non-maximum suppression. In training {"raw": the head's level maps}.

        Raises:
            DataError: an input of the wrong rank, or sides that are not multiples of 32 px.
        """
        check_images("Mamba-YOLO", images)
        outputs: list[Tensor] = []
        for layer, sources in zip(self.model[:-1], self.sources[:-1], strict=True):
            inputs = [(outputs[s] if outputs else images) for s in sources]
            outputs.append(layer(inputs if isinstance(layer, Concat) else inputs[0]))
        raw = self.head([outputs[i] for i in self.sources[-1]])
        return {"raw": raw} if self.training else eval_outputs(self.head, raw, images)
