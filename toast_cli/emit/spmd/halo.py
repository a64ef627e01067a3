"""Halo exchange: gives each device a range of a sharded array that may extend into other devices' shards.

Device k of n needs `length` elements from `begin + k * pitch` on along a dimension; it has `elements / n` of them. The
missing ones come in the collective permutes that `plan.halo` lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toast_cli.emit.spmd.devices import groups, places
from toast_cli.emit.spmd.moves import Devices
from toast_cli.plan.halo import Permute
from toast_cli.xla.build import Builder

Range = tuple[int, int]  # from, to (excluded)


@dataclass(frozen=True, slots=True)
class Stretch:
    """The range that each device needs along dimension `dim`, of size `elements`: `length` elements from `begin + k *
    pitch` on, k its index along `axes`."""

    dim: int
    axes: tuple[int, ...]
    elements: int
    begin: int
    pitch: int
    length: int

    def first(self, k: int) -> int:
        return self.begin + k * self.pitch

    def span(self, k: int) -> Range:
        return self.first(k), self.first(k) + self.length

    def outside(self, shards: int) -> bool:
        """True if any device needs elements beyond the ends of the array."""
        ends = [self.first(k) for k in (0, shards - 1)]
        return min(ends) < 0 or max(ends) + self.length > self.elements


def exchange(build: Builder, devices: Devices, handle: Any, need: Stretch, sent: Sequence[Permute]) -> Any:
    """The range, from shards that are split by `need.axes`, by the permutes `sent`; zeros
    beyond the ends of the array."""
    members = groups(need.axes, devices.sizes)
    shards = len(members[0])
    own = need.elements // shards
    parts = []
    for permute in [one for one in sent if one.pairs]:
        pairs = [(group[sender], group[receiver]) for group in members for sender, receiver in permute.pairs]
        part = build.permute(build.slice_dim(handle, need.dim, permute.first, permute.last), pairs)
        parts.append(Part(part, permute.first, permute.last, {to: sender for sender, to in permute.pairs}))
    reach = [overlap(need.span(k), k * own, own) for k in range(shards)]
    kept = [(first, last) for first, last in reach if first < last]
    if kept:
        first, last = min(first for first, _ in kept), max(last for _, last in kept)
        here = build.slice_dim(handle, need.dim, first, last)
        parts.append(Part(here, first, last, {k: k for k in range(shards)}))
    if not parts:
        return nothing_like(build, handle, need.dim, need.length)
    row = in_a_row(parts, own)
    return joined(build, devices, row, need, own) if row else put_in(build, devices, parts, need, own)


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [first, last) of a shard. of: device -> the device whose shard it is, as indices along the axes; devices
    that are not in it have nothing."""

    handle: Any
    first: int
    last: int
    of: dict[int, int]


def in_a_row(parts: list[Part], own: int) -> list[tuple[int, Part]]:
    """The parts sorted along the dimension, each with its begin relative to the device's own shard; empty if this
    differs between devices, or if parts overlap."""
    found = []
    for part in parts:
        away = {sender - to for to, sender in part.of.items()}
        if len(away) != 1:
            return []
        found.append((away.pop() * own + part.first, part))
    found.sort(key=lambda one: one[0])
    ends = [begin + part.last - part.first for begin, part in found]
    return found if all(end <= begin for end, (begin, _) in zip(ends, found[1:], strict=False)) else []


def joined(build: Builder, devices: Devices, row: list[tuple[int, Part]], need: Stretch, own: int) -> Any:
    """Concatenates sorted parts and slices the range from them."""
    shards = len(groups(need.axes, devices.sizes)[0])
    begins = [need.first(k) - k * own for k in range(shards)]
    start, end = row[0][0], row[-1][0] + row[-1][1].last - row[-1][1].first
    handles: list[Any] = []
    at = min(*begins, start)
    for begin, part in row:
        if begin > at:
            handles.append(nothing_like(build, part.handle, need.dim, begin - at))
        handles.append(part.handle)
        at = begin + part.last - part.first
    if (beyond := max(begins) + need.length) > end:
        handles.append(nothing_like(build, row[0][1].handle, need.dim, beyond - end))
    table = tuple(begins[int(k)] - min(*begins, start) for k in places(need.axes, devices.sizes))
    return cut(build, devices, build.concatenate(handles, need.dim), need, table)


def put_in(build: Builder, devices: Devices, parts: list[Part], need: Stretch, own: int) -> Any:
    """Assembles the range from parts whose offsets differ between devices."""
    stretch = nothing_like(build, parts[0].handle, need.dim, need.length)
    shape = tuple(stretch.type.shape)
    zero = build.constant(0, str(stretch.type.element_type))
    low = [need.length if dim == need.dim else 0 for dim in range(len(shape))]
    count = build.iota("i32", (need.length,), 0)
    device_places = [int(k) for k in places(need.axes, devices.sizes)]
    for part in parts:
        begins, firsts, lasts = [], [], []  # of the part, and of its useful elements, in the range
        for k in device_places:
            sender = part.of.get(k)
            first, last = (0, 0) if sender is None else overlap(need.span(k), sender * own, own)
            origin = 0 if sender is None else sender * own - need.first(k)
            begins.append(need.length - origin - part.first if last > first else 0)
            firsts.append(origin + first)
            lasts.append(origin + max(first, last))
        at = cut(build, devices, build.pad(part.handle, zero, low, low), need, tuple(begins))
        bounds = [build.broadcast(devices.lookup(tuple(table)), (need.length,)) for table in (firsts, lasts)]
        inside = build.binary("and", build.compare("GE", count, bounds[0]), build.compare("LT", count, bounds[1]))
        stretch = build.select(build.broadcast(inside, shape, [need.dim]), at, stretch)
    return stretch


def nothing_like(build: Builder, handle: Any, dim: int, length: int) -> Any:
    """Zeros of an array's shape, except for this length along one dimension."""
    shape = list(handle.type.shape)
    shape[dim] = length
    return build.broadcast(build.constant(0, str(handle.type.element_type)), tuple(shape))


def overlap(span: Range, begin: int, length: int) -> Range:
    """The part of a span that is within a piece, relative to the begin of the piece."""
    return max(span[0] - begin, 0), min(span[1] - begin, length)


def from_whole(build: Builder, devices: Devices, handle: Any, need: Stretch) -> Any:
    """The range from a replicated array; zeros beyond its ends."""
    shards = len(groups(need.axes, devices.sizes)[0])
    ends = [need.first(k) for k in (0, shards - 1)]
    low, high = [0] * handle.type.rank, [0] * handle.type.rank
    low[need.dim] = max(0, -min(ends))
    high[need.dim] = max(0, max(ends) + need.length - need.elements)
    if low[need.dim] or high[need.dim]:
        handle = build.pad(handle, build.constant(0, str(handle.type.element_type)), low, high)
    table = tuple(need.first(int(k)) + low[need.dim] for k in places(need.axes, devices.sizes))
    return cut(build, devices, handle, need, table)


def cut(build: Builder, devices: Devices, handle: Any, need: Stretch, table: tuple[int, ...]) -> Any:
    """Slices `need.length` elements at offsets from a table [devices]."""
    shape = list(handle.type.shape)
    if len(set(table)) == 1:
        return build.slice_dim(handle, need.dim, table[0], table[0] + need.length)
    starts = [devices.constant(0)] * len(shape)
    starts[need.dim] = devices.lookup(table)
    shape[need.dim] = need.length
    return build.dynamic_slice(handle, starts, tuple(shape))


def filled(build: Builder, devices: Devices, handle: Any, need: Stretch, fill: Any) -> Any:
    """Replaces elements beyond the ends of the array by `fill`."""
    if not need.outside(len(groups(need.axes, devices.sizes)[0])):
        return handle
    shape = tuple(handle.type.shape)
    first = devices.lookup(tuple(need.first(int(k)) for k in places(need.axes, devices.sizes)))
    place = build.binary("add", build.iota("i32", (need.length,), 0), build.broadcast(first, (need.length,)))
    from_start = build.compare("GE", place, build.constant(0, "i32", (need.length,)))
    to_end = build.compare("LT", place, build.constant(need.elements, "i32", (need.length,)))
    inside = build.broadcast(build.binary("and", from_start, to_end), shape, [need.dim])
    return build.select(inside, handle, build.broadcast(fill, shape))
