"""Replica groups of collectives, and source-target pairs of permutes.

In: mesh axis sizes and shardings. Out: device numbers; devices are numbered in mesh order, the last axis
fastest.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toast_cli.plan.sharding import Sharding

Table = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """`handle` (an ir.Value) is each device's shard of an array with `sharding`.

    If `partial` names mesh axes, it is a partial result, to be reduced over these with `reducer`.
    """

    handle: Any
    sharding: Sharding
    partial: tuple[int, ...] = ()
    reducer: str = "add"


@lru_cache(maxsize=10_000)
def coordinates(sizes: tuple[int, ...]) -> Table:
    """[devices, axes] coordinates of each device on the mesh."""
    return np.stack(np.unravel_index(np.arange(prod(sizes)), sizes), axis=-1) if sizes else np.zeros((1, 0), np.int64)


def places(axes: tuple[int, ...], sizes: tuple[int, ...]) -> Table:
    """[devices] index of each device's piece of a dimension that `axes` split, major to minor."""
    place = np.zeros(prod(sizes), np.int64)
    for axis in axes:
        place = place * sizes[axis] + coordinates(sizes)[:, axis]
    return place


@lru_cache(maxsize=10_000)
def groups(axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that differ along `axes` only, in the order in which these split a dimension."""
    devices = np.arange(prod(sizes)).reshape(sizes)
    rest = [axis for axis in range(len(sizes)) if axis not in axes]
    table = devices.transpose(*rest, *axes).reshape(-1, prod(sizes[a] for a in axes))
    return tuple(tuple(int(device) for device in row) for row in table)


@lru_cache(maxsize=10_000)
def senders(source: Sharding, target: Sharding, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(sender, receiver) for each device as receiver: each gets its piece in `target` from a device that has it in
    `source`.

    Every piece of `target` must be within one of `source`, and both must have equally many copies. A device that has
    its piece already sends it to itself.
    """
    coarse = [places(axes, sizes) for axes in source]
    fine = [places(axes, sizes) for axes in target]
    ratio = [_parts(b, sizes) // _parts(a, sizes) for a, b in zip(source, target, strict=True)]
    holders: dict[tuple[int, ...], list[int]] = defaultdict(list)
    wanting: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for device in range(prod(sizes)):
        holders[tuple(int(p[device]) for p in coarse)].append(device)
        wanting[tuple(int(p[device]) // r for p, r in zip(fine, ratio, strict=True))].append(device)
    pairs = []
    for piece, receivers in wanting.items():
        own = set(holders[piece]) & set(receivers)
        pairs += [(device, device) for device in own]
        rest = ([d for d in devices if d not in own] for devices in (holders[piece], receivers))
        pairs += zip(*rest, strict=True)
    return tuple(sorted(pairs, key=lambda pair: pair[1]))


def _parts(axes: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    return prod(sizes[axis] for axis in axes)
