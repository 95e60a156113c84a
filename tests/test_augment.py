"""Augmentation: boxes follow the pixels, seeds decide everything, epochs gate it, ranges hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from carpus.models.data import augment, augment_config, batch_augment, mosaic, photometric, viewport
from carpus.models.data.augment import Augmenter
from carpus.models.data.augment_config import AUGMENTS, AugmentConfig, get_augment_config
from carpus.models.data.batch_augment import BatchAugmenter, copy_blend, mixup
from carpus.models.data.mosaic import Sample, affine_matrix
from carpus.models.data.photometric import apply_colour, photometric_distort
from carpus.models.data.viewport import iou_crop, resize_image, zoom_out
from carpus.runtime.errors import DataError

SIZE = (160, 224)
PLAIN = AugmentConfig(
    strong_from=0,
    mosaic_until=10,
    strong_until=20,
    mosaic_prob=0.0,
    photometric_prob=0.0,
    channel_swap_prob=0.0,
    zoom_out_prob=0.0,
    crop_prob=0.0,
    flip_prob=0.0,
)


def rectangle(seed: int, colour: int = 255) -> Sample:
    """One filled rectangle on dark grey."""
    rng = np.random.default_rng(seed)
    height, width = int(rng.integers(150, 400)), int(rng.integers(150, 400))
    w, h = (int(v) for v in rng.integers(40, 100, 2))
    x, y = int(rng.integers(0, width - w)), int(rng.integers(0, height - h))
    image = np.full((height, width, 3), 40, dtype=np.uint8)
    image[y : y + h, x : x + w] = colour
    return image, np.array([[x, y, x + w, y + h]], dtype=np.float32), np.array([seed % 3])


def found_extent(image: NDArray[np.uint8], threshold: float = 148.0) -> NDArray[np.float64]:
    """Edges of the bright region, xyxy, to a fraction of a pixel by its brightness profile."""
    ys, xs = np.nonzero(image[..., 0] > threshold)
    return np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], dtype=np.float64)


def pixels(boxes: NDArray[np.float32], size: tuple[int, int] = SIZE) -> NDArray[np.float64]:
    scale = np.array([size[1], size[0]] * 2)
    centre, extent = boxes[:, :2], boxes[:, 2:]
    return np.concatenate((centre - extent / 2, centre + extent / 2), axis=1) * scale


@pytest.mark.parametrize("module", [augment, augment_config, batch_augment, mosaic, photometric, viewport])
def test_exported_names_exist(module: Any) -> None:
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"flip_prob": 1.0},
        {"zoom_out_prob": 1.0, "zoom_out_sides": (1.0, 2.5)},
        {"crop_prob": 1.0},
        {"flip_prob": 0.5, "zoom_out_prob": 0.5, "crop_prob": 0.8, "zoom_out_sides": (1.0, 2.5)},
    ],
    ids=["resize", "flip", "zoom out", "crop", "all"],
)
def test_boxes_follow_the_pixels(change: dict[str, Any]) -> None:
    augmenter = Augmenter(replace(PLAIN, **change), SIZE)
    seen = 0
    for seed in range(40):
        image, boxes, _ = augmenter(*rectangle(seed), np.random.default_rng(seed), 15)
        assert image.shape == (*SIZE, 3)
        assert image.dtype == np.uint8
        for box in pixels(boxes):
            seen += 1
            assert np.abs(found_extent(image) - box).max() <= 1.5
    assert seen >= 30


def test_boxes_follow_the_pixels_through_a_mosaic() -> None:
    # Without rotation the box of a rectangle is the rectangle.
    config = replace(PLAIN, mosaic_prob=1.0, mosaic_rotation=0.0)
    augmenter = Augmenter(config, SIZE)
    dark = (np.full((200, 300, 3), 40, dtype=np.uint8), np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    seen = 0
    for seed in range(40):
        image, boxes, _ = augmenter(*rectangle(seed), np.random.default_rng(seed), 5, lambda _: dark)
        for box in pixels(boxes):
            seen += 1
            assert np.abs(found_extent(image) - box).max() <= 1.5
    assert seen >= 30


def test_a_turned_mosaic_encloses_its_objects_tightly_enough() -> None:
    augmenter = Augmenter(replace(PLAIN, mosaic_prob=1.0), SIZE)
    dark = (np.full((200, 300, 3), 40, dtype=np.uint8), np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    seen = 0
    for seed in range(40):
        image, boxes, _ = augmenter(*rectangle(seed), np.random.default_rng(seed), 5, lambda _: dark)
        for box in pixels(boxes):
            if (box[:2] < 1).any() or (box[2:] > np.array([SIZE[1], SIZE[0]]) - 1).any():
                continue  # cut at the border: the visible part may be smaller than the clipped box
            seen += 1
            found = found_extent(image)
            assert np.abs(found - box).max() <= 2.0
    assert seen >= 15


def test_mosaic_tiles_keep_their_labels_in_order() -> None:
    samples = [rectangle(seed) for seed in range(4)]
    config = replace(PLAIN, mosaic_rotation=0.0, mosaic_translation=(0.0, 0.0), mosaic_scale=(1.0, 1.0))
    _, boxes, labels = mosaic.mosaic(samples, SIZE, config, np.random.default_rng(0))
    assert labels.tolist() == [0, 1, 2, 0]
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    right, below = centres[:, 0] > SIZE[1] / 2, centres[:, 1] > SIZE[0] / 2
    assert right.tolist() == [False, True, False, True]
    assert below.tolist() == [False, False, True, True]


def test_affine_matrix_keeps_shape_on_the_canvas_it_stretches() -> None:
    # A square of the canvas stays a square of the canvas although the output is stretched.
    matrix = affine_matrix(0.3, (0.1, 0.0), 1.2, canvas=(400.0, 200.0), size=(100, 100))
    stretch = np.array([100 / 400, 100 / 200])
    canvas = matrix[:, :2] * (1 / stretch[:, None]) * stretch[None, :]
    np.testing.assert_allclose(canvas @ canvas.T, 1.44 * np.eye(2), atol=1e-12)
    np.testing.assert_allclose(matrix @ [50, 50, 1], [60, 50])


@pytest.mark.parametrize("mosaic_prob", [0.0, 1.0])
def test_the_same_seed_gives_the_same_bytes(mosaic_prob: float) -> None:
    config = replace(AUGMENTS["n"], mosaic_prob=mosaic_prob)
    samples = [rectangle(seed) for seed in range(6)]

    def run(seed: int) -> Sample:
        pick = lambda rng: samples[int(rng.integers(6))]  # noqa: E731
        return Augmenter(config, SIZE)(*samples[0], np.random.default_rng(seed), 10, pick)

    for first, second in zip(run(5), run(5), strict=True):
        assert first.tobytes() == second.tobytes()
    assert run(5)[0].tobytes() != run(6)[0].tobytes()


@pytest.mark.parametrize("mosaic_prob", [0.0, 1.0])
def test_images_without_objects(mosaic_prob: float) -> None:
    empty = (np.zeros((30, 50, 3), np.uint8), np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    augmenter = Augmenter(replace(AUGMENTS["n"], mosaic_prob=mosaic_prob), SIZE)
    for seed in range(20):
        image, boxes, labels = augmenter(*empty, np.random.default_rng(seed), 10, lambda _: empty)
        assert image.shape == (*SIZE, 3)
        assert boxes.shape == (0, 4)
        assert boxes.dtype == np.float32
        assert labels.shape == (0,)


@pytest.mark.parametrize("shape", [(1, 1), (1, 400), (400, 1), (2000, 3)])
@pytest.mark.parametrize("mosaic_prob", [0.0, 1.0])
def test_odd_shapes_survive(shape: tuple[int, int], mosaic_prob: float) -> None:
    sample = (
        np.full((*shape, 3), 90, np.uint8),
        np.array([[0, 0, shape[1], shape[0]]], np.float32),
        np.zeros(1, np.int64),
    )
    augmenter = Augmenter(replace(AUGMENTS["n"], mosaic_prob=mosaic_prob), (32, 32))
    for seed in range(30):
        image, boxes, labels = augmenter(*sample, np.random.default_rng(seed), 10, lambda _: sample)
        assert image.shape == (32, 32, 3)
        assert len(boxes) == len(labels)
        assert np.isfinite(boxes).all()


def test_the_stored_image_is_never_changed() -> None:
    for seed in range(30):
        image, boxes, labels = rectangle(seed)
        image = cv2.resize(image, SIZE[::-1])
        before, boxes_before = image.copy(), boxes.copy()
        result, _, _ = Augmenter(replace(AUGMENTS["n"], mosaic_prob=0.3), SIZE)(
            image, boxes, labels, np.random.default_rng(seed), (0, 10)[seed % 2], lambda _: rectangle(1)
        )
        result[:] = 7
        assert np.array_equal(image, before)
        assert np.array_equal(boxes, boxes_before)


def test_boxes_stay_inside_and_large_enough() -> None:
    config = replace(AUGMENTS["n"], min_box_size=8.0)
    samples = [rectangle(seed) for seed in range(10)]
    for seed in range(100):
        _, boxes, labels = Augmenter(config, SIZE)(
            *samples[seed % 10], np.random.default_rng(seed), 10, lambda rng: samples[int(rng.integers(10))]
        )
        corners = pixels(boxes)
        assert len(boxes) == len(labels)
        assert (corners >= -1e-3).all()
        assert (corners <= np.array([SIZE[1], SIZE[0]] * 2) + 1e-3).all()
        assert (corners[:, 2:] - corners[:, :2] >= 8 - 1e-3).all()


@pytest.mark.parametrize(
    ("epoch", "strong", "with_mosaic"),
    [(0, False, False), (4, True, True), (77, True, True), (78, True, False), (148, False, False)],
)
def test_epochs_gate_the_strong_augmentations(epoch: int, strong: bool, with_mosaic: bool) -> None:
    config = AUGMENTS["n"]
    assert (config.strong(epoch), config.mosaic(epoch)) == (strong, with_mosaic)
    calls = 0

    def pick(rng: np.random.Generator) -> Sample:
        nonlocal calls
        calls += 1
        return rectangle(int(rng.integers(10)))

    plain = Augmenter(replace(PLAIN, flip_prob=0.0), SIZE)
    differs = 0
    for seed in range(30):
        sample = rectangle(seed)
        image, _, _ = Augmenter(replace(config, flip_prob=0.0), SIZE)(*sample, np.random.default_rng(seed), epoch, pick)
        reference, _, _ = plain(*sample, np.random.default_rng(seed), 99)
        differs += not np.array_equal(image, reference)
    assert (differs > 0) is strong
    assert (calls > 0) is with_mosaic


def test_crops_keep_an_object_and_shrink_the_view() -> None:
    rng = np.random.default_rng(0)
    view = viewport.Viewport(-20, -10, 400, 300)
    boxes = np.array([[10, 20, 60, 90], [200, 100, 300, 200]], np.float32)
    smaller = 0
    for _ in range(200):
        crop, inside = iou_crop(view, boxes, replace(PLAIN, crop_prob=1.0), rng)
        smaller += crop != view
        assert inside.any()
        assert crop.left >= view.left
        assert crop.top + crop.height <= view.top + view.height
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2 - (crop.left, crop.top)
        assert inside.tolist() == ((centres > 0) & (centres < (crop.width, crop.height))).all(1).tolist()
    assert 100 < smaller < 200


def test_a_crop_drops_objects_whose_centre_it_leaves_out() -> None:
    image = np.full((200, 400, 3), 40, np.uint8)
    boxes = np.array([[20, 60, 120, 160], [150, 40, 390, 180]], np.float32)
    augmenter = Augmenter(replace(PLAIN, crop_prob=1.0), SIZE)
    alone = 0
    for seed in range(60):
        view, inside = iou_crop(viewport.Viewport(0, 0, 400, 200), boxes, augmenter.config, _after_photometric(seed))
        _, _, labels = augmenter(image, boxes, np.array([0, 1]), np.random.default_rng(seed), 15)
        assert labels.tolist() == np.flatnonzero(inside).tolist()
        touches = view.left + view.width > 150 and view.left < 120
        alone += touches and len(labels) == 1
    assert alone > 5


def _after_photometric(seed: int) -> np.random.Generator:
    """The generator in the state in which the augmenter crops."""
    rng = np.random.default_rng(seed)
    photometric_distort(np.zeros(3), PLAIN, rng)
    zoom_out(400, 200, PLAIN, rng)
    return rng


def test_zoom_out_contains_the_image() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        view = zoom_out(100, 60, replace(PLAIN, zoom_out_prob=1.0, zoom_out_sides=(1.0, 4.0)), rng)
        assert view.left <= 0 <= 100 <= view.left + view.width <= 400
        assert view.top <= 0 <= 60 <= view.top + view.height <= 240


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("size", [(37, 41), (75, 50), (150, 99), (200, 300)])
def test_resizing_keeps_the_mean(size: tuple[int, int], fine: bool) -> None:
    image = cv2.GaussianBlur(np.random.default_rng(0).integers(0, 255, (300, 200, 3), dtype=np.uint8), (0, 0), 3)
    small = resize_image(image, size[1], size[0], fine=fine)
    assert small.shape == (*size, 3)
    assert np.abs(small.mean((0, 1)) - image.mean((0, 1))).max() < 1.0


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"brightness": (1.1, 1.1)}, lambda x, mean: x * 1.1),
        ({"contrast": (0.5, 0.5)}, lambda x, mean: 0.5 * x + 0.5 * (mean @ [0.299, 0.587, 0.114])),
        ({"saturation": (0.0, 0.0)}, lambda x, mean: (x @ [0.299, 0.587, 0.114])[..., None].repeat(3, -1)),
        ({"hue": (0.0, 0.0)}, lambda x, mean: x),
    ],
    ids=["brightness", "contrast", "saturation", "hue"],
)
def test_colour_changes_are_what_they_say(change: dict[str, Any], check: Any) -> None:
    neutral = {"brightness": (1.0, 1.0), "contrast": (1.0, 1.0), "saturation": (1.0, 1.0), "hue": (0.0, 0.0)}
    config = replace(PLAIN, **{**neutral, **change}, photometric_prob=1.0)
    image = np.random.default_rng(0).integers(60, 200, (20, 30, 3), dtype=np.uint8)
    mean = image.mean((0, 1))
    colour = photometric_distort(mean, config, np.random.default_rng(0))
    assert np.abs(apply_colour(image, colour) - check(image.astype(np.float64), mean)).max() <= 1.0


def test_hue_keeps_luma_and_turns_colours() -> None:
    config = replace(
        PLAIN, photometric_prob=1.0, brightness=(1, 1), contrast=(1, 1), saturation=(1, 1), hue=(0.05, 0.05)
    )
    colour = photometric_distort(np.full(3, 128.0), config, np.random.default_rng(0))
    assert colour is not None
    red = np.full((1, 1, 3), (180, 90, 90), np.uint8)
    turned = apply_colour(red, colour)[0, 0].astype(float)
    weights = [0.299, 0.587, 0.114]
    assert turned @ weights == pytest.approx(red[0, 0] @ np.array(weights), abs=1.5)
    assert abs(turned[1] - turned[2]) > 10


def make_batch() -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    images = torch.zeros(3, 3, 80, 100)
    images[0, :, 20:40, 10:50] = 1.0
    targets = [
        {"labels": torch.tensor([2]), "boxes": torch.tensor([[0.3, 0.375, 0.4, 0.25]])},
        {"labels": torch.zeros(0, dtype=torch.int64), "boxes": torch.zeros(0, 4)},
        {"labels": torch.tensor([0]), "boxes": torch.tensor([[0.5, 0.5, 0.02, 0.02]])},
    ]
    return images, targets


def test_mixup_blends_neighbours_and_unites_targets() -> None:
    images, targets = make_batch()
    mixed, united = mixup(images, targets, 0.45)
    assert float(mixed[0, 0, 30, 30]) == pytest.approx(0.45)
    assert float(mixed[1, 0, 30, 30]) == pytest.approx(0.55)
    assert [target["labels"].tolist() for target in united] == [[2, 0], [2], [0]]
    assert len(united[0]["boxes"]) == 2


def test_copy_blend_pastes_large_objects_where_their_labels_are() -> None:
    images, targets = make_batch()
    before = images.clone()
    config = replace(PLAIN, copyblend_min_area=100.0, copyblend_objects=1)
    pasted, united = copy_blend(images, targets, config, np.random.default_rng(1), 0.5)
    assert torch.equal(images, before)
    assert [target["labels"].tolist() for target in united] == [[2, 2], [2], [0, 2]]
    cx, cy, w, h = (united[1]["boxes"][0] * torch.tensor([100.0, 80.0, 100.0, 80.0])).tolist()
    ys, xs = np.nonzero(pasted[1, 0].numpy() > 0.25)
    found = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
    assert found == pytest.approx([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], abs=1e-3)
    assert float(pasted[1].max()) == pytest.approx(0.5)


def test_batch_augmentation_is_gated_and_repeatable() -> None:
    images, targets = make_batch()
    batch = BatchAugmenter(
        replace(PLAIN, mixup_prob=0.5, mixup_epochs=(2, 4), copyblend_prob=0.5, copyblend_epochs=(2, 6))
    )
    assert [batch.active(epoch) for epoch in (1, 2, 5, 6)] == [False, True, True, False]
    for epoch in (0, 6):
        for seed in range(10):
            same, kept = batch(images, targets, np.random.default_rng(seed), epoch)
            assert same is images
            assert kept is targets
    kinds = set()
    for seed in range(40):
        first, second = (batch(images, targets, np.random.default_rng(seed), 3) for _ in range(2))
        assert torch.equal(first[0], second[0])
        kinds.add(tuple(len(target["labels"]) for target in first[1]))
    assert (1, 0, 1) in kinds
    assert (2, 1, 1) in kinds
    assert len(kinds) > 2


def test_copy_blend_without_objects_changes_nothing() -> None:
    images, targets = torch.rand(2, 3, 8, 8), [{"labels": torch.zeros(0).long(), "boxes": torch.zeros(0, 4)}] * 2
    same, kept = copy_blend(images, targets, PLAIN, np.random.default_rng(0), 0.5)
    assert same is images
    assert kept is targets


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AugmentConfig(mosaic_prob=1.5), r"AugmentConfig.mosaic_prob must be in 0\.\.1, got 1\.5"),
        (lambda: AugmentConfig(contrast=(1.0, 0.5)), r"contrast must be \(low, high\) with low <= high"),
        (lambda: AugmentConfig(mosaic_scale=(0.0, 1.0)), "mosaic_scale must be above 0"),
        (lambda: AugmentConfig(zoom_out_sides=(0.5, 1.0)), "zoom_out_sides must be at least 1"),
        (lambda: AugmentConfig(copyblend_objects=0), "copyblend_objects must be at least 1, got 0"),
        (lambda: get_augment_config("huge"), "no augmentation for DEIMv2 variant 'huge'; known variants: atto, femto"),
        (lambda: Augmenter(PLAIN, (1, 320)), r"augmentation size must be .* at least 2 px, got \(1, 320\)"),
    ],
)
def test_wrong_settings_are_named(make: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()
