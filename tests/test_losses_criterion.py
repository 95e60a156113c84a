"""The criterion against a slow, loop-by-loop reading of the papers, and at the edges of its input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from carpus.models.deimv2.denoising import Denoising, make_denoising
from carpus.models.deimv2.distribution import distribution_table
from carpus.models.losses.config import CRITERIA, CriterionConfig, get_criterion_config
from carpus.models.losses.criterion import DEIMCriterion
from carpus.runtime.errors import DataError

CLASSES = 5
Target = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread only waits, for seconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_targets(counts: list[int], seed: int = 0) -> list[Target]:
    g = torch.Generator().manual_seed(seed)
    return [
        {
            "labels": torch.randint(0, CLASSES, (n,), generator=g),
            "boxes": torch.cat(
                (torch.rand(n, 2, generator=g) * 0.6 + 0.2, torch.rand(n, 2, generator=g) * 0.3 + 0.05), 1
            ),
        }
        for n in counts
    ]


def make_outputs(targets: list[Target], queries: int, denoising: Denoising | None, seed: int = 1) -> dict[str, Any]:
    """Predictions near the targets, so that every IoU matters."""
    g = torch.Generator().manual_seed(seed)
    batch = len(targets)

    def boxes(n: int) -> Tensor:
        base = torch.rand(batch, n, 4, generator=g) * 0.4 + 0.2
        for i, target in enumerate(targets):
            for q in range(n if len(target["labels"]) else 0):
                if q % 3:
                    base[i, q] = target["boxes"][q % len(target["labels"])]
        return base + 0.06 * torch.rand(batch, n, 4, generator=g)

    def one(n: int, corners: bool) -> dict[str, Tensor]:
        values = {"pred_logits": torch.randn(batch, n, CLASSES, generator=g), "pred_boxes": boxes(n)}
        if corners:
            values["pred_corners"] = torch.randn(batch, n, 4 * 33, generator=g)
        return {name: value.requires_grad_() for name, value in values.items()}

    outputs: dict[str, Any] = {name: one(queries, True) for name in ("main", "aux_0", "aux_1")}
    outputs |= {name: one(queries, False) for name in ("pre", "enc_0")}
    outputs["ref_points"] = boxes(queries)
    if denoising is not None:
        length = denoising.split[0]
        outputs |= {name: one(length, True) for name in ("dn_0", "dn_1", "dn_2")}
        outputs |= {"dn_pre": one(length, False), "dn_ref_points": boxes(length), "dn_meta": denoising}
    return outputs


def make_case(counts: list[int], queries: int = 12, seed: int = 0) -> tuple[dict[str, Any], list[Target]]:
    targets = make_targets(counts, seed)
    denoising = make_denoising(
        targets,
        num_classes=CLASSES,
        num_queries=queries,
        num_denoising=12,
        generator=torch.Generator().manual_seed(seed),
    )
    return make_outputs(targets, queries, denoising, seed + 1), targets


# --- the slow reading -------------------------------------------------------------------------------------------------


def iou_pair(a: Tensor, b: Tensor) -> tuple[float, float]:
    """IoU and generalised IoU of two cxcywh boxes, in plain Python."""
    ax1, ay1, ax2, ay2 = (float(v) for v in (a[0] - a[2] / 2, a[1] - a[3] / 2, a[0] + a[2] / 2, a[1] + a[3] / 2))
    bx1, by1, bx2, by2 = (float(v) for v in (b[0] - b[2] / 2, b[1] - b[3] / 2, b[0] + b[2] / 2, b[1] + b[3] / 2))
    common = max(0.0, min(ax2, bx2) - max(ax1, bx1)) * max(0.0, min(ay2, by2) - max(ay1, by1))
    union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - common
    hull = (max(ax2, bx2) - min(ax1, bx1)) * (max(ay2, by2) - min(ay1, by1))
    return common / union, common / union - (hull - union) / hull


def slow_match(logits: Tensor, boxes: Tensor, target: Target, config: CriterionConfig, epoch: int) -> list[tuple]:
    logits, boxes = logits.detach(), boxes.detach()
    cost = torch.zeros(len(boxes), len(target["labels"]), dtype=torch.float64)
    for q in range(len(boxes)):
        for t, label in enumerate(target["labels"].tolist()):
            p = float(logits[q, label].sigmoid())
            iou, giou = iou_pair(boxes[q], target["boxes"][t])
            if config.matcher.changed(epoch):
                cost[q, t] = -p * iou**4
            else:
                p_t = torch.tensor(p, dtype=torch.float64)
                focal = 0.25 * (1 - p) ** 2 * -torch.log(p_t + 1e-8) - 0.75 * p**2 * -torch.log(1 - p_t + 1e-8)
                cost[q, t] = 2 * focal + 5 * (boxes[q] - target["boxes"][t]).abs().sum() - 2 * giou
    return list(zip(*(index.tolist() for index in linear_sum_assignment(cost.numpy())), strict=True))


def slow_set(
    outputs: dict[str, Tensor],
    targets: list[Target],
    own: list[list[tuple]],
    pairs: list[list[tuple]],
    num_boxes: float,
    num_pairs: float,
) -> dict[str, float]:
    mal, l1, giou_sum = 0.0, 0.0, 0.0
    for i, target in enumerate(targets):
        logits, boxes = outputs["pred_logits"][i].detach(), outputs["pred_boxes"][i].detach()
        goal, weight = torch.zeros_like(logits), logits.sigmoid() ** 1.5
        for q, t in own[i]:
            label = int(target["labels"][t])
            goal[q, label] = iou_pair(boxes[q], target["boxes"][t])[0] ** 1.5
            weight[q, label] = 1.0
        mal += float((F.binary_cross_entropy_with_logits(logits, goal, reduction="none") * weight).sum())
        for q, t in pairs[i]:
            l1 += float((boxes[q] - target["boxes"][t]).abs().sum())
            giou_sum += 1 - iou_pair(boxes[q], target["boxes"][t])[1]
    return {"mal": mal / num_boxes, "bbox": 5 * l1 / num_pairs, "giou": 2 * giou_sum / num_pairs}


def slow_local(
    outputs: dict[str, Any], name: str, teacher: str, reference: Tensor, targets: list[Target], pairs: list[list[tuple]]
) -> tuple[float, float, int, int]:
    """FGL sum, and of DDF the means over paired and other edges with their counts."""
    table = distribution_table().tolist()
    fgl, paired, other = 0.0, [], []
    for i, target in enumerate(targets):
        corners = outputs[name]["pred_corners"][i].detach().reshape(-1, 4, 33)
        last = outputs[teacher]["pred_corners"][i].detach().reshape(-1, 4, 33)
        boxes = outputs[name]["pred_boxes"][i].detach()
        matched = dict(pairs[i])
        for q in range(len(corners)):
            divergence = F.kl_div((corners[q] / 5).log_softmax(-1), (last[q] / 5).softmax(-1), reduction="none").sum(-1)
            if q not in matched:
                confidence = float(outputs[teacher]["pred_logits"][i, q].detach().sigmoid().max())
                other += (25 * confidence * divergence).tolist()
                continue
            goal = target["boxes"][matched[q]]
            iou = iou_pair(boxes[q], goal)[0]
            paired += (25 * iou * divergence).tolist()
            cx, cy, w, h = reference[i, q].tolist()
            gx, gy, gw, gh = goal.tolist()
            distances = [
                (cx - (gx - gw / 2)) / (w / 4) - 2,
                (cy - (gy - gh / 2)) / (h / 4) - 2,
                (gx + gw / 2 - cx) / (w / 4) - 2,
                (gy + gh / 2 - cy) / (h / 4) - 2,
            ]
            for edge, d in enumerate(distances):
                left = max((n for n in range(33) if table[n] <= d), default=0)
                if d <= table[0]:
                    left, right_share = 0, 0.0
                elif left >= 32:
                    left, right_share = 31, 1.0
                else:
                    right_share = (d - table[left]) / (table[left + 1] - table[left])
                log_p = corners[q, edge].log_softmax(-1)
                fgl -= iou * float(log_p[left] * (1 - right_share) + log_p[left + 1] * right_share)
    mean = [sum(values) / len(values) if values else 0.0 for values in (paired, other)]
    a, b = (8 * len(paired) / len(targets)) ** 0.5, (8 * len(other) / len(targets)) ** 0.5
    return fgl, (a * mean[0] + b * mean[1]) / (a + b), len(paired), len(other)


@pytest.mark.parametrize("variant", ["atto", "n"])
@pytest.mark.parametrize("epoch", [0, 1000])
def test_agrees_with_a_slow_reading_of_the_papers(variant: str, epoch: int) -> None:
    config = get_criterion_config(variant, CLASSES)
    outputs, targets = make_case([3, 0, 2], queries=9)
    losses = DEIMCriterion(config)(outputs, targets, epoch)

    names = ["main", "aux_0", "aux_1", "pre", "enc_0"]
    own = {
        name: [
            slow_match(outputs[name]["pred_logits"][i], outputs[name]["pred_boxes"][i], target, config, epoch)
            for i, target in enumerate(targets)
        ]
        for name in names
    }
    union = []
    for i in range(len(targets)):
        votes = Counter(pair for name in names for pair in own[name][i])
        queries = sorted({q for q, _ in votes})
        union.append([(q, min((t for u, t in votes if u == q), key=lambda t: (-votes[q, t], t))) for q in queries])
    num_boxes = sum(len(target["labels"]) for target in targets)
    num_pairs = sum(map(len, union)) if config.use_union_set else num_boxes
    expected: dict[str, float] = {}
    for name in names:
        suffix = "" if name == "main" else f"_{name}"
        pairs = union if config.use_union_set else own[name]
        values = slow_set(outputs[name], targets, own[name], pairs, num_boxes, num_pairs)
        expected |= {f"loss_{term}{suffix}": value for term, value in values.items()}
        if "local" in config.losses and "pred_corners" in outputs[name]:
            fgl, ddf, _, _ = slow_local(outputs, name, "main", outputs["ref_points"], targets, union)
            expected[f"loss_fgl{suffix}"] = 0.15 * fgl / num_pairs
            if name != "main":
                expected[f"loss_ddf{suffix}"] = 1.5 * ddf
    meta = outputs["dn_meta"]
    dn_pairs = [
        [(int(q), k % len(target["labels"])) for k, q in enumerate(meta.positive_idx[i].tolist())]
        for i, target in enumerate(targets)
    ]
    norm = num_boxes * meta.num_groups
    for name in ("dn_0", "dn_1", "dn_2", "dn_pre"):
        values = slow_set(outputs[name], targets, dn_pairs, dn_pairs, norm, norm)
        expected |= {f"loss_{term}_{name}": value for term, value in values.items()}
        if "local" in config.losses and name != "dn_pre":
            fgl, _, _, _ = slow_local(outputs, name, "dn_2", outputs["dn_ref_points"], targets, dn_pairs)
            expected[f"loss_fgl_{name}"] = 0.15 * fgl / norm

    checked = {name: value for name, value in losses.items() if not name.startswith("loss_ddf_dn")}
    assert set(checked) == set(expected)
    for name, value in expected.items():
        assert float(checked[name].detach()) == pytest.approx(value, rel=2e-5, abs=1e-7), name
    assert {name for name in losses if name.startswith("loss_ddf_dn")} == (
        {"loss_ddf_dn_0", "loss_ddf_dn_1"} if "local" in config.losses else set()
    )


# --- edges ------------------------------------------------------------------------------------------------------------


def backward_is_finite(outputs: dict[str, Any], losses: dict[str, Tensor]) -> None:
    for name, value in losses.items():
        assert torch.isfinite(value), name
    torch.stack(list(losses.values())).sum().backward()
    for name, values in outputs.items():
        if isinstance(values, dict):
            for key, tensor in values.items():
                if tensor.grad is not None:
                    assert torch.isfinite(tensor.grad).all(), f"{name}.{key}"


@pytest.mark.parametrize("variant", list(CRITERIA))
@pytest.mark.parametrize("epoch", [0, 1000])
@pytest.mark.parametrize(
    "counts", [[0, 0], [1], [0, 1, 0], [40, 2]], ids=["none", "one", "one of three", "more than queries"]
)
def test_few_or_many_targets_give_finite_losses(variant: str, epoch: int, counts: list[int]) -> None:
    outputs, targets = make_case(counts)
    losses = DEIMCriterion(get_criterion_config(variant, CLASSES))(outputs, targets, epoch)
    backward_is_finite(outputs, losses)
    if sum(counts) == 0:
        assert losses["loss_bbox"].item() == 0.0
        assert losses["loss_mal"].item() > 0.0
        assert outputs["main"]["pred_boxes"].grad is not None


@pytest.mark.parametrize("variant", ["atto", "n"])
def test_no_queries_at_all(variant: str) -> None:
    targets = make_targets([2, 1])
    outputs = make_outputs(targets, 0, None)
    losses = DEIMCriterion(get_criterion_config(variant, CLASSES))(outputs, targets)
    assert all(value.item() == 0.0 for value in losses.values())


@pytest.mark.parametrize("variant", ["atto", "n"])
@pytest.mark.parametrize("epoch", [0, 1000])
def test_degenerate_boxes_and_huge_logits_stay_finite(variant: str, epoch: int) -> None:
    outputs, targets = make_case([3, 2])
    targets[0]["boxes"][0] = torch.tensor([0.5, 0.5, 0.0, 0.0])
    targets[1]["boxes"][:] = 0.0
    for name, values in outputs.items():
        if isinstance(values, dict):
            with torch.no_grad():
                values["pred_boxes"][:, 0] = torch.tensor([0.5, 0.5, 0.0, 0.0])
                values["pred_boxes"][:, 1] = torch.tensor([0.5, 0.5, -0.1, -0.1])
                values["pred_logits"][:, 2] = 1e4
                values["pred_logits"][:, 3] = -1e4
                if "pred_corners" in values and not name.startswith("dn"):
                    values["pred_corners"][:, 0] = 1e3
    outputs["ref_points"][:, 0] = 0.0
    losses = DEIMCriterion(get_criterion_config(variant, CLASSES))(outputs, targets, epoch)
    backward_is_finite(outputs, losses)


def test_nan_predictions_are_paired_not_fatal() -> None:
    outputs, targets = make_case([3, 2])
    with torch.no_grad():
        outputs["main"]["pred_boxes"][0, 0] = float("nan")
    losses = DEIMCriterion(get_criterion_config("n", CLASSES))(outputs, targets)
    assert torch.isfinite(losses["loss_bbox_aux_0"])


def test_references_of_the_distributions_get_no_gradient() -> None:
    outputs, targets = make_case([3, 2])
    outputs["ref_points"].requires_grad_()
    losses = DEIMCriterion(get_criterion_config("n", CLASSES))(outputs, targets)
    torch.stack(list(losses.values())).sum().backward()
    assert outputs["ref_points"].grad is None


def test_distillation_moves_only_the_student() -> None:
    outputs, targets = make_case([3, 2])
    losses = DEIMCriterion(get_criterion_config("n", CLASSES))(outputs, targets)
    losses["loss_ddf_aux_0"].backward()
    assert float(outputs["aux_0"]["pred_corners"].grad.abs().sum()) > 0
    teacher = outputs["main"]["pred_corners"].grad
    assert teacher is None or float(teacher.abs().sum()) == 0


def test_half_precision_outputs_give_float32_losses() -> None:
    outputs, targets = make_case([3, 2])
    reference = DEIMCriterion(get_criterion_config("n", CLASSES))(outputs, targets)
    for values in outputs.values():
        if isinstance(values, dict):
            values.update({key: tensor.detach().to(torch.bfloat16) for key, tensor in values.items()})
    losses = DEIMCriterion(get_criterion_config("n", CLASSES))(outputs, targets)
    assert all(value.dtype == torch.float32 for value in losses.values())
    assert float(losses["loss_mal"]) == pytest.approx(float(reference["loss_mal"].detach()), rel=0.05)


def test_order_of_images_does_not_matter() -> None:
    targets = make_targets([3, 1, 2])
    outputs = make_outputs(targets, 12, None)
    order = [2, 0, 1]
    turned: dict[str, Any] = {
        name: {key: tensor[order] for key, tensor in values.items()} if isinstance(values, dict) else values[order]
        for name, values in outputs.items()
    }
    criterion = DEIMCriterion(get_criterion_config("n", CLASSES))
    before, after = criterion(outputs, targets), criterion(turned, [targets[i] for i in order])
    for name, value in before.items():
        assert float(after[name].detach()) == pytest.approx(float(value.detach()), rel=1e-5), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o, t: t.pop(), "got 1 targets for a batch of 2 images"),
        (
            lambda o, t: t[1].update(labels=torch.tensor([0, 9])),
            r"targets\[1\]: labels must lie in 0\.\.4, got \[0, 9\]",
        ),
        (lambda o, t: t[0].update(boxes=torch.rand(2, 4)), r"targets\[0\]: labels must be \(n,\) and boxes \(n, 4\)"),
        (lambda o, t: o.pop("main"), "outputs have no set 'main'"),
        (lambda o, t: o.pop("dn_meta"), "no Denoising under 'dn_meta'"),
    ],
)
def test_wrong_input_is_named(change: Any, message: str) -> None:
    outputs, targets = make_case([3, 2])
    change(outputs, targets)
    with pytest.raises(DataError, match=message):
        DEIMCriterion(get_criterion_config("n", CLASSES))(outputs, targets)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_criterion_config("huge"), "no loss settings for DEIMv2 variant 'huge'; known variants: atto"),
        (lambda: CriterionConfig(losses=("focal",)), "must be one or more of mal, vfl, boxes, local"),
        (lambda: CriterionConfig(losses=()), "must be one or more of mal, vfl, boxes, local"),
        (lambda: CriterionConfig(num_classes=0), "num_classes must be at least 1, got 0"),
        (lambda: CriterionConfig(reg_max=31), "reg_max must be even and at least 4, got 31"),
    ],
)
def test_wrong_settings_are_named(make: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()


def test_only_the_configured_losses_are_computed() -> None:
    outputs, targets = make_case([3, 2])
    losses = DEIMCriterion(CriterionConfig(losses=("boxes",), num_classes=CLASSES))(outputs, targets)
    assert {name.split("_")[1] for name in losses} == {"bbox", "giou"}
