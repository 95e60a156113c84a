"""Routers of the mixture-of-experts layers, and the losses that keep experts balanced and different."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpus.models.losses.processes import mean_over_processes
from carpus.models.yolo.blocks import batch_norm

__all__ = [
    "GlobalRouter",
    "Routing",
    "SpatialRouter",
    "diversity_loss",
    "importance_usage_loss",
    "mean_square_balance_loss",
]

LOGIT_LIMIT = 30.0
EPS = 1e-6


class Routing(NamedTuple):
    """Decision of a router.

    Attributes:
        logits: (B, E) float32; with the noise, where there was noise.
        weights: (B, E) float32, zero for experts that are not chosen.
        chosen: (B, K) int64 experts, best first; None where all experts are mixed.
    """

    logits: Tensor
    weights: Tensor
    chosen: Tensor | None


class GlobalRouter(nn.Module):
    """Router on the globally averaged map.

    Args:
        channels: channels of the map.
        num_experts: experts E.
        top_k: experts chosen; None gives the softmax over all of them.
    """

    def __init__(self, channels: int, num_experts: int, top_k: int | None) -> None:
        super().__init__()
        self.top_k = top_k
        hidden = max(channels // 8, 8)
        self.routing_network = nn.Sequential(
            nn.Conv2d(channels, hidden, 1), nn.SiLU(), nn.Conv2d(hidden, num_experts, 1)
        )

    def forward(self, x: Tensor) -> Routing:
        """(B, C, H, W) -> decision.

        Training weights are the softmax over all experts, cut to the chosen ones and renormalised ("soft"); inference
        weights are the softmax over the chosen logits ("hard"). Both are the same numbers up to 1e-6.
        """
        logits = self.routing_network(x.mean((2, 3), keepdim=True)).flatten(1).float()
        if self.top_k is None:
            return Routing(logits, logits.softmax(1), None)
        logits = logits.clamp(-LOGIT_LIMIT, LOGIT_LIMIT)
        best, chosen = logits.topk(self.top_k, 1)
        if self.training:
            weights = logits.softmax(1) * torch.zeros_like(logits).scatter(1, chosen, 1.0)
            return Routing(logits, weights / (weights.sum(1, keepdim=True) + EPS), chosen)
        return Routing(logits, _blank(logits).scatter(1, chosen, best.softmax(1)), chosen)


class SpatialRouter(nn.Module):
    """Convolutional router on a pooled map, averaged over space at the end.

    Args:
        channels: channels of the map.
        num_experts: experts E.
        top_k: experts chosen.
        noise_std: standard deviation of the noise on the logits in training.
    """

    POOL = 4

    def __init__(self, channels: int, num_experts: int, top_k: int, noise_std: float) -> None:
        super().__init__()
        self.top_k = top_k
        self.noise_std = noise_std
        hidden = max(channels // 8, 8)
        self.router = nn.Sequential(
            nn.Conv2d(channels, hidden, 3, padding=1, bias=False),
            batch_norm(hidden),
            nn.SiLU(),
            nn.Conv2d(hidden, num_experts, 1, bias=False),
            batch_norm(num_experts),
        )

    def noise(self, logits: Tensor) -> Tensor:
        """Noise (B, E) for logits (B, E)."""
        return torch.randn_like(logits) * self.noise_std

    def forward(self, x: Tensor) -> Routing:
        """(B, C, H, W) -> decision; weights are the chosen probabilities, renormalised, in both modes."""
        if x.shape[2] > self.POOL and x.shape[3] > self.POOL:
            x = F.avg_pool2d(x, self.POOL)
        logits = self.router(x).float().mean((2, 3))
        if self.training and self.noise_std > 0:
            logits = logits + self.noise(logits)
        best, chosen = logits.softmax(1).topk(self.top_k, 1)
        best = best / (best.sum(1, keepdim=True) + EPS)
        return Routing(logits, _blank(logits).scatter(1, chosen, best), chosen)


def _blank(logits: Tensor) -> Tensor:
    """Zeros of the logits' shape; in an exported graph without a batch size to compute."""
    return logits * 0.0 if torch.compiler.is_exporting() else torch.zeros_like(logits)


def mean_square_balance_loss(weights: Tensor) -> Tensor:
    """Mean over the experts of (mean weight - 1/E)^2.

    Args:
        weights: (B, E) routing weights.
    """
    return (weights.mean(0) - 1.0 / weights.shape[1]).square().mean()


def importance_usage_loss(
    logits: Tensor, chosen: Tensor, *, balance_weight: float, z_weight: float, entropy_weight: float = 0.0
) -> Tensor:
    """Load balance of a top-k router: E * sum(importance * usage), and the mean squared log-partition.

    Importance is an expert's mean probability, usage its share of the selections ("Switch Transformers",
    arXiv:2101.03961, equation 4; z-loss: "ST-MoE", arXiv:2202.08906, equation 5). Usage carries no gradient and counts
    all processes; importance is this process's own, so that the gradients averaged over processes are those of the
    global product.

    Args:
        logits: (B, E), with noise if there was.
        chosen: (B, K) experts selected.
        balance_weight: weight of the first term.
        z_weight: weight of the second term.
        entropy_weight: weight of the mean entropy of the probabilities.
    """
    num_experts = logits.shape[1]
    probability = logits.softmax(1)
    usage = mean_over_processes(F.one_hot(chosen, num_experts).to(probability.dtype).mean((0, 1)))
    loss = balance_weight * num_experts * (probability.mean(0) * usage).sum()
    loss = loss + z_weight * logits.logsumexp(1).square().mean()
    if entropy_weight:
        entropy = -(probability * probability.clamp(min=1e-12).log()).sum(1)
        loss = loss + entropy_weight * entropy.mean()
    return loss


def diversity_loss(outputs: Tensor) -> Tensor:
    """Mean squared cosine between the experts' answers: 0 where all are orthogonal, 1 where they agree.

    Args:
        outputs: (B, E, C) one vector an expert.
    """
    num_experts = outputs.shape[1]
    if num_experts < 2:
        return outputs.new_zeros(())
    unit = F.normalize(outputs.float(), dim=2)
    square = (unit @ unit.transpose(1, 2)).square()
    others = square.sum((1, 2)) - square.diagonal(dim1=1, dim2=2).sum(1)
    return others.mean() / (num_experts * (num_experts - 1))
