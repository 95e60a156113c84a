"""Rendered scenes with the small robot: ground truth against what the pixels say, and determinism."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("mujoco", reason="the simulation needs mujoco (pip install 'carpus[sim]')")

from carpus.runtime.errors import BackendError, DataError
from carpus.sim.arms import Posture
from carpus.sim.boxes import ObjectBox, camera_matrix, camera_pose, observe, pixel_boxes, project
from carpus.sim.camera import PERIOD, SimCamera
from carpus.sim.domains import DOMAINS, domain_by_name
from carpus.sim.robot import GROUP_HIDDEN, build_robot
from carpus.sim.scene import TABLE_HEIGHT, Scene
from carpus.sim.tabletop import Tabletop
from tests.opengl import skip_without_opengl

SIZE = (120, 160)


def _make(domain: str, size: tuple[int, int] = SIZE) -> Tabletop:
    try:
        return Tabletop(domain, "primitive", size)
    except BackendError as error:
        skip_without_opengl(error)


@pytest.fixture(scope="module")
def tabletop() -> Iterator[Tabletop]:
    made = _make("train", (240, 320))
    yield made
    made.close()


def _lone(tabletop: Tabletop, index: int, rng: np.random.Generator) -> list[ObjectBox]:
    """Ground truth with only one object on the table and the arms away."""
    tabletop.randomise(rng)
    scene = tabletop.scene
    scene.hide_objects()
    for side, posture in tabletop.postures.resting.items():
        tabletop.postures.apply(side, posture)
    tabletop.place_camera(np.array([0.2, 0.0, 1.5]), np.array([0.5, 0.0, TABLE_HEIGHT]), 0.05, 50.0)
    yaw = rng.uniform(-np.pi, np.pi)
    turn = np.array([[np.cos(yaw), -np.sin(yaw), 0], [np.sin(yaw), np.cos(yaw), 0], [0, 0, 1.0]])
    scene.show_object(index, [0.5, rng.uniform(-0.05, 0.05), TABLE_HEIGHT + 0.05], turn)
    scene.update_kinematics()
    return observe(scene, tabletop.renderer)


def test_amodal_and_visible_boxes_agree_where_nothing_hides(tabletop: Tabletop) -> None:
    rng = np.random.default_rng(0)
    for index in range(0, 72, 5):  # Twelve classes of six variants; every class is met.
        (box,) = _lone(tabletop, index, rng)
        assert box.index == index
        assert box.visibility == 1.0
        difference = np.abs(np.array(box.visible) - np.array(box.amodal)).max()
        assert difference < 1.0, f"{tabletop.scene.objects[index].name}: {difference:.2f} px"


def test_a_known_screen_hides_the_share_it_covers(tabletop: Tabletop) -> None:
    scene, rng = tabletop.scene, np.random.default_rng(1)
    box_class = next(i for i, item in enumerate(scene.objects) if item.name == "box_0")
    screen = next(i for i, item in enumerate(scene.objects) if item.name == "plate_0")
    (alone,) = _lone(tabletop, box_class, rng)
    towards = camera_pose(scene)[:3, 3] - scene.data.mocap_pos[scene.objects[box_class].mocap]
    halfway = scene.data.mocap_pos[scene.objects[box_class].mocap] + 0.4 * towards + [0.0, 0.10, 0.0]
    scene.show_object(screen, halfway, np.eye(3))
    scene.update_kinematics()
    found = {box.index: box for box in observe(scene, tabletop.renderer)}
    covered = found[box_class]
    assert 0.0 < covered.visibility < 1.0
    assert covered.visibility == pytest.approx(covered.pixels / alone.pixels, abs=1e-6)
    np.testing.assert_allclose(covered.amodal, alone.amodal)
    assert found[screen].visibility > covered.visibility


def test_an_object_leaving_the_picture_is_partly_visible(tabletop: Tabletop) -> None:
    scene, rng = tabletop.scene, np.random.default_rng(2)
    (whole,) = _lone(tabletop, 36, rng)
    assert scene.objects[36].name == "ball_0"
    assert whole.visibility == 1.0
    middle = (whole.visible[0] + whole.visible[2]) / 2
    matrix = tabletop.camera_matrix
    pose = camera_pose(scene)
    position = scene.data.mocap_pos[scene.objects[36].mocap].copy()
    centre = position + scene.objects[36].vertices.mean(0)
    depth = (pose[:3, :3].T @ (centre - pose[:3, 3]))[2]
    position += pose[:3, 0] * (scene.size[1] - middle) / matrix[0, 0] * depth  # Its middle onto the right border.
    scene.data.mocap_pos[scene.objects[36].mocap] = position
    scene.update_kinematics()
    (cut,) = observe(scene, tabletop.renderer)
    assert cut.visible[2] == scene.size[1]
    assert cut.amodal[2] > scene.size[1]
    assert cut.visibility == pytest.approx(0.5, abs=0.1)


def test_pictures_do_not_depend_on_their_order(tabletop: Tabletop) -> None:
    def picture(seed: int) -> tuple[bytes, tuple[ObjectBox, ...]]:
        sample = tabletop.sample(np.random.default_rng(seed))
        return sample.image.tobytes(), sample.boxes

    forwards = [picture(seed) for seed in range(4)]
    backwards = [picture(seed) for seed in reversed(range(4))][::-1]
    assert forwards == backwards
    assert len({image for image, _ in forwards}) == 4


def test_two_scenes_make_the_same_picture() -> None:
    images = []
    for _ in range(2):
        made = _make("heldout")
        images.append(made.sample(np.random.default_rng(7)).image)
        made.close()
    np.testing.assert_array_equal(images[0], images[1])


@pytest.mark.parametrize("domain", DOMAINS)
def test_samples_hold_labelled_objects(domain: str) -> None:
    made = _make(domain)
    counts, seen = [], set()
    for seed in range(6):
        sample = made.sample(np.random.default_rng(seed))
        assert sample.image.shape == (*SIZE, 3)
        assert sample.image.dtype == np.uint8
        assert sample.image.std() > 5.0, "an empty picture"
        counts.append(len(sample.boxes))
        for box in sample.boxes:
            x0, y0, x1, y1 = box.visible
            assert 0 <= x0 < x1 <= SIZE[1]
            assert 0 <= y0 < y1 <= SIZE[0]
            assert 0 < box.pixels <= (x1 - x0) * (y1 - y0)
            assert 0.0 < box.visibility <= 1.0
            assert box.amodal[0] <= x0 + 1
            assert box.amodal[3] >= y1 - 1
            seen.add(box.class_id)
    made.close()
    assert max(counts) <= made.domain.objects[1]
    assert np.mean(counts) > 2
    assert len(seen) > 4


def test_changing_a_material_texture_changes_the_picture(tabletop: Tabletop) -> None:
    """The renderer keeps its own material table; a missed update would leave every object printed."""
    scene = tabletop.scene
    plate = next(i for i, item in enumerate(scene.objects) if item.name == "plate_0")
    _lone(tabletop, plate, np.random.default_rng(3))
    material = int(scene.objects[plate].materials[0])
    pictures = []
    for texture in (-1, scene.textures["label0"], -1):
        scene.set_texture(material, texture)
        pictures.append(tabletop.renderer.picture(shadows=False))
    assert (pictures[0] != pictures[1]).any()
    np.testing.assert_array_equal(pictures[0], pictures[2])


def test_pixel_boxes() -> None:
    labels = np.full((6, 8), -1)
    labels[1:3, 2:5] = 0
    labels[4, 7] = 2
    boxes, pixels = pixel_boxes(labels, 3)
    np.testing.assert_array_equal(boxes, [[2, 1, 5, 3], [0, 0, 0, 0], [7, 4, 8, 5]])
    np.testing.assert_array_equal(pixels, [6, 0, 1])
    empty, none = pixel_boxes(np.full((2, 2), -1), 1)
    assert empty.tolist() == [[0, 0, 0, 0]]
    assert none.tolist() == [0]


def test_projection_of_the_optical_axis_and_of_points_behind() -> None:
    matrix = camera_matrix(90.0, (480, 640))
    np.testing.assert_allclose(matrix, [[240, 0, 320], [0, 240, 240], [0, 0, 1]])
    points = np.array([[0.0, 0.0, 2.0], [1.0, 0.0, 2.0], [0.0, 0.0, -1.0]])
    np.testing.assert_allclose(project(points, np.eye(4), matrix), [[320, 240], [440, 240]])


def test_arms_of_the_library_reach_over_the_table_without_touching_it(tabletop: Tabletop) -> None:
    for side, library in tabletop.postures.library.items():
        assert len(library) > 10
        assert all(tabletop.postures.clears_table(side, posture) for posture in library)
        assert all(posture.points[:, 2].min() > TABLE_HEIGHT - 0.3 for posture in library)
        lowered = Posture(library[0].values, library[0].points - np.float32([0.0, 0.0, 0.5]))
        assert not tabletop.postures.clears_table(side, lowered)


def test_the_film_is_decided_by_its_seed_and_moves() -> None:
    films = []
    for seed in (5, 5, 6):
        try:
            camera = SimCamera(seed, SIZE, robot="primitive")
        except BackendError as error:
            skip_without_opengl(error)
        with camera:
            frames = [camera.step(dt) for dt in (0.0, 0.1, PERIOD, 2 * PERIOD)]
            films.append((frames, camera.boxes()))
            matrix = camera.camera_matrix
    (first, boxes), (again, boxes_again), (other, _) = films
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.image, b.image)
        np.testing.assert_array_equal(a.T_base_camera, b.T_base_camera)
    assert boxes == boxes_again
    assert boxes
    assert (first[0].image != other[0].image).any()
    assert (first[0].T_base_camera != first[2].T_base_camera).any()
    assert first[-1].time == pytest.approx(3 * PERIOD + 0.1)
    assert matrix.shape == (3, 3)
    for frame in first:
        rotation = frame.T_base_camera[:3, :3]
        np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-9)
        assert rotation[2, 2] < -0.5, "the optical axis looks down at the table"
        assert 0.3 < frame.T_base_camera[2, 3] < 0.9, "the head is above the base"


def test_the_film_passes_smoothly_from_cycle_to_cycle() -> None:
    try:
        camera = SimCamera(2, (48, 64), robot="primitive")
    except BackendError as error:
        skip_without_opengl(error)
    with camera:
        scene = camera._tabletop.scene
        before = None
        for _ in range(240):
            camera.step(0.05)
            state = np.concatenate([scene.data.qpos, scene.data.mocap_pos.ravel(), scene.data.cam_xpos.ravel()])
            if before is not None:
                assert np.abs(state - before).max() < 0.25, "a jump of joints or objects between two frames"
            before = state


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_robot("atlas"), r"unknown robot 'atlas'; expected one of gr1t2, primitive"),
        (lambda: domain_by_name("kitchen"), r"unknown domain 'kitchen'; expected one of train, heldout, site"),
        (lambda: Scene("primitive", (8, 640)), r"picture size 8x640 .*16\.\.4096"),
        (lambda: Scene("primitive", (480, 640), variants=0), r"variants is 0; expected at least 1"),
        (lambda: SimCamera(-1), r"seed is -1; expected 0 or more"),
    ],
)
def test_wrong_inputs_are_refused(call, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()


def test_time_cannot_run_backwards() -> None:
    try:
        camera = SimCamera(0, (48, 64), robot="primitive")
    except BackendError as error:
        skip_without_opengl(error)
    with camera:
        for dt in (-0.1, float("nan"), float("inf")):
            with pytest.raises(DataError, match=r"dt is .* s; expected a finite number, 0 or more"):
                camera.step(dt)
        assert camera.time == 0.0


def test_hidden_objects_are_in_no_picture(tabletop: Tabletop) -> None:
    tabletop.randomise(np.random.default_rng(0))
    tabletop.scene.hide_objects()
    tabletop.scene.update_kinematics()
    assert observe(tabletop.scene, tabletop.renderer) == []
    for item in tabletop.scene.objects:
        assert (tabletop.scene.model.geom_group[item.geoms] == GROUP_HIDDEN).all()
