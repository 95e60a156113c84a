"""Dense supervision of the encoder's positions: assignment properties and losses."""

from __future__ import annotations

import pytest
import torch

from carpus.models.build import build_criterion, build_model
from carpus.models.losses.config import LossWeights
from carpus.models.losses.dense import dense_losses, task_aligned_assignment
from carpus.models.losses.targets import pack_targets

CLASSES = 3


def _grid(side: int = 10) -> torch.Tensor:
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack([(x + 0.5) / side, (y + 0.5) / side], -1).reshape(-1, 2)


def _scene(*boxes: list[float], labels: list[int] | None = None) -> dict[str, torch.Tensor]:
    return {
        "labels": torch.tensor(labels or [0] * len(boxes), dtype=torch.int64),
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
    }


def _predictions(points: torch.Tensor, batch: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, len(points), CLASSES, generator=generator)
    size = 0.1 + 0.3 * torch.rand(batch, len(points), 2, generator=generator)
    return logits, torch.cat([points.expand(batch, -1, -1), size], -1)


def test_positions_lie_inside_their_object_and_have_one_owner() -> None:
    points = _grid()
    scenes = [
        _scene([0.3, 0.3, 0.4, 0.4], [0.4, 0.4, 0.4, 0.4], labels=[0, 2]),
        _scene([0.7, 0.6, 0.3, 0.5], labels=[1]),
    ]
    logits, boxes = _predictions(points, 2)
    packed = pack_targets(scenes, CLASSES, points.device)
    query, number, quality = task_aligned_assignment(logits, boxes, points, packed, positions=8)
    assert len(query.unique()) == len(query)
    assert set(number.tolist()) == {0, 1, 2}
    assert max(torch.bincount(number).tolist()) <= 8
    centre = points[query % len(points)]
    owner = packed.boxes[number]
    assert bool(((centre - owner[:, :2]).abs() <= owner[:, 2:] / 2).all())
    assert bool(((quality > 0) & (quality <= 1)).all())
    # The first two objects are of the first image, the third of the second.
    assert bool(((query >= len(points)) == (number == 2)).all())


def test_object_smaller_than_the_grid_takes_the_nearest_position() -> None:
    points = _grid()
    logits, boxes = _predictions(points, 1)
    packed = pack_targets([_scene([0.51, 0.51, 0.01, 0.01])], CLASSES, points.device)
    query, _, _ = task_aligned_assignment(logits, boxes, points, packed)
    assert query.tolist() == [55]


def test_perfect_predictions_have_quality_one_and_no_box_loss() -> None:
    points = _grid()
    box = [0.45, 0.45, 0.3, 0.3]
    scene = _scene(box, labels=[1])
    logits = torch.full((1, len(points), CLASSES), -8.0)
    logits[..., 1] = 8.0
    boxes = torch.tensor(box).expand(1, len(points), 4).clone()
    packed = pack_targets([scene], CLASSES, points.device)
    _, _, quality = task_aligned_assignment(logits, boxes, points, packed)
    assert torch.allclose(quality, torch.ones_like(quality), atol=1e-4)
    losses = dense_losses(logits, boxes, points, packed, LossWeights(), 1.5)
    assert float(losses["loss_bbox_dense"]) == pytest.approx(0.0, abs=1e-5)
    assert float(losses["loss_giou_dense"]) == pytest.approx(0.0, abs=1e-4)


def test_no_objects_gives_finite_losses() -> None:
    points = _grid()
    logits, boxes = _predictions(points, 2)
    logits.requires_grad_()
    packed = pack_targets([_scene(), _scene()], CLASSES, points.device)
    losses = dense_losses(logits, boxes, points, packed, LossWeights(), 1.5)
    total = sum(losses.values())
    total.backward()
    assert torch.isfinite(total)
    assert float(losses["loss_bbox_dense"]) == 0.0
    assert torch.isfinite(logits.grad).all()


def test_model_gives_dense_outputs_only_when_asked_and_detects_the_same() -> None:
    torch.manual_seed(0)
    model = build_model("deimv2", "atto", CLASSES, (64, 64)).train()
    criterion = build_criterion("deimv2", "atto", CLASSES)
    scenes = [_scene([0.5, 0.5, 0.4, 0.3], labels=[2]), _scene()]
    images = torch.rand(2, 3, 320, 320)
    assert "dense" not in model(images, scenes)
    model.decoder.dense_supervision = True
    outputs = model(images, scenes)
    losses = criterion(outputs, scenes, 0)
    assert {"loss_mal_dense", "loss_bbox_dense", "loss_giou_dense"} <= set(losses)
    model.zero_grad()
    losses["loss_mal_dense"].backward(retain_graph=True)
    assert float(model.decoder.enc_score_head.weight.grad.abs().sum()) > 0
    model.eval()
    with torch.no_grad():
        dense = model(images)
        model.decoder.dense_supervision = False
        plain = model(images)
    assert set(dense) == set(plain)
    assert torch.equal(dense["pred_logits"], plain["pred_logits"])
