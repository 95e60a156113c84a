"""The YOLO-Master detector: a list of layers, then the detection head (arXiv:2512.23273)."""

from __future__ import annotations

from torch import Tensor, nn

from carpus.models.yolo.blocks import C3k2, Concat, Conv
from carpus.models.yolo.head import Detect
from carpus.models.yolo.outputs import check_images, eval_outputs
from carpus.models.yolo_master.attention import A2C2f
from carpus.models.yolo_master.config import LayerSpec, Scale, YOLOMasterConfig
from carpus.models.yolo_master.moe import build_moe

__all__ = ["YOLOMaster"]


class YOLOMaster(nn.Module):
    """YOLO-Master detector.

    Args:
        config: sizes; see ``carpus.models.yolo_master.config.VARIANTS``.
    """

    def __init__(self, config: YOLOMasterConfig) -> None:
        super().__init__()
        self.config = config
        num_experts = iter(config.moe.num_experts)
        layers: list[nn.Module] = []
        channels: list[int] = []
        self.sources: list[tuple[int, ...]] = []
        for index, spec in enumerate(config.layers):
            sources = tuple(s if s >= 0 else index + s for s in spec.sources)
            widths = [3 if s < 0 else channels[s] for s in sources]
            layer: nn.Module
            if spec.kind == "moe":
                layer, out = build_moe(widths[0], next(num_experts), config.moe), widths[0]
            elif spec.kind == "concat":
                layer, out = Concat(), sum(widths)
            elif spec.kind == "upsample":
                layer, out = nn.Upsample(scale_factor=2, mode="nearest"), widths[0]
            else:
                out = config.scale.channels(spec.channels)
                layer = _block(spec, config.scale, widths[0], out)
            self.sources.append(sources)
            channels.append(out)
            layers.append(layer)
        layers.append(
            Detect(
                [channels[i] for i in config.outputs],
                config.num_classes,
                depthwise_class_branch=True,
                reg_max=config.reg_max,
            )
        )
        self.model = nn.ModuleList(layers)

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
            non-maximum suppression. In training {"raw": the head's level maps, "aux_loss": sum of the auxiliary losses
            of the mixture-of-experts layers}.

        Raises:
            DataError: an input of the wrong rank, or sides that are not multiples of 32 px.
        """
        check_images("YOLO-Master", images)
        outputs: list[Tensor] = []
        aux_loss = images.new_zeros(())
        for spec, layer, sources in zip(self.config.layers, self.model, self.sources, strict=False):
            inputs = [images if s < 0 else outputs[s] for s in sources]
            if spec.kind == "moe":
                output, loss = layer(inputs[0])
                aux_loss = aux_loss + loss
            else:
                output = layer(inputs if spec.kind == "concat" else inputs[0])
            outputs.append(output)
        raw = self.head([outputs[i] for i in self.config.outputs])
        if self.training:
            return {"raw": raw, "aux_loss": aux_loss}
        return eval_outputs(self.head, raw, images)


def _block(spec: LayerSpec, scale: Scale, in_channels: int, out_channels: int) -> nn.Module:
    repeats = scale.repeats(spec.repeats)
    if spec.kind == "conv":
        return Conv(in_channels, out_channels, 3, spec.stride)
    if spec.kind == "c3k2":
        return C3k2(in_channels, out_channels, repeats, c3k=spec.nested or scale.nested, expansion=spec.expansion)
    return A2C2f(
        in_channels,
        out_channels,
        repeats,
        area=spec.area,
        residual=scale.residual,
        mlp_ratio=1.2 if scale.residual else 2.0,
    )
