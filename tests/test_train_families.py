"""What training knows of each family: rates, switches, sizes, and framing of images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning_fabric
import numpy as np
import pytest
import torch
from torch import nn

from carpus.models.build import FAMILIES, build_criterion, build_model
from carpus.models.data.augment import Augmenter
from carpus.models.data.augment_config import AugmentConfig
from carpus.models.ema import ModelEMA
from carpus.models.engine_fit import training_sizes
from carpus.models.engine_optimizer import make_optimizer
from carpus.models.engine_step import DetectionLoss, TrainStep, synchronised
from carpus.models.losses.terms import varifocal_loss
from carpus.models.lw_detr.resnet import FrozenNorm
from carpus.models.recipe import Recipe
from carpus.models.recipe_table import RECIPES, get_recipe
from carpus.models.train_families import TRAIN_FAMILIES
from carpus.models.yolo.letterbox import letterbox_preprocess
from carpus.runtime.errors import DataError

SCENES = [
    {"labels": torch.tensor([1, 0]), "boxes": torch.tensor([[0.5, 0.5, 0.4, 0.3], [0.2, 0.7, 0.2, 0.2]])},
    {"labels": torch.zeros(0, dtype=torch.int64), "boxes": torch.zeros(0, 4)},
]


def lw_detr(**switches: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, criterion = build_model("lw_detr", "tiny", 3, (192, 192)).train(), build_criterion("lw_detr", "tiny", 3)
    recipe = replace(get_recipe("tabletop", "lw_detr", "tiny"), **switches)
    TRAIN_FAMILIES["lw_detr"].apply(model, criterion, recipe)
    return model, criterion


@pytest.mark.parametrize("name", RECIPES)
def test_every_variant_has_recipes_that_its_family_can_follow(name: str) -> None:
    assert RECIPES[name].keys() == FAMILIES.keys() == TRAIN_FAMILIES.keys()
    for family, entry in FAMILIES.items():
        assert set(RECIPES[name][family]) == set(entry.variants)
        for recipe in RECIPES[name][family].values():
            TRAIN_FAMILIES[family].check(family, recipe)
            assert Recipe.from_dict(recipe.as_dict()) == recipe


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_hold_every_parameter_once_and_decay_towards_the_image(family: str) -> None:
    variant = FAMILIES[family].variants[0]
    model = build_model(family, variant, 3)
    groups = TRAIN_FAMILIES[family].parameter_groups
    recipe = replace(get_recipe("tabletop", family, variant), lr=1.0, backbone_lr_factor=1.0)
    names = [name for group in groups(model, recipe) for name in group.names]
    assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert {group.lr for group in groups(model, recipe)} == {1.0}
    decayed = groups(model, replace(recipe, layer_decay=0.5, component_decay=0.5))
    rates = {name: group.lr for group in decayed for name in group.names}
    order = [name for name, p in model.named_parameters() if p.requires_grad and "bias" not in name]
    backbone = [name for name in order if name.startswith(("backbone.stages", "backbone.0.encoder.blocks", "model."))]
    assert rates[backbone[0]] < max(rates.values()) / 8
    assert max(rates.values()) == 1.0
    optimizer = make_optimizer(model, decayed, recipe)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)


def test_yolo_norms_and_biases_are_not_decayed_but_the_scan_is() -> None:
    model = build_model("mamba_yolo", "T", 3)
    recipe = get_recipe("official", "mamba_yolo", "T")
    assert recipe.weight_decay == pytest.approx(5e-4 * 512 / 64)
    decay = {
        name: group.weight_decay
        for group in TRAIN_FAMILIES["mamba_yolo"].parameter_groups(model, recipe)
        for name in group.names
    }
    parameters = dict(model.named_parameters())
    for name, value in decay.items():
        free = "bias" in name or (parameters[name].ndim == 1 and not name.endswith("Ds"))
        assert (value == 0.0) == free, name
    assert any(name.endswith("A_logs") for name in decay)


def test_group_detr_can_be_turned_off() -> None:
    model, criterion = lw_detr(query_groups=None)
    outputs = model(torch.rand(2, 3, 192, 192))
    assert outputs["main"]["pred_logits"].shape[1] == 13 * 100
    alone, one = lw_detr(query_groups=1)
    single = alone(torch.rand(2, 3, 192, 192))
    assert single["main"]["pred_logits"].shape[1] == 100
    for found, loss in ((outputs, criterion), (single, one)):
        assert torch.isfinite(torch.stack(list(loss(found, SCENES).values()))).all()
    assert set(alone.state_dict()) == set(model.state_dict())


def test_all_positions_of_lw_detr_can_be_taught() -> None:
    model, criterion = lw_detr(query_groups=1, dense_supervision=True)
    images = torch.rand(2, 3, 192, 192)
    outputs = model(images)
    assert outputs["dense"]["pred_boxes"].shape == (2, 144, 4)
    losses = criterion(outputs, SCENES)
    assert {"loss_mal_dense", "loss_bbox_dense", "loss_giou_dense"} <= set(losses)
    losses["loss_bbox_dense"].backward()
    head = model.transformer.enc_out_bbox_embed
    assert float(head[0].layers[2].weight.grad.abs().sum()) > 0
    assert head[1].layers[2].weight.grad is None
    model.eval()
    with torch.no_grad():
        assert set(model(images)) == {"pred_logits", "pred_boxes"}


@pytest.mark.parametrize("kind", ["ia_bce", "mal", "vfl"])
def test_classification_losses_of_lw_detr_differ_in_nothing_else(kind: str) -> None:
    model, criterion = lw_detr(query_groups=1, classification=kind)
    assert criterion.config.classification == kind
    with torch.random.fork_rng():
        torch.manual_seed(1)
        losses = criterion(model(torch.rand(2, 3, 192, 192)), SCENES)
    plain_model, plain = lw_detr(query_groups=1)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        expected = plain(plain_model(torch.rand(2, 3, 192, 192)), SCENES)
    assert set(losses) == set(expected)
    for name, value in losses.items():
        same = torch.equal(value, expected[name])
        assert same == (kind == "ia_bce" or not name.startswith("loss_class")), name


def test_varifocal_loss_is_its_formula() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 5, 3, dtype=torch.float64)
    query, labels = torch.tensor([[1, 4]]), torch.tensor([[2, 0]])
    iou = torch.tensor([[0.7, 0.2]], dtype=torch.float64)
    q = torch.zeros(5, 3, dtype=torch.float64)
    q[1, 2], q[4, 0] = 0.7, 0.2
    p = logits[0].sigmoid()
    present = -q * (q * p.log() + (1 - q) * (1 - p).log())
    absent = -0.75 * p**2 * (1 - p).log()
    expected = torch.where(q > 0, present, absent).sum()
    torch.testing.assert_close(varifocal_loss(logits, query, labels, iou)[0], expected)


def test_varifocal_loss_takes_the_place_of_mal_in_deimv2() -> None:
    model, criterion = build_model("deimv2", "atto", 3, (320, 320)).train(), build_criterion("deimv2", "atto", 3)
    recipe = replace(get_recipe("tabletop", "deimv2", "atto"), classification="vfl", dense_supervision=False)
    TRAIN_FAMILIES["deimv2"].apply(model, criterion, recipe)
    losses = criterion(model(torch.rand(2, 3, 320, 320)), SCENES)
    assert "loss_vfl" in losses
    assert not any(name.startswith("loss_mal") for name in losses)


def test_images_of_yolo_recipes_are_framed_as_letterboxes_are() -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (120, 200, 3), dtype=np.uint8)
    boxes = np.array([[20.0, 30.0, 120.0, 90.0]], np.float32)
    config = AugmentConfig(keep_aspect=True, fill=114, flip_prob=0.0)
    framed, moved, _ = Augmenter(config, (160, 160))(image, boxes, np.zeros(1, np.int64), rng, 0)
    expected, letterbox = letterbox_preprocess(image, (160, 160))
    assert abs(framed.astype(float) / 255 - expected.transpose(1, 2, 0)).mean() < 0.02
    assert (framed[: letterbox.offset[1]] == 114).all()
    centre, size = moved[0, :2] * 160, moved[0, 2:] * 160
    scale = letterbox.content_size[1] / 200
    np.testing.assert_allclose(size, np.array([100, 60]) * scale, atol=1.0)
    np.testing.assert_allclose(centre, np.array([70, 60]) * scale + letterbox.offset, atol=1.0)


def test_a_framed_crop_names_every_object_in_sight() -> None:
    rng = np.random.default_rng(3)
    image = np.zeros((100, 300, 3), np.uint8)
    boxes = np.stack([(x, 40.0, x + 20.0, 60.0) for x in np.arange(5.0, 280.0, 30.0)]).astype(np.float32)
    for x1, y1, x2, y2 in boxes.astype(int):
        image[y1:y2, x1:x2] = 255
    config = AugmentConfig(
        keep_aspect=True, strong_from=0, strong_until=9, crop_prob=1.0, photometric_prob=0.0, channel_swap_prob=0.0
    )
    augment = Augmenter(config, (96, 96))
    for _ in range(30):
        picture, found, labels = augment(image, boxes, np.arange(len(boxes)), rng, 0)
        assert len(found) == len(labels)
        covered = np.zeros((96, 96), bool)
        for x, y, w, h in found * 96:
            covered[int(y - h / 2 - 2) : int(y + h / 2 + 3), max(int(x - w / 2 - 2), 0) : int(x + w / 2 + 3)] = True
        middle = picture[:, 4:-4].mean(-1) > 200  # objects cut by the border may have their centre outside
        outside = middle & ~covered[:, 4:-4]
        assert outside.mean() < 0.02


def test_inputs_must_have_as_many_positions_as_queries() -> None:
    model = build_model("lw_detr", "tiny", 3, (128, 128))
    with pytest.raises(DataError, match="Input of 128 x 128 px has 64 positions for 100 queries of tiny"):
        TRAIN_FAMILIES["lw_detr"].check_sizes(model, {1.0: (128, 128)})
    assert TRAIN_FAMILIES["lw_detr"].multiple(model) == 64
    small = build_model("yolo_master", "v0_1-n", 3, (64, 64))
    with pytest.raises(DataError, match="Input of 32 x 64 px is too small to train v0_1-n"):
        TRAIN_FAMILIES["yolo_master"].check_sizes(small, {1.0: (64, 64), 0.6: (32, 64)})


def test_random_sizes_count_among_the_sizes_of_a_training() -> None:
    recipe = replace(get_recipe("official", "lw_detr", "tiny"), input_scales=())
    assert set(training_sizes(recipe, (192, 192), 64).values()) == {(192, 192), (128, 128)}
    assert set(training_sizes(replace(recipe, multi_scale_repeat=0), (192, 192), 64).values()) == {(192, 192)}


def test_frozen_norms_are_not_synchronised() -> None:
    module = nn.Sequential(nn.BatchNorm2d(4), FrozenNorm(4), nn.Sequential(nn.BatchNorm2d(2)))
    synchronised(module)
    assert [type(child) for child in (module[0], module[1], module[2][0])] == [
        nn.SyncBatchNorm,
        FrozenNorm,
        nn.SyncBatchNorm,
    ]


def test_what_networks_draw_in_a_step_depends_on_the_step_alone() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return (self.weight - torch.rand(3)).square().sum()

    def weights() -> torch.Tensor:
        torch.rand(int(torch.randint(9, ())))  # whatever others draw
        model = Noisy()
        loss = DetectionLoss(model, lambda outputs, *_: {"loss_it": outputs})  # type: ignore[arg-type]
        recipe = get_recipe("tabletop", "lw_detr", "tiny")
        optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 1.0, "initial_lr": 1.0}], lr=1.0)
        fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1)
        step = TrainStep(fabric, loss, optimizer, ModelEMA(model), recipe, recipe.schedule(10), seed=3)
        step(torch.zeros(1, 3, 32, 32), [], 0, 400)
        return model.weight.detach()

    assert torch.equal(weights(), weights())
