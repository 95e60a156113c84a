"""Encoders between backbone and decoder: the hybrid one (n to x) and the lite one (atto, femto, pico)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.deimv2.config import DEIMv2Config, EncoderConfig
from carpus.models.deimv2.layers import ConvNorm, SelfAttention, fused_conv

__all__ = ["HybridEncoder", "LiteEncoder", "build_encoder", "sincos_position"]


class RepBlock(nn.Module):
    """SiLU of a 3x3 and a 1x1 branch added; both fold into one 3x3 convolution for deployment."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(channels, channels, 3)
        self.conv2 = ConvNorm(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        return F.silu(self.conv1(x) + self.conv2(x) if hasattr(self, "conv2") else self.conv(x))

    def fuse(self) -> None:
        """Replace both branches by one convolution with bias, in place. Does nothing the second time."""
        if not hasattr(self, "conv2"):
            return
        self.conv1.fuse()
        self.conv2.fuse()
        conv, pointwise = self.conv1.conv, self.conv2.conv
        if conv.bias is None or pointwise.bias is None:
            raise ValueError("branches of a RepBlock must carry a bias once fused")
        with torch.no_grad():
            conv.weight += F.pad(pointwise.weight, (1, 1, 1, 1))
            conv.bias += pointwise.bias
        del self.conv1, self.conv2
        self.conv = conv


class CSPBlock(nn.Module):
    """1x1 convolution, split; one half through the RepBlocks, halves added."""

    def __init__(self, in_channels: int, channels: int, num_blocks: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(in_channels, 2 * channels, act=True)
        self.bottlenecks = nn.Sequential(*(RepBlock(channels) for _ in range(num_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, channels, H, W)."""
        a, b = self.conv1(x).chunk(2, 1)
        return a + self.bottlenecks(b)


class FuseBlock(nn.Module):
    """ELAN with CSP branches: all intermediate maps concatenated and mixed by a 1x1 convolution."""

    def __init__(self, dim: int, config: EncoderConfig) -> None:
        super().__init__()
        channels = int(config.expansion * dim // 2)
        self.cv1 = ConvNorm(dim, 2 * dim, act=True)

        def branch(in_channels: int) -> nn.Sequential:
            layers: list[nn.Module] = [CSPBlock(in_channels, channels, config.num_bottlenecks)]
            if config.branch_convs:
                layers.append(ConvNorm(channels, channels, 3, act=True))
            return nn.Sequential(*layers)

        self.cv2, self.cv3 = branch(dim), branch(channels)
        self.cv4 = ConvNorm(2 * dim + 2 * channels, dim, act=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, dim, H, W) -> (B, dim, H, W)."""
        y = self.cv1(x)
        y2 = self.cv2(y.chunk(2, 1)[1])
        return self.cv4(torch.cat([y, y2, self.cv3(y2)], 1))


class PoolDown(nn.Sequential):
    """Halve the resolution: 3x3 average pool of stride 2, 1x1 convolution, BatchNorm, SiLU."""

    def __init__(self, dim: int) -> None:
        super().__init__(nn.AvgPool2d(3, 2, 1), nn.Conv2d(dim, dim, 1, bias=False), nn.BatchNorm2d(dim), nn.SiLU())

    def fuse(self) -> None:
        """Fold the norm into the convolution, in place. Does nothing the second time."""
        conv, norm = self[1], self[2]
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            self[1], self[2] = fused_conv(conv, norm), nn.Identity()


class GlobalMix(nn.Module):
    """Adds the map's mean to every position, then a 1x1 convolution."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.cv = ConvNorm(dim, dim, act=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, dim, H, W) -> (B, dim, H, W)."""
        return self.cv(x + x.mean((2, 3), keepdim=True))


class LiteEncoder(nn.Module):
    """One map (stride 16) to two (strides 16 and 32)."""

    def __init__(self, in_channels: tuple[int, ...], dim: int, config: EncoderConfig) -> None:
        super().__init__()
        self.input_proj = nn.ModuleList(ConvNorm(channels, dim) for channels in in_channels)
        self.down_sample1 = PoolDown(dim)
        self.down_sample2 = PoolDown(dim)
        self.bi_fusion = GlobalMix(dim)
        self.fpn_block = FuseBlock(dim, config)
        self.pan_block = FuseBlock(dim, config)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """[(B, C, H/16, W/16)] -> [(B, dim, H/16, W/16), (B, dim, H/32, W/32)]."""
        fine = self.input_proj[0](maps[0])
        coarse = self.bi_fusion(self.down_sample1(fine))
        fine = self.fpn_block(fine + F.interpolate(coarse, scale_factor=2.0, mode="nearest"))
        return [fine, self.pan_block(coarse + self.down_sample2(fine))]


def sincos_position(height: int, width: int, dim: int, temperature: float = 10000.0) -> Tensor:
    """Sine-cosine position of every cell.

    Returns:
        (1, height*width, dim) float32: [sin(a w), cos(a w), sin(b w), cos(b w)] of dim/4 frequencies w each, where
        token t has a = t // height and b = t mod height (the published code's order: row and column on a square
        grid, not on others).
    """
    quarter = dim // 4
    omega = 1.0 / temperature ** (torch.arange(quarter, dtype=torch.float32) / quarter)
    token = torch.arange(height * width)
    a = (token // height).float()[:, None] * omega
    b = (token % height).float()[:, None] * omega
    return torch.cat([a.sin(), a.cos(), b.sin(), b.cos()], 1)[None]


class TransformerLayer(nn.Module):
    """Post-norm transformer layer with GELU."""

    def __init__(self, dim: int, feedforward_dim: int, num_heads: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(dim, num_heads)
        self.linear1 = nn.Linear(dim, feedforward_dim)
        self.linear2 = nn.Linear(feedforward_dim, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        """(B, N, dim), (1, N, dim) -> (B, N, dim)."""
        x = self.norm1(x + self.self_attn(x, pos))
        return self.norm2(x + self.linear2(F.gelu(self.linear1(x))))


class TransformerStack(nn.Module):
    """Layers in sequence; exists for the checkpoint's names."""

    def __init__(self, dim: int, config: EncoderConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TransformerLayer(dim, config.feedforward_dim, config.num_heads)])

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        """(B, N, dim), (1, N, dim) -> (B, N, dim)."""
        for layer in self.layers:
            x = layer(x, pos)
        return x


class DownBlock(nn.Module):
    """1x1 convolution, then a depthwise 3x3 one of stride 2; no activation."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.cv1 = ConvNorm(dim, dim)
        self.cv2 = ConvNorm(dim, dim, 3, 2, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, dim, H, W) -> (B, dim, H/2, W/2)."""
        return self.cv2(self.cv1(x))


class HybridEncoder(nn.Module):
    """Transformer layer on the coarsest map, then top-down and bottom-up fusion."""

    def __init__(
        self, in_channels: tuple[int, ...], dim: int, config: EncoderConfig, coarse_size: tuple[int, int]
    ) -> None:
        super().__init__()
        steps = len(in_channels) - 1
        self.input_proj = nn.ModuleList(
            ConvNorm(channels, dim) if channels != dim else nn.Identity() for channels in in_channels
        )
        self.encoder = nn.ModuleList([TransformerStack(dim, config)])
        self.lateral_convs = nn.ModuleList(ConvNorm(dim, dim) for _ in range(steps))
        self.fpn_blocks = nn.ModuleList(FuseBlock(dim, config) for _ in range(steps))
        self.downsample_convs = nn.ModuleList(nn.Sequential(DownBlock(dim)) for _ in range(steps))
        self.pan_blocks = nn.ModuleList(FuseBlock(dim, config) for _ in range(steps))
        self.coarse_size = coarse_size
        self.position: Tensor
        self.register_buffer("position", sincos_position(*coarse_size, dim), persistent=False)

    def _position(self, like: Tensor) -> Tensor:
        """The position embedding for a map (B, dim, H, W); stored for the configured size, made for others."""
        size = (like.shape[2], like.shape[3])
        return self.position if size == self.coarse_size else sincos_position(*size, like.shape[1]).to(like)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """[(B, C_i, H_i, W_i)] -> [(B, dim, H_i, W_i)], fine to coarse."""
        levels = [proj(x) for proj, x in zip(self.input_proj, maps, strict=True)]
        coarse = levels[-1]
        tokens = self.encoder[0](coarse.flatten(2).transpose(1, 2), self._position(coarse))
        levels[-1] = tokens.transpose(1, 2).reshape(coarse.shape)

        top_down = [levels[-1]]
        for finer, lateral, block in zip(levels[-2::-1], self.lateral_convs, self.fpn_blocks, strict=True):
            top_down[0] = lateral(top_down[0])
            fused = block(F.interpolate(top_down[0], scale_factor=2.0, mode="nearest") + finer)
            top_down.insert(0, fused)

        outputs = [top_down[0]]
        for coarser, down, block in zip(top_down[1:], self.downsample_convs, self.pan_blocks, strict=True):
            outputs.append(block(down(outputs[-1]) + coarser))
        return outputs


def build_encoder(config: DEIMv2Config) -> LiteEncoder | HybridEncoder:
    """The encoder that ``config.encoder.kind`` names."""
    in_channels, dim = config.backbone.out_channels, config.hidden_dim
    if config.encoder.kind == "lite":
        return LiteEncoder(in_channels, dim, config.encoder)
    height, width = config.input_size
    return HybridEncoder(in_channels, dim, config.encoder, (height // 32, width // 32))
