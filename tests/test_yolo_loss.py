"""Task-aligned assignment, detection loss, letterbox, head and suppression: what reference data does not show."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from carpus.models.yolo.assigner import assign, complete_iou
from carpus.models.yolo.blocks import C3k2, Conv, fuse_convs
from carpus.models.yolo.head import Detect, anchor_points
from carpus.models.yolo.letterbox import fit_letterbox, letterbox_preprocess, letterbox_to_source, yolo_preprocess
from carpus.models.yolo.loss import LossConfig, YOLOCriterion, distribution_focal_loss
from carpus.models.yolo.nms import box_iou, non_maximum_suppression, suppress
from carpus.runtime.errors import DataError
from carpus.runtime.transform import ImageTransform


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def boxes(count: int, size: float = 60.0) -> Tensor:
    low = torch.rand(count, 2) * size
    return torch.cat([low, low + torch.rand(count, 2) * size + 4], 1)


def test_complete_iou_of_equal_boxes_is_one_and_falls_with_distance() -> None:
    a = boxes(20)
    torch.testing.assert_close(complete_iou(a, a), torch.ones(20))
    far = [float(complete_iou(a[0], a[0] + shift)) for shift in (0.0, 5.0, 500.0)]
    assert far[0] > far[1] > far[2]
    assert (complete_iou(a, boxes(20)) <= 1).all()


def test_complete_iou_has_finite_gradients_for_boxes_without_area() -> None:
    a = torch.zeros(3, 4, requires_grad=True)
    complete_iou(a, boxes(3)).sum().backward()
    assert a.grad is not None
    assert a.grad.isfinite().all()


def test_distribution_loss_is_least_at_the_right_bins() -> None:
    logits = torch.full((1, 4, 16), -20.0)
    logits[..., 3] = logits[..., 4] = 0.0
    right = distribution_focal_loss(logits, torch.full((1, 4), 3.5))
    wrong = distribution_focal_loss(logits, torch.full((1, 4), 8.5))
    assert float(right) == pytest.approx(np.log(2), rel=1e-5)
    assert float(wrong) > 10
    assert distribution_focal_loss(logits, torch.full((1, 4), 99.0)).isfinite().all()


def _assign(objects: list[list[float]], predicted: Tensor, scores: Tensor, points: Tensor, **options):  # type: ignore[no-untyped-def]
    object_boxes = torch.tensor([objects])
    count = object_boxes.shape[1]
    labels, mask = torch.zeros(1, count, dtype=torch.int64), torch.ones(1, count, dtype=torch.bool)
    return assign(scores, predicted, points, labels, object_boxes, mask, **options)


def test_points_lie_in_their_object_and_at_most_k_are_taken() -> None:
    points = torch.cartesian_prod(torch.arange(4.0, 64, 8), torch.arange(4.0, 64, 8))
    predicted = torch.cat([points - 10, points + 10], 1)[None]
    scores = torch.rand(1, len(points), 2)
    found = _assign([[8.0, 8.0, 56.0, 56.0]], predicted, scores, points, top_k=5)
    assert int(found.foreground.sum()) == 5
    inside = points[found.foreground[0]]
    assert ((inside > 8) & (inside < 56)).all()
    # The best point's target is the object's largest overlap.
    overlaps = complete_iou(torch.tensor([8.0, 8.0, 56.0, 56.0]), predicted[0])[found.foreground[0]]
    assert float(found.scores.max()) == pytest.approx(float(overlaps.max()), rel=1e-4)
    assert (found.scores[..., 1] == 0).all()


def test_a_contested_point_goes_to_the_greatest_overlap() -> None:
    points = torch.tensor([[20.0, 20.0]])
    predicted = torch.tensor([[[10.0, 10.0, 30.0, 30.0]]])
    found = _assign([[0.0, 0.0, 60.0, 60.0], [9.0, 9.0, 31.0, 31.0]], predicted, torch.rand(1, 1, 1), points)
    assert found.object_index.tolist() == [[1]]


def test_padding_and_no_objects_assign_nothing() -> None:
    points = torch.tensor([[4.0, 4.0], [12.0, 4.0]])
    predicted, scores = torch.cat([points - 3, points + 3], 1)[None], torch.rand(1, 2, 3)
    empty = torch.zeros(1, 0, 4)
    none = assign(scores, predicted, points, torch.zeros(1, 0, dtype=torch.int64), empty, torch.zeros(1, 0).bool())
    assert not none.foreground.any()
    assert float(none.scores.sum()) == 0
    padded = torch.tensor([[[0.0, 0.0, 16.0, 16.0]]])
    masked = assign(scores, predicted, points, torch.zeros(1, 1, dtype=torch.int64), padded, torch.zeros(1, 1).bool())
    assert not masked.foreground.any()


def _raw(batch: int, classes: int, reg_max: int) -> list[Tensor]:
    return [torch.randn(batch, 4 * reg_max + classes, s, s, requires_grad=True) for s in (8, 4, 2)]


@pytest.mark.parametrize(("reg_max", "terms"), [(16, {"box", "cls", "dfl"}), (1, {"box", "cls"})])
def test_loss_terms_and_gradients(reg_max: int, terms: set[str]) -> None:
    raw = _raw(2, 3, reg_max)
    criterion = YOLOCriterion(LossConfig(num_classes=3, reg_max=reg_max))
    one = {"labels": torch.tensor([2]), "boxes": torch.tensor([[0.5, 0.5, 0.6, 0.4]])}
    none = {"labels": torch.zeros(0, dtype=torch.int64), "boxes": torch.zeros(0, 4)}
    losses = criterion({"raw": raw, "aux_loss": torch.tensor(0.5)}, [one, none])
    assert set(losses) == {f"loss_{term}" for term in terms} | {"loss_moe"}
    assert float(losses["loss_moe"]) == pytest.approx(0.5 * 0.15 * 2)
    torch.stack(list(losses.values())).sum().backward()
    assert all(level.grad is not None and level.grad.isfinite().all() for level in raw)
    empty = criterion({"raw": raw}, [none, none])
    assert float(empty["loss_box"].detach()) == 0


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([], "got 0 targets for 1 images"),
        ([{"labels": torch.tensor([3]), "boxes": torch.rand(1, 4)}], r"targets\[0\] has classes 3..3, expected 0..2"),
    ],
)
def test_wrong_targets(targets: list[dict[str, Tensor]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        YOLOCriterion(LossConfig(num_classes=3))({"raw": _raw(1, 3, 16)}, targets)


@pytest.mark.parametrize("depthwise", [False, True])
def test_head_decodes_the_distance_of_a_certain_bin(depthwise: bool) -> None:
    head = Detect((16, 16, 16), 3, depthwise_class_branch=depthwise).eval()
    raw = head([torch.rand(1, 16, s, s) for s in (4, 2, 1)])
    assert [tuple(level.shape) for level in raw] == [(1, 67, 4, 4), (1, 67, 2, 2), (1, 67, 1, 1)]
    certain = [torch.full_like(level, -50.0) for level in raw]
    for level in certain:
        for side, bin_index in enumerate((1, 2, 3, 4)):
            level[:, side * 16 + bin_index] = 50.0
    found, logits = head.decode(certain)
    points, stride = anchor_points(certain)
    expected = torch.cat([points - torch.tensor([1.0, 2.0]), points + torch.tensor([3.0, 4.0])], 1) * stride
    torch.testing.assert_close(found[0], expected)
    assert logits.shape == (1, 21, 3)


def test_head_refuses_wrong_sizes() -> None:
    with pytest.raises(DataError, match="at least 1, got 0"):
        Detect((16, 16, 16), 0, depthwise_class_branch=True)
    with pytest.raises(DataError, match="one width per stride, got 2 for 3"):
        Detect((16, 16), 3, depthwise_class_branch=True)


def test_fusing_keeps_the_output() -> None:
    block = C3k2(8, 16, 2, c3k=True).eval()
    for module in block.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
            torch.nn.init.normal_(module.running_mean)
    x = torch.rand(1, 8, 6, 6)
    before = block(x)
    fuse_convs(block)
    fuse_convs(block)
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in block.modules())
    assert all(isinstance(m.bn, torch.nn.Identity) for m in block.modules() if isinstance(m, Conv))
    torch.testing.assert_close(block(x), before, rtol=1e-5, atol=1e-5)


def _brute_force(xyxy: np.ndarray, score: np.ndarray, threshold: float) -> list[int]:
    kept: list[int] = []
    for index in sorted(range(len(score)), key=lambda i: (-score[i], i)):
        if all(box_iou(xyxy[index : index + 1], xyxy[k : k + 1])[0, 0] <= threshold for k in kept):
            kept.append(index)
    return kept


def test_suppression_against_brute_force_with_ties() -> None:
    xyxy = boxes(120).numpy()
    score = (torch.randint(0, 6, (120,)) / 6).numpy()
    assert suppress(xyxy, score, 0.5).tolist() == _brute_force(xyxy, score, 0.5)
    assert suppress(xyxy, score, 0.5, 3).tolist() == _brute_force(xyxy, score, 0.5)[:3]


def test_suppression_by_class() -> None:
    xyxy = np.array([[0, 0, 10, 10], [0, 0, 10, 10], [50, 50, 60, 60]], np.float32)
    scores = np.array([[0.9, 0.3], [0.1, 0.8], [0.2, 0.1]], np.float32)
    found = non_maximum_suppression(xyxy, scores)
    assert found[:, 5].tolist() == [0, 1]
    assert len(non_maximum_suppression(xyxy, scores, class_agnostic=True)) == 1
    every = non_maximum_suppression(xyxy, scores, multi_label=True, score_threshold=0.05)
    assert every[:, 5].tolist() == [0, 1, 0, 1]
    assert len(non_maximum_suppression(xyxy, scores, score_threshold=0.9)) == 0
    merged = non_maximum_suppression(xyxy, scores, cluster_sigma=0.1)
    np.testing.assert_allclose(merged[:, :4], found[:, :4], atol=1e-3)


def test_suppression_of_nothing_and_of_wrong_shapes() -> None:
    assert non_maximum_suppression(np.zeros((0, 4), np.float32), np.zeros((0, 3), np.float32)).shape == (0, 6)
    with pytest.raises(DataError, match=r"got \(2, 4\) and \(3, 1\)"):
        non_maximum_suppression(np.zeros((2, 4)), np.zeros((3, 1)))


@pytest.mark.parametrize("size", [(480, 640), (333, 500), (64, 31), (700, 20)])
def test_letterbox_agrees_with_the_bundles_and_returns_boxes(size: tuple[int, int]) -> None:
    fitted = fit_letterbox(size, (320, 320))
    bundle = ImageTransform.fit(yolo_preprocess((320, 320)), size)
    assert (fitted.content_size, fitted.offset) == (bundle.content_size, bundle.offset)
    minimal = fit_letterbox(size, (320, 320), minimal=True)
    assert all(side % 32 == 0 and side <= 320 for side in minimal.model_size)
    source = np.array([[3.0, 5.0, 19.0, 20.0]])
    # Whole pixels of the resized image move the far edge a little.
    np.testing.assert_allclose(letterbox_to_source(fitted.to_model(source), fitted), source, atol=0.8)


def test_letterbox_pads_with_grey() -> None:
    image = np.zeros((10, 20, 3), np.uint8)
    tensor, fitted = letterbox_preprocess(image, (32, 32), enlarge=False)
    assert fitted.content_size == (10, 20)
    assert tensor[0, 0, 0] == np.float32(114 / 255)
    assert tensor[:, 11:21, 6:26].max() == 0
    with pytest.raises(DataError, match=r"expected \(h, w, 3\) uint8"):
        letterbox_preprocess(image.astype(np.float32), (32, 32))
    with pytest.raises(DataError, match="at least 1 x 1"):
        fit_letterbox((0, 5), (32, 32))
