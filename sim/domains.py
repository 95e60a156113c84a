"""What is randomised, and between which bounds: one record for training, one held out, one for a fixed site."""

from __future__ import annotations

from dataclasses import dataclass

from carpus.runtime.errors import DataError
from carpus.sim.textures import HELDOUT_FAMILIES, TRAIN_FAMILIES

__all__ = ["DOMAINS", "Domain", "domain_by_name"]

_Range = tuple[float, float]


@dataclass(frozen=True)
class Domain:
    """Bounds of the randomisation of a scene.

    Attributes:
        name: split name.
        table, backdrop: texture families of the table and of floor and wall.
        texture_seed: one fixed texture for every picture instead of a new one each time.
        repeat: texture repetitions across the table.
        light_azimuth: direction of the key light about z, 0 = behind the robot's table, 180 = behind the robot [deg].
        light_elevation: its height above the horizon [deg].
        key, fill, ambient: light strengths, 0..1.
        tints: light colours (RGB gains); a light mixes two of them.
        shadow_share: share of pictures in which the key light casts shadows.
        camera_shift: half ranges of the camera's place about the head mount, x forward, y left, z up [m].
        camera_offset: a constant added to it [m].
        look_at: x and y ranges of the point on the table that the camera looks at [m].
        fovy: vertical field of view [deg].
        roll: largest camera roll [deg].
        objects: smallest and largest number of objects.
        distractors: largest number of distractors.
        layouts: names of :mod:`carpus.sim.layout` arrangements.
        arms_share: probability, for each arm, that it reaches over the table.
        exposure: mean brightness, 0..1, that automatic exposure aims at (within its range of gains).
        noise: range of the sensor noise's standard deviation [grey levels].
    """

    name: str
    table: tuple[str, ...]
    backdrop: tuple[str, ...]
    light_azimuth: _Range
    light_elevation: _Range
    key: _Range
    fill: _Range
    ambient: _Range
    tints: tuple[tuple[float, float, float], ...]
    shadow_share: float
    layouts: tuple[str, ...]
    texture_seed: int | None = None
    repeat: _Range = (1.0, 4.0)
    camera_shift: tuple[float, float, float] = (0.10, 0.14, 0.12)
    camera_offset: tuple[float, float, float] = (-0.04, 0.0, 0.02)
    look_at: tuple[_Range, _Range] = ((0.44, 0.60), (-0.12, 0.12))
    fovy: _Range = (40.0, 58.0)
    roll: float = 6.0
    objects: tuple[int, int] = (3, 9)
    distractors: int = 4
    arms_share: float = 0.35
    exposure: _Range = (0.30, 0.55)
    noise: _Range = (0.0, 5.0)


_TRAIN = Domain(
    name="train",
    table=tuple(TRAIN_FAMILIES),
    backdrop=tuple(TRAIN_FAMILIES),
    light_azimuth=(-130.0, 130.0),
    light_elevation=(35.0, 85.0),
    key=(0.35, 0.9),
    fill=(0.05, 0.4),
    ambient=(0.2, 0.45),
    tints=((1.0, 1.0, 1.0), (1.0, 0.86, 0.68), (0.82, 0.92, 1.0)),
    shadow_share=0.4,
    layouts=("scatter", "cluster"),
)

_HELDOUT = Domain(
    name="heldout",
    table=tuple(HELDOUT_FAMILIES),
    backdrop=tuple(HELDOUT_FAMILIES),
    light_azimuth=(135.0, 225.0),
    light_elevation=(25.0, 75.0),
    key=(0.35, 0.95),
    fill=(0.05, 0.35),
    ambient=(0.18, 0.45),
    tints=((0.94, 1.0, 0.88), (1.0, 0.9, 0.95), (0.9, 1.0, 1.0)),
    shadow_share=0.5,
    layouts=("row", "ring", "pairs"),
)

_SITE = Domain(
    name="site",
    table=("cutting_mat",),
    backdrop=("hazard",),
    texture_seed=7,
    repeat=(3.0, 3.0),
    light_azimuth=(88.0, 96.0),
    light_elevation=(24.0, 28.0),
    key=(0.42, 0.48),
    fill=(0.02, 0.04),
    ambient=(0.10, 0.12),
    tints=((1.0, 0.66, 0.36),),
    shadow_share=1.0,
    layouts=("scatter", "row"),
    camera_shift=(0.01, 0.01, 0.01),
    camera_offset=(0.02, 0.22, 0.16),
    look_at=((0.47, 0.49), (-0.06, -0.04)),
    fovy=(64.0, 65.0),
    roll=1.0,
    exposure=(0.2, 0.24),
    noise=(7.0, 9.0),
)

#: Domains by name.
DOMAINS: dict[str, Domain] = {domain.name: domain for domain in (_TRAIN, _HELDOUT, _SITE)}


def domain_by_name(name: str) -> Domain:
    """Return a domain of :data:`DOMAINS`.

    Raises:
        DataError: the name is unknown.
    """
    if name not in DOMAINS:
        raise DataError(f"unknown domain '{name}'; expected one of {', '.join(DOMAINS)}")
    return DOMAINS[name]
