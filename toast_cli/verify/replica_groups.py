"""Finds the mesh axes of a collective from the replica groups in its HLO text.

In: the attributes of one instruction as text. Out: groups of device numbers, and the mesh axes that make the
same groups. Groups are written `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)`, or `mesh['axis_0'=4,'axis_1'=2] {'axis_0'}` with
an optional `device_ids=([4,2]T(1,0))`. A program for several TPU slices names the devices of one slice, and all slices
do alike; transfers between slices have a `_xla_megascale_target`: `"{1,2}x{0:15}"` (slices, devices of each), or
`{{100000,200000},…}`, where 200003 is device 3 of the second slice.
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
_BETWEEN_SLICES = re.compile(r"_xla_megascale_target=(.*?),_xla_megascale")
_ALL_OF_SLICES = re.compile(r'"(.*)x\{0:(\d+)\}"')
_SLICE = 100_000  # the number of a device in its slice, plus this much for each slice, counted from 1


def groups_in(attributes: str, devices: int) -> Groups | None:
    """Groups of device numbers that communicate; an empty list means all devices. None if none can be read."""
    groups = _groups_written(attributes, devices)
    named = 1 + max((max(group) for group in groups or ()), default=0)
    if groups is None or devices % named:
        return groups
    return tuple(tuple(start + device for device in group) for start in range(0, devices, named) for group in groups)


def _groups_written(attributes: str, devices: int) -> Groups | None:
    between = _BETWEEN_SLICES.search(attributes)
    if between:
        return _between_slices(between[1], devices)
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


def _between_slices(target: str, devices: int) -> Groups:
    """The groups of a transfer between slices."""
    whole = _ALL_OF_SLICES.search(target)
    groups = [numbers(group) for group in _BRACED.findall(whole[1] if whole else target.replace("->", ","))]
    if whole:
        inside = 1 + int(whole[2])
        return tuple(tuple((s - 1) * inside + device for s in group) for group in groups for device in range(inside))
    inside = devices // max(number // _SLICE for group in groups for number in group)
    return tuple(tuple((n // _SLICE - 1) * inside + n % _SLICE for n in group) for group in groups)


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
    between, found = _BETWEEN_SLICES.search(attributes), _PAIRS.search(attributes)
    pairs = [tuple(numbers(pair)) for pair in _BRACED.findall(found[1])] if found else []
    if between:
        pairs = list(_between_slices(between[1], prod(axis_sizes)))
    return tuple(axis_names[axis] for axis in crossed_axes(pairs, axis_sizes))


def dealt(dimensions: str, order: str | None) -> NDArray[np.int64]:
    """`[4,2]T(1,0)`: devices 0 to 7 counted through a 4 x 2 grid column by column."""
    shape = numbers(dimensions)
    grid = np.arange(prod(shape)).reshape(shape)
    return (grid.transpose(numbers(order)) if order else grid).reshape(-1)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
