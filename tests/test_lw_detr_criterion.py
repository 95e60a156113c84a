"""The loss of LW-DETR: against its formula written out, groups, and odd batches."""

from __future__ import annotations

import math

import pytest
import torch

from carpus.models.losses.config import MatcherConfig
from carpus.models.losses.targets import pack_targets
from carpus.models.lw_detr.criterion import LWDETRCriterion, LWDETRCriterionConfig, group_match, iou_aware_loss
from carpus.runtime.errors import DataError


def outputs(batch: int = 2, queries: int = 12, classes: int = 4, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def one() -> dict[str, torch.Tensor]:
        logits = torch.randn(batch, queries, classes, generator=generator)
        boxes = torch.rand(batch, queries, 4, generator=generator) * 0.4 + 0.2
        return {"pred_logits": logits.requires_grad_(), "pred_boxes": boxes.requires_grad_()}

    return {name: one() for name in ("main", "aux_0", "enc")}


def targets(*counts: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "labels": torch.randint(0, 4, (count,), generator=generator),
            "boxes": torch.rand(count, 4, generator=generator) * 0.4 + 0.2,
        }
        for count in counts
    ]


def test_iou_aware_loss_written_out() -> None:
    logits = torch.tensor([[[0.3, -1.2], [2.0, 0.1]]], requires_grad=True)
    loss = iou_aware_loss(logits, torch.tensor([[1]]), torch.tensor([[0]]), torch.tensor([[0.6]]), 0.25)
    p = [1 / (1 + math.exp(-x)) for x in (0.3, -1.2, 2.0, 0.1)]
    t = p[2] ** 0.25 * 0.6**0.75
    expected = -t * math.log(p[2]) - (1 - t) * math.log(1 - p[2])
    expected -= sum(p[i] ** 2 * math.log(1 - p[i]) for i in (0, 1, 3))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    # the weight p^2 of other entries has a gradient too; the target of a pair has none
    q = p[0]
    slope = q * q * q - 2 * q * q * (1 - q) * math.log(1 - q)
    assert float(gradient[0, 0, 0]) == pytest.approx(slope, rel=1e-5)
    assert float(gradient[0, 1, 0]) == pytest.approx(p[2] - t, rel=1e-5)


def test_no_overlap_still_teaches_a_little() -> None:
    loss = iou_aware_loss(
        torch.full((1, 1, 1), 3.0), torch.zeros(1, 1).long(), torch.zeros(1, 1).long(), torch.zeros(1, 1), 0.25
    )
    p = 1 / (1 + math.exp(-3.0))
    assert float(loss) == pytest.approx(-0.01 * math.log(p) - 0.99 * math.log(1 - p), rel=1e-5)


def test_every_group_pairs_every_object_once() -> None:
    sets = outputs()
    packed = pack_targets(targets(3, 1), 4, torch.device("cpu"))
    logits, boxes = sets["main"]["pred_logits"].detach()[None], sets["main"]["pred_boxes"].detach()[None]
    pairs = group_match(logits, boxes, packed, MatcherConfig(), 3)
    for image, (query, target) in enumerate(pairs.per_image(0, 12, packed.offsets)):
        for group in range(3):
            inside = (query >= 4 * group) & (query < 4 * group + 4)
            assert sorted(target[inside].tolist()) == list(range(packed.counts[image]))
            alone = group_match(
                logits[:, :, 4 * group : 4 * group + 4],
                boxes[:, :, 4 * group : 4 * group + 4],
                packed,
                MatcherConfig(),
                1,
            ).per_image(0, 4, packed.offsets)[image]
            assert (alone[0] + 4 * group).tolist() == query[inside].tolist()


def test_eval_mode_matches_all_queries_as_one_group() -> None:
    criterion = LWDETRCriterion(LWDETRCriterionConfig(num_classes=4, num_groups=3))
    sets = outputs()
    train = criterion.train()(sets, targets(3, 1))
    evaluated = criterion.eval()(sets, targets(3, 1))
    assert list(train) == [f"loss_{t}{s}" for s in ("", "_aux_0", "_enc") for t in ("class", "bbox", "giou")]
    assert train.keys() == evaluated.keys()
    assert float(train["loss_bbox"].detach()) > float(evaluated["loss_bbox"].detach())


def test_an_empty_batch_gives_finite_gradients() -> None:
    criterion = LWDETRCriterion(LWDETRCriterionConfig(num_classes=4, num_groups=3))
    sets = outputs()
    losses = criterion(sets, targets(0, 0))
    torch.stack(list(losses.values())).sum().backward()
    gradient = sets["main"]["pred_logits"].grad
    assert gradient is not None
    assert torch.isfinite(gradient).all()
    assert float(losses["loss_bbox"].detach()) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c(outputs(), targets(1)), "got 1 targets for a batch of 2 images"),
        (lambda c: c({"enc": outputs()["enc"]}, targets(1, 1)), "must hold the set 'main', found enc"),
        (lambda c: c(outputs(queries=10), targets(1, 1)), "10 queries cannot be 3 groups"),
        (lambda c: LWDETRCriterionConfig(num_groups=0), "at least 1"),
    ],
)
def test_wrong_input(call, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call(LWDETRCriterion(LWDETRCriterionConfig(num_classes=4, num_groups=3)))
