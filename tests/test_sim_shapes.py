"""Procedural surfaces, objects, textures and arrangements: properties that hold for every draw."""

from __future__ import annotations

import numpy as np
import pytest

from carpus.runtime.errors import DataError
from carpus.sim.domains import DOMAINS, Domain
from carpus.sim.layout import LAYOUTS, Footprint, Placement, arrange, footprint_corners, rectangles_overlap
from carpus.sim.objects import CLASSES, DISTRACTORS, build_object
from carpus.sim.shapes import Surface, arc, box, extrude, lathe, sphere, tube
from carpus.sim.textures import HELDOUT_FAMILIES, LABEL_FAMILIES, SITE_FAMILIES, TRAIN_FAMILIES, colour, draw_texture


def _volume(surface: Surface) -> float:
    """Signed volume: positive only where a closed surface's faces all look outwards."""
    corners = surface.vertices[surface.faces]
    return float(np.einsum("ij,ij->", corners[:, 0], np.cross(corners[:, 1], corners[:, 2])) / 6)


@pytest.mark.parametrize(
    ("surface", "volume", "tolerance"),
    [
        (box((0.1, 0.2, 0.3)), 8 * 0.1 * 0.2 * 0.3, 1e-9),
        (sphere(0.5, 64), 4 / 3 * np.pi * 0.5**3, 0.01),
        (lathe([(0, 0), (0.2, 0), (0.2, 0.5), (0, 0.5)], 96), np.pi * 0.2**2 * 0.5, 0.01),
        (lathe([(0.1, 0), (0.2, 0), (0.2, 0.5), (0.1, 0.5), (0.1, 0)], 96), np.pi * (0.04 - 0.01) * 0.5, 0.01),
        (extrude([(0, 0), (1, 0), (1, 2), (0, 2)], 0.5, (0.5, 1.0)), 1.0, 1e-9),
        (tube([(0, 0, 0), (1, 0, 0)], 0.1, 96), np.pi * 0.01, 0.01),
        (tube([(0, 0, 0), (0, 0, 1)], 0.1, 96), np.pi * 0.01, 0.01),
    ],
    ids=["box", "sphere", "cylinder", "pipe", "prism", "rod along x", "rod along z"],
)
def test_closed_surfaces_enclose_the_expected_volume(surface: Surface, volume: float, tolerance: float) -> None:
    assert _volume(surface) == pytest.approx(volume, rel=tolerance)


@pytest.mark.parametrize("category", CLASSES + DISTRACTORS)
def test_faces_and_normals_point_the_same_way(category: str) -> None:
    for seed in range(5):
        for part in build_object(category, np.random.default_rng(seed)).parts:
            surface = part.surface
            corners = surface.vertices[surface.faces]
            geometric = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
            assert (np.einsum("ij,ij->i", geometric, surface.normals[surface.faces].mean(1)) > 0).all()
            np.testing.assert_allclose(np.linalg.norm(surface.normals, axis=1), 1.0, atol=1e-9)
            assert surface.texcoords.shape == (len(surface.vertices), 2)


@pytest.mark.parametrize("category", CLASSES + DISTRACTORS)
def test_objects_are_of_a_size_that_fits_a_table(category: str) -> None:
    extents = [np.ptp(build_object(category, np.random.default_rng(seed)).vertices, axis=0) for seed in range(5)]
    assert all(0.02 < extent.max() < 0.35 for extent in extents)
    assert len({tuple(extent.round(6)) for extent in extents}) == 5, "every draw should have its own proportions"


def test_poses_are_rotations() -> None:
    for category in CLASSES + DISTRACTORS:
        item = build_object(category, np.random.default_rng(0))
        assert sum(pose.weight for pose in item.poses) > 0
        for pose in item.poses:
            np.testing.assert_allclose(pose.rotation @ pose.rotation.T, np.eye(3), atol=1e-12)
            assert np.linalg.det(pose.rotation) == pytest.approx(1.0)


def test_moving_a_surface_moves_vertices_and_turns_normals() -> None:
    turn = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    original = box((1, 2, 3))
    moved = original.moved((10, 0, 0), turn)
    np.testing.assert_allclose(moved.vertices, original.vertices @ turn.T + [10, 0, 0])
    np.testing.assert_allclose(moved.normals, original.normals @ turn.T)


def test_arc_keeps_its_radius() -> None:
    np.testing.assert_allclose(np.linalg.norm(arc((1, 2), 3.0, 0.0, 2.0, 9) - [1, 2], axis=1), 3.0)


def test_no_texture_family_is_shared_between_domains() -> None:
    tables = [TRAIN_FAMILIES, HELDOUT_FAMILIES, SITE_FAMILIES, LABEL_FAMILIES]
    names = [name for table in tables for name in table]
    functions = [function for table in tables for function in table.values()]
    assert len(names) == len(set(names))
    assert len(functions) == len(set(functions))


@pytest.mark.parametrize("family", [*TRAIN_FAMILIES, *HELDOUT_FAMILIES, *SITE_FAMILIES, *LABEL_FAMILIES])
def test_textures_are_decided_by_their_generator(family: str) -> None:
    first, again = (draw_texture(family, np.random.default_rng(3), 48) for _ in range(2))
    assert first.shape == (48, 48, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(first, again)
    assert (first != draw_texture(family, np.random.default_rng(4), 48)).any()


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"unknown texture family 'velvet'; expected one of .*wood"):
        draw_texture("velvet", np.random.default_rng(0))
    with pytest.raises(DataError, match=r"unknown object class 'spoon'; expected one of can, mug"):
        build_object("spoon", np.random.default_rng(0))


def test_colour_keeps_to_its_ranges() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        rgb = colour(rng, (100.0, 140.0), (0.5, 1.0), (0.5, 0.9))
        assert rgb.argmax() == 1, "hues about 120 degrees are green"
        assert 0.5 <= rgb.max() <= 0.9
        assert rgb.min() <= 0.5 * rgb.max() + 1e-6


@pytest.mark.parametrize(
    ("offset", "yaw", "gap", "expected"),
    [
        ((0.0, 0.0), 0.0, 0.0, True),
        ((2.1, 0.0), 0.0, 0.0, False),
        ((2.1, 0.0), 0.0, 0.2, True),
        ((2.1, 0.0), np.pi / 4, 0.0, True),
        ((2.1, 2.1), np.pi / 4, 0.0, False),
    ],
)
def test_rectangles_overlap(offset: tuple[float, float], yaw: float, gap: float, expected: bool) -> None:
    unit = Footprint(np.zeros(2), np.ones(2))
    first, second = (footprint_corners(unit, place) for place in (Placement(0, 0, 0), Placement(*offset, yaw)))
    assert rectangles_overlap(first, second, gap) is expected
    assert rectangles_overlap(second, first, gap) is expected


def test_no_light_or_layout_is_shared_between_train_and_heldout() -> None:
    train, heldout = DOMAINS["train"], DOMAINS["heldout"]
    assert not set(train.layouts) & set(heldout.layouts)
    assert not set(train.tints) & set(heldout.tints)

    def directions(domain: Domain) -> set[int]:
        low, high = domain.light_azimuth
        return {degree % 360 for degree in range(round(low), round(high) + 1)}

    assert not directions(train) & directions(heldout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrangements_neither_overlap_nor_leave_the_region(layout: str) -> None:
    rng = np.random.default_rng(1)
    footprints = [Footprint(rng.normal(0, 0.01, 2), rng.uniform(0.02, 0.06, 2)) for _ in range(8)]
    places = arrange(
        rng, layout, footprints, lambda: rng.uniform(-0.4, 0.4, 2), lambda x, y: abs(x) < 0.4 and abs(y) < 0.4, gap=0.01
    )
    placed = [(f, p) for f, p in zip(footprints, places, strict=True) if p is not None]
    assert len(placed) >= 6
    corners = [footprint_corners(footprint, place) for footprint, place in placed]
    assert all(abs(place.x) < 0.4 and abs(place.y) < 0.4 for _, place in placed)
    assert not any(rectangles_overlap(a, b) for i, a in enumerate(corners) for b in corners[:i])


def test_a_full_table_leaves_objects_out() -> None:
    rng = np.random.default_rng(0)
    footprints = [Footprint(np.zeros(2), np.full(2, 0.2)) for _ in range(3)]
    places = arrange(rng, "scatter", footprints, lambda: np.zeros(2), lambda x, y: True)
    assert [place is None for place in places] == [False, True, True]
