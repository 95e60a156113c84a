"""Triangle surfaces built with numpy: lathes, tubes, extrusions and boxes with normals and texture coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Surface", "arc", "box", "extrude", "lathe", "sphere", "tube"]

_CREASE = np.deg2rad(35.0)


@dataclass(frozen=True)
class Surface:
    """A triangle surface; vertices are doubled along creases and texture seams, so normals are one per vertex.

    Attributes:
        vertices: ``(V, 3)`` [m].
        normals: ``(V, 3)`` unit length, pointing outwards.
        texcoords: ``(V, 2)``, 0..1 across the surface.
        faces: ``(F, 3)`` indices, counter-clockwise seen from outside.
    """

    vertices: NDArray[np.float64]
    normals: NDArray[np.float64]
    texcoords: NDArray[np.float64]
    faces: NDArray[np.int64]

    def moved(self, offset: ArrayLike = (0.0, 0.0, 0.0), rotation: ArrayLike | None = None) -> Surface:
        """Return the surface rotated by ``rotation (3, 3)``, then shifted by ``offset (3,)`` [m]."""
        matrix = np.eye(3) if rotation is None else np.asarray(rotation, float)
        return Surface(
            self.vertices @ matrix.T + np.asarray(offset, float), self.normals @ matrix.T, self.texcoords, self.faces
        )

    def joined(self, other: Surface) -> Surface:
        """Return both surfaces as one."""
        return Surface(
            np.concatenate([self.vertices, other.vertices]),
            np.concatenate([self.normals, other.normals]),
            np.concatenate([self.texcoords, other.texcoords]),
            np.concatenate([self.faces, other.faces + len(self.vertices)]),
        )


def arc(centre: ArrayLike, radius: float, start: float, stop: float, count: int) -> NDArray[np.float64]:
    """Points ``(count, 2)`` on a circle from angle ``start`` to ``stop`` [rad]."""
    angle = np.linspace(start, stop, count)
    return np.asarray(centre, float) + radius * np.stack([np.cos(angle), np.sin(angle)], 1)


def _unit(vectors: NDArray[Any]) -> NDArray[Any]:
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(length, 1e-12)


def _grid_faces(rows: int, columns: int, start: int = 0) -> NDArray[np.int64]:
    """Two triangles a cell of a ``rows x columns`` vertex grid, row-major from ``start``."""
    row, column = np.meshgrid(np.arange(rows - 1), np.arange(columns - 1), indexing="ij")
    a = (start + row * columns + column).ravel()
    b, c, d = a + 1, a + columns + 1, a + columns
    return np.concatenate([np.stack([a, b, c], 1), np.stack([a, c, d], 1)])


def _without_slivers(vertices: NDArray[Any], faces: NDArray[Any]) -> NDArray[Any]:
    corner = vertices[faces]
    area = np.linalg.norm(np.cross(corner[:, 1] - corner[:, 0], corner[:, 2] - corner[:, 0]), axis=1)
    return faces[area > 1e-12]


def lathe(profile: ArrayLike, slices: int = 28) -> Surface:
    """Turn a profile about the z axis.

    Args:
        profile: ``(P, 2)`` radius and height [m], followed with the outside on the right: the base outwards from the
            axis, up the outer wall, and for an open vessel over the rim and down the inner wall.
        slices: number of steps about the axis.

    Returns:
        the surface; texture coordinate u goes once round, v along the profile by arc length.
    """
    points = np.asarray(profile, float)
    steps = np.diff(points, axis=0)
    normals2 = _unit(np.stack([steps[:, 1], -steps[:, 0]], 1))
    length = np.concatenate([[0.0], np.cumsum(np.linalg.norm(steps, axis=1))])
    strips: list[tuple[list[int], list[NDArray[Any]]]] = [([0], [normals2[0]])]
    for index in range(1, len(points) - 1):
        before, after = normals2[index - 1], normals2[index]
        if np.arccos(np.clip(before @ after, -1.0, 1.0)) > _CREASE:
            strips[-1][0].append(index)
            strips[-1][1].append(before)
            strips.append(([index], [after]))
        else:
            strips[-1][0].append(index)
            strips[-1][1].append(_unit(before + after))
    strips[-1][0].append(len(points) - 1)
    strips[-1][1].append(normals2[-1])

    angle = np.linspace(0.0, 2.0 * np.pi, slices + 1)
    cos, sin = np.cos(angle), np.sin(angle)
    vertices, normals, texcoords, faces = [], [], [], []
    start = 0
    for indices, strip_normals in strips:
        for index, normal in zip(indices, strip_normals, strict=True):
            radius, height = points[index]
            vertices.append(np.stack([radius * cos, radius * sin, np.full_like(cos, height)], 1))
            normals.append(np.stack([normal[0] * cos, normal[0] * sin, np.full_like(cos, normal[1])], 1))
            texcoords.append(np.stack([angle / (2.0 * np.pi), np.full_like(cos, length[index] / length[-1])], 1))
        faces.append(_grid_faces(len(indices), slices + 1, start))
        start += len(indices) * (slices + 1)
    all_vertices = np.concatenate(vertices)
    return Surface(
        all_vertices,
        np.concatenate(normals),
        np.concatenate(texcoords),
        _without_slivers(all_vertices, np.concatenate(faces)),
    )


def sphere(radius: float, slices: int = 24) -> Surface:
    """A sphere about the origin, texture coordinates as on a globe."""
    profile = arc((0.0, 0.0), radius, -np.pi / 2, np.pi / 2, slices // 2 + 1)
    profile[[0, -1], 0] = 0.0
    return lathe(profile, slices)


def tube(path: ArrayLike, radius: ArrayLike, sides: int = 14, flatten: float = 1.0) -> Surface:
    """A closed tube along a path that lies in one plane.

    Args:
        path: ``(P, 3)`` centre line [m] in the xy or the xz plane.
        radius: one radius [m], or ``(P,)``.
        sides: vertices a ring.
        flatten: ratio of the radius across the plane to the radius in the plane.
    """
    points = np.asarray(path, float)
    radii = np.broadcast_to(np.asarray(radius, float), (len(points),))
    across = np.array([0.0, 0.0, 1.0]) if np.ptp(points[:, 2]) < 1e-9 else np.array([0.0, 1.0, 0.0])
    tangent = _unit(np.gradient(points, axis=0))
    inwards = _unit(np.cross(across, tangent))
    angle = np.linspace(0.0, 2.0 * np.pi, sides + 1)
    ring = np.cos(angle)[None, :, None] * inwards[:, None] + np.sin(angle)[None, :, None] * across * flatten
    vertices = points[:, None] + radii[:, None, None] * ring
    normals = _unit(np.cos(angle)[None, :, None] * inwards[:, None] + np.sin(angle)[None, :, None] * across / flatten)
    rows = len(points)
    along = np.broadcast_to(np.linspace(0.0, 1.0, rows)[:, None], (rows, sides + 1))
    around = np.broadcast_to(angle / (2.0 * np.pi), (rows, sides + 1))
    body = vertices.reshape(-1, 3)
    surface = Surface(
        body, normals.reshape(-1, 3), np.stack([around, along], -1).reshape(-1, 2), _grid_faces(rows, sides + 1)
    )
    if np.einsum("ij,ij->", *_first_face(surface)) < 0:
        surface = Surface(surface.vertices, surface.normals, surface.texcoords, surface.faces[:, ::-1])
    for end, direction in ((0, -tangent[0]), (rows - 1, tangent[-1])):
        surface = surface.joined(_fan(vertices[end, :-1], points[end], direction))
    return surface


def _first_face(surface: Surface) -> tuple[NDArray[Any], NDArray[Any]]:
    corner = surface.vertices[surface.faces[:1]]
    geometric = np.cross(corner[:, 1] - corner[:, 0], corner[:, 2] - corner[:, 0])
    return geometric, surface.normals[surface.faces[:1, 0]]


def _fan(rim: NDArray[Any], centre: NDArray[Any], normal: NDArray[Any]) -> Surface:
    """A flat cap: triangles from ``centre`` to the closed polygon ``rim (N, 3)``, facing ``normal``."""
    count = len(rim)
    vertices = np.concatenate([np.asarray(centre, float)[None], rim])
    edge = np.arange(count)
    faces = np.stack([np.zeros(count, np.int64), edge + 1, (edge + 1) % count + 1], 1)
    turn = np.cross(rim - centre, np.roll(rim, -1, 0) - centre).sum(0)
    if turn @ normal < 0:
        faces = faces[:, ::-1]
    extent = np.maximum(np.ptp(vertices, axis=0).max(), 1e-9)
    flat = (vertices - vertices.min(0)) / extent
    axes = np.argsort(np.abs(normal))[:2]
    return Surface(vertices, np.tile(_unit(np.asarray(normal, float)), (count + 1, 1)), flat[:, axes], faces)


def extrude(outline: ArrayLike, height: float, centre: ArrayLike = (0.0, 0.0)) -> Surface:
    """Raise a polygon from z = 0 to ``height`` [m].

    Args:
        outline: ``(N, 2)`` corners [m], counter-clockwise.
        height: along z [m].
        centre: ``(2,)`` a point that sees every corner, from which the two caps are fanned.
    """
    corners = np.asarray(outline, float)
    following = np.roll(corners, -1, 0)
    edge = following - corners
    outward = _unit(np.stack([edge[:, 1], -edge[:, 0]], 1))
    count = len(corners)
    quad = np.stack([corners, following, following, corners], 1)
    z = np.broadcast_to(np.array([0.0, 0.0, height, height]), (count, 4))
    vertices = np.concatenate([quad, z[..., None]], -1).reshape(-1, 3)
    normals = np.repeat(np.concatenate([outward, np.zeros((count, 1))], 1), 4, 0)
    texcoords = np.tile([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], (count, 1))
    first = 4 * np.arange(count)
    faces = np.concatenate([np.stack([first, first + 1, first + 2], 1), np.stack([first, first + 2, first + 3], 1)])
    surface = Surface(vertices, normals, texcoords, faces)
    middle = np.asarray(centre, float)
    for level, normal in ((0.0, -1.0), (height, 1.0)):
        rim = np.concatenate([corners, np.full((count, 1), level)], 1)
        surface = surface.joined(_fan(rim, np.array([*middle, level]), np.array([0.0, 0.0, normal])))
    return surface


def box(half_extents: ArrayLike) -> Surface:
    """A cuboid about the origin; each side carries the whole texture."""
    half = np.asarray(half_extents, float)
    vertices: list[NDArray[np.float64]] = []
    normals, texcoords, faces = [], [], []
    for axis in range(3):
        u, v = (axis + 1) % 3, (axis + 2) % 3
        for sign in (-1.0, 1.0):
            corner = np.zeros((4, 3))
            corner[:, axis] = sign * half[axis]
            corner[:, u] = np.array([-1.0, 1.0, 1.0, -1.0]) * half[u] * sign
            corner[:, v] = np.array([-1.0, -1.0, 1.0, 1.0]) * half[v]
            normal = np.zeros((4, 3))
            normal[:, axis] = sign
            start = 4 * len(vertices)
            vertices.append(corner)
            normals.append(normal)
            texcoords.append(np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
            faces.append(np.array([[0, 1, 2], [0, 2, 3]]) + start)
    return Surface(np.concatenate(vertices), np.concatenate(normals), np.concatenate(texcoords), np.concatenate(faces))
