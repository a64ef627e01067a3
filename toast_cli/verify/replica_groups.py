"""Finds the mesh axes of a collective from the replica groups in its HLO text.

Enters: the attributes of one instruction as text. Leaves: groups of device numbers, and the mesh axes that make the
same groups. Groups are written `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)`, or `mesh['axis_0'=4,'axis_1'=2] {'axis_0'}` with
an optional `device_ids=([4,2]T(1,0))`.
"""

from __future__ import annotations

import re
from math import prod

import numpy as np
from numpy.typing import NDArray

from toast_cli.hardware.device_groups import (
    Groups,
    along,
    as_groups,
    axes_of_groups,
    crossed_axes,
    groups_name,
    is_groups_name,
)

UNKNOWN = ("?",)

_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_BRACED = re.compile(r"\{([\d,]+)\}")


def groups_in(attributes: str, devices: int) -> Groups | None:
    """Groups of device numbers that communicate; an empty list means all devices. None if none can be read."""
    listed = _LISTS.search(attributes)
    if listed:
        groups = tuple(tuple(numbers(group)) for group in _BRACED.findall(listed[1]))
        return groups or (tuple(range(devices)),)
    iota = _IOTA.search(attributes)
    if iota:
        return as_groups(dealt(iota[2], iota[3]).reshape(numbers(iota[1])))
    mesh = _MESH.search(attributes)
    if mesh:
        axes = _MESH_AXIS.findall(mesh[1])
        sizes = [int(size) for _, size in axes]
        order = dealt(mesh[2], mesh[3]) if mesh[2] else np.arange(prod(sizes))
        chosen = [k for k, (name, _) in enumerate(axes) if f"'{name}'" in mesh[4]]
        return along(order.reshape(sizes), chosen)
    return None


def axes_of(groups: Groups, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]) -> tuple[str, ...]:
    """The fewest mesh axes that make these groups, in mesh order. If no set of axes does, the size of the groups, or
    `UNKNOWN` if their sizes differ."""
    chosen = axes_of_groups(groups, axis_sizes)
    if chosen is not None:
        return tuple(axis_names[axis] for axis in chosen)
    counts = {len(group) for group in groups}
    return (groups_name(counts.pop()),) if len(counts) == 1 else UNKNOWN


def are_axes(found: tuple[str, ...]) -> bool:
    """True if these are mesh axes, and not a group size: groups of one size need not have the same devices."""
    return found != UNKNOWN and not any(is_groups_name(name) for name in found)


def permuted_axes(attributes: str, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]) -> tuple[str, ...]:
    """The mesh axes along which a collective-permute moves data."""
    found = _PAIRS.search(attributes)
    pairs = [tuple(numbers(pair)) for pair in _BRACED.findall(found[1])] if found else []
    return tuple(axis_names[axis] for axis in crossed_axes(pairs, axis_sizes))


def dealt(dimensions: str, order: str | None) -> NDArray[np.int64]:
    """`[4,2]T(1,0)`: devices 0 to 7 counted through a 4 x 2 grid column by column."""
    shape = numbers(dimensions)
    grid = np.arange(prod(shape)).reshape(shape)
    return (grid.transpose(numbers(order)) if order else grid).reshape(-1)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
