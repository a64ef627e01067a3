"""Groups of devices that communicate with each other, and the mesh axes that make the same groups.

Devices are numbered as in `Mesh`: in row-major order over the axes, the first axis slowest.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from math import prod

import numpy as np
from numpy.typing import NDArray

Groups = tuple[tuple[int, ...], ...]
_GROUPS = "groups of "


def axes_of_groups(groups: Groups, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The fewest axes of a mesh of these sizes that make the groups, in mesh order; None when no set of axes does."""
    mesh = np.arange(prod(sizes)).reshape(sizes)
    wanted = {frozenset(group) for group in groups}
    real = [axis for axis, size in enumerate(sizes) if size > 1]
    for count in range(len(real) + 1):
        for chosen in combinations(real, count):
            if {frozenset(group) for group in along(mesh, list(chosen))} == wanted:
                return chosen
    return None


def crossed_axes(groups: Iterable[tuple[int, ...]], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Axes along which devices of one group differ; groups of two may be the source and the target of a permute."""
    crossed: set[int] = set()
    for group in groups:
        for other in group[1:]:
            place = np.unravel_index(group[0], sizes)
            there = np.unravel_index(other, sizes)
            crossed.update(axis for axis in range(len(sizes)) if place[axis] != there[axis])
    return tuple(sorted(crossed))


def along(mesh: NDArray[np.int64], axes: list[int]) -> Groups:
    """The groups of devices that differ only in their coordinates on `axes`."""
    rest = [axis for axis in range(mesh.ndim) if axis not in axes]
    size = prod(mesh.shape[axis] for axis in axes)
    return as_groups(mesh.transpose([*rest, *axes]).reshape(-1, size))


def as_groups(rows: NDArray[np.int64]) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in rows)


def groups_name(devices: int) -> str:
    """A name that replaces axes for groups of this size that no mesh axes make."""
    return f"{_GROUPS}{devices}"


def is_groups_name(name: str) -> bool:
    return name.startswith(_GROUPS)


def group_size(axes: Iterable[str], sizes: dict[str, int]) -> int:
    """Number of devices that communicate over these axes (name -> size), or in groups with such a name."""
    return prod(int(axis[len(_GROUPS) :]) if is_groups_name(axis) else sizes.get(axis, 1) for axis in axes)
