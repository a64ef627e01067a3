"""GSPMD shardings in XLA's notation, read and translated to mesh axes.

`{devices=[4,1,2]<=[8] last_tile_dim_replicate}` says: dimension 0 in four parts, dimension 1 whole, each part on two
devices, devices 0 to 7 dealt out in that order (`<=[4,2]T(1,0)`: counted through a 4 x 2 grid column by column).
Notation: openxla.org/xla and xla/hlo/ir/hlo_sharding.cc.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from math import prod

import numpy as np
from numpy.typing import NDArray

from toast_cli.inputs import whole_number

# More devices than any machine has. A sharding over more counts as unreadable.
MOST_DEVICES = 1 << 20
REPLICATED, MAXIMAL, MANUAL, TILED = "replicated", "maximal", "manual", "tiled"

_TILES = re.compile(r"devices=\[([\d,]+)\]")
_IOTA = re.compile(r"<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LIST = re.compile(r"devices=\[[\d,]+\]([\d,]+)")
_LAST_TILES = re.compile(r"last_tile_dims=\{([^}]*)\}")


@dataclass(frozen=True, eq=False)
class TileAssignment:
    """One sharding. For `tiled`: `devices` [*tiles, copies] are device numbers, `tiles` the parts per array dimension.
    `by_hand` [parts, devices of each] groups them by position along the manual axes (in a region that is manual over
    some axes); None outside."""

    kind: str
    tiles: tuple[int, ...] = ()
    devices: NDArray[np.int64] | None = None
    by_hand: NDArray[np.int64] | None = None


def split_shardings(text: str) -> list[str]:
    """The shardings in one attribute: `{{replicated}, {maximal device=0}}` has two, anything else is one."""
    inner = text.strip()[1:-1].strip()
    if not inner.startswith("{"):
        return [text.strip()]
    parts, depth, start = [], 0, 0
    for at, character in enumerate(inner):
        if character == "{":
            start = at if depth == 0 else start
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                parts.append(inner[start : at + 1])
    return parts


def read_tiling(text: str) -> TileAssignment | None:
    """One sharding; None when it is in a notation not known here."""
    body = text.strip()
    for kind in (REPLICATED, MAXIMAL, MANUAL):
        if body.startswith("{" + kind):
            return TileAssignment(kind)
    shape = _TILES.search(body)
    if not shape:
        return None
    sizes = _numbers(shape[1])
    if not 0 < prod(sizes) <= MOST_DEVICES:
        return None
    devices = _devices(body, prod(sizes))
    if devices is None:
        return None
    last = _LAST_TILES.search(body)
    kinds = [kind.strip() for kind in last[1].split(",")] if last else []
    extra = len(kinds) or int("last_tile_dim_replicate" in body)
    if extra > len(sizes) or any(kind not in (REPLICATED, MANUAL) for kind in kinds):
        return None
    tiles = sizes[: len(sizes) - extra]
    return TileAssignment(TILED, tiles, devices.reshape((*tiles, -1)), _by_hand(devices.reshape(sizes), kinds))


def _by_hand(devices: NDArray[np.int64], kinds: list[str]) -> NDArray[np.int64] | None:
    """[parts of the manual dimensions, devices of each] numbers. kinds: of the last dimensions;
    None if none is manual."""
    first = devices.ndim - len(kinds)
    manual = [first + k for k, kind in enumerate(kinds) if kind == MANUAL]
    if not manual:
        return None
    rest = [d for d in range(devices.ndim) if d not in manual]
    return devices.transpose(manual + rest).reshape(prod(devices.shape[d] for d in manual), -1)


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers in a comma-separated list; 0, which is invalid, for a number with too many digits."""
    return tuple(whole_number(number) or 0 for number in text.split(",") if number)


def _devices(body: str, count: int) -> NDArray[np.int64] | None:
    """Device numbers in the order of the tiles; None when there are not exactly `count`."""
    iota = _IOTA.search(body)
    if iota:
        grid = _numbers(iota[1])
        order = _numbers(iota[2]) if iota[2] else tuple(range(len(grid)))
        if prod(grid) != count or sorted(order) != list(range(len(grid))):
            return None
        return np.arange(count, dtype=np.int64).reshape(grid).transpose(order).reshape(-1)
    listed = _LIST.search(body)
    numbers = np.array(_numbers(listed[1]) if listed else (), dtype=np.int64)
    return numbers if len(numbers) == count else None


def mesh_axes(
    tiling: TileAssignment, rank: int, names: tuple[str, ...], sizes: tuple[int, ...]
) -> tuple[tuple[str, ...], ...] | None:
    """The axes that split each dimension, major to minor, on a mesh in row-major device order; None when none do.

    Where several choices put every part on the same devices, the first in mesh order is taken.
    """
    if tiling.kind == REPLICATED:
        return ((),) * rank
    if tiling.kind != TILED or tiling.devices is None or len(tiling.tiles) != rank:
        return None
    if tiling.devices.size != prod(sizes):
        return None
    wanted = np.sort(tiling.devices, axis=-1)
    grid = np.arange(prod(sizes), dtype=np.int64).reshape(sizes)
    for choice in _choices(tiling.tiles, sizes, tuple(axis for axis, size in enumerate(sizes) if size > 1)):
        used = [axis for axes in choice for axis in axes]
        order = used + [axis for axis in range(len(sizes)) if axis not in used]
        dealt = np.sort(grid.transpose(order).reshape(wanted.shape), axis=-1)
        if np.array_equal(dealt, wanted):
            return tuple(tuple(names[axis] for axis in axes) for axes in choice)
    return None


def _choices(
    tiles: tuple[int, ...], sizes: tuple[int, ...], free: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every assignment of mesh axes to dimensions whose sizes multiply to the dimensions' numbers of parts."""
    if not tiles:
        yield ()
        return
    for length in range(len(free) + 1):
        for axes in permutations(free, length):
            if prod(sizes[axis] for axis in axes) == tiles[0]:
                rest = tuple(axis for axis in free if axis not in axes)
                for others in _choices(tiles[1:], sizes, rest):
                    yield (axes, *others)
