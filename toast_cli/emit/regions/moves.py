"""Reshards shards and completes partial ones, with explicit slices and collectives; halo exchanges; replica groups.

The steps are those that `plan.reshard` lists, so the written program matches the plan's cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toast_cli.plan.partials import ALL_REDUCE, REDUCE_SCATTER
from toast_cli.plan.partitioned import Collective
from toast_cli.plan.reshard import EXCHANGE, GATHER, SLICE, Permute, route, ways_of
from toast_cli.plan.sharding import Sharding, refines, shards
from toast_cli.xla import ir
from toast_cli.xla.build import INDEX, Builder


class Scopes:
    """Values that are made once and reused later in the same block, or in blocks within it."""

    def __init__(self) -> None:
        self._blocks: list[dict[Hashable, Any]] = [{}]

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of a key; `make` makes it in this block if it does not exist yet."""
        for block in self._blocks:
            if key in block:
                return block[key]
        value = self._blocks[-1][key] = make()
        return value

    @contextmanager
    def within(self, *, alone: bool = False) -> Iterator[None]:
        """Opens an inner block while the `with` block runs; `alone`: it cannot reuse outer values."""
        before = self._blocks
        self._blocks = [{}] if alone else [*before, {}]
        try:
            yield
        finally:
            self._blocks = before


@dataclass
class Devices:
    """Values that depend on the partition id, computed once at the start of the program.

    Attributes:
        build: makes operations. sizes: of the mesh axes. start: the operation in front of which the values are
            computed.
    """

    build: Builder
    sizes: tuple[int, ...]
    start: Any
    _numbers: dict[object, Any] = field(default_factory=dict)

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """A value that is computed at the start of the program, on the first request."""
        if key not in self._numbers:
            with self.build.at(ir.InsertionPoint(self.start)):
                self._numbers[key] = make()
        return self._numbers[key]

    def constant(self, value: float, dtype: str = INDEX) -> Any:
        return self.once((dtype, value), lambda: self.build.constant(value, dtype))

    def own(self) -> Any:
        """The partition id."""
        return self.once(
            "own", lambda: self.build.convert(self.build.one("partition_id", [], self.build.type("ui32", ())), INDEX)
        )

    def lookup(self, table: tuple[int, ...]) -> Any:
        """The entry of this device in a table with one entry per device."""
        if len(set(table)) == 1:
            return self.constant(table[0])

        def make() -> Any:
            row = self.build.dynamic_slice(self.build.numbers(table), [self.own()], (1,))
            return self.build.reshape(row, ())

        return self.once(table, make)

    def offset(self, axes: tuple[int, ...], length: int) -> Any:
        """Start of this device's piece along a dimension that `axes` split into pieces of `length`."""
        return self.lookup(tuple(int(place) * length for place in places(axes, self.sizes)))

    def on_first(self, axes: tuple[int, ...], value: Any, otherwise: Any) -> Any:
        """`value` on the first device along `axes`, `otherwise` on the others."""
        first = self.build.compare("EQ", self.offset(axes, 1), self.constant(0))
        return self.build.select(first, value, otherwise)


class Mover:
    """Writes reshards and reductions at the builder's insertion point."""

    def __init__(self, build: Builder, devices: Devices) -> None:
        self.build, self.devices, self._sizes = build, devices, devices.sizes

    def to(self, piece: Piece, target: Sharding, shape: tuple[int, ...], scopes: Scopes | None = None) -> Piece:
        """Reshards a complete piece, of an array of `shape`, to `target`. scopes: reshards with a common prefix share
        it, up to a sharding that both go through, as in `plan.reshard`."""
        handle, sharding = piece.handle, piece.sharding
        steps = route(sharding, target, self._sizes, shape)
        shared = scopes or Scopes()
        for k, ((step, to), way) in enumerate(zip(steps, ways_of(steps), strict=True)):
            if step.kind == SLICE:
                if k + 1 == len(steps) or steps[k + 1][0].kind != SLICE:
                    handle, sharding = shared.get((piece.handle, way), partial(self._slice, handle, sharding, to)), to
                continue
            handle = shared.get((piece.handle, way), partial(self._move, handle, step.kind, step.axes, sharding, to))
            sharding = to
        return Piece(handle, sharding)

    def reduce(self, piece: Piece, steps: Iterable[Collective]) -> Piece:
        """Applies a plan's collectives to a partial piece; it stays partial over all other axes."""
        for step in steps:
            if not set(step.axes) <= set(piece.partial):
                continue
            sharding, to = piece.sharding, step.after
            left = tuple([axis for axis in piece.partial if axis not in step.axes])
            scattered = (
                step.kind == REDUCE_SCATTER and to is not None and step.before == sharding and refines(to, sharding)
            )
            if scattered and to is not None:
                more = [axes[len(have) :] for have, axes in zip(sharding, to, strict=True)]
                handle = self._scatter(piece, more)
                piece = Piece(handle, to, left, piece.reducer)
            elif step.kind == ALL_REDUCE:
                piece = Piece(self._all_reduce(piece, step.axes), sharding, left, piece.reducer)
        return piece

    def all_reduced(self, piece: Piece) -> Piece:
        """All-reduces a partial piece over all its axes."""
        return Piece(self._all_reduce(piece, piece.partial), piece.sharding) if piece.partial else piece

    def _all_reduce(self, piece: Piece, axes: tuple[int, ...]) -> Any:
        return self.build.all_reduce(piece.handle, piece.reducer, groups(tuple(sorted(axes)), self._sizes))

    def _scatter(self, piece: Piece, more: list[tuple[int, ...]]) -> Any:
        """One reduce-scatter; more: [dimensions] the further axes that split each.

        For several dimensions, the pieces are first stacked along one.
        """
        build, handle, over = self.build, piece.handle, groups(sum(more, ()), self._sizes)
        dims = [dim for dim, axes in enumerate(more) if axes]
        if len(dims) == 1:
            return build.reduce_scatter(handle, piece.reducer, dims[0], over)
        parted: list[int] = []  # each dimension as (number of pieces, their length)
        for dim, length in enumerate(handle.type.shape):
            parts = shards((more[dim],), self._sizes)
            parted += [parts, length // parts]
        blocks = build.reshape(handle, tuple(parted))
        rank = len(more)
        order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
        lengths = tuple(parted[1::2])
        row = build.reshape(build.transpose(blocks, order), (len(over[0]), *lengths))
        return build.reshape(build.reduce_scatter(row, piece.reducer, 0, over), lengths)

    def _slice(self, handle: Any, source: Sharding, target: Sharding) -> Any:
        """Slices this device's part of its piece."""
        starts, shape = [], list(handle.type.shape)
        for dim, (have, want) in enumerate(zip(source, target, strict=True)):
            more = want[len(have) :]
            shape[dim] //= shards((more,), self._sizes)
            starts.append(self.devices.offset(more, shape[dim]) if more else self.devices.constant(0))
        return self.build.dynamic_slice(handle, starts, tuple(shape))

    def _move(self, handle: Any, kind: str, axes: tuple[int, ...], source: Sharding, target: Sharding) -> Any:
        if kind == GATHER:
            (dim,) = (d for d, (a, b) in enumerate(zip(source, target, strict=True)) if a != b)
            return self.build.all_gather(handle, dim, groups(axes, self._sizes))
        if kind == EXCHANGE:
            longer = [len(b) > len(a) for a, b in zip(source, target, strict=True)]
            shorter = [len(b) < len(a) for a, b in zip(source, target, strict=True)]
            return self.build.all_to_all(handle, longer.index(True), shorter.index(True), groups(axes, self._sizes))
        return self._permute(handle, source, target)

    def _permute(self, handle: Any, source: Sharding, target: Sharding) -> Any:
        """A collective-permute: each device receives its piece from one that has it, or has a
        larger piece around it."""
        pairs = senders(source, target, self._sizes)
        receiver = dict(pairs)
        shape, starts = list(handle.type.shape), []
        for dim, (have, want) in enumerate(zip(source, target, strict=True)):
            parts = shards((want,), self._sizes) // shards((have,), self._sizes)
            shape[dim] //= parts
            place = places(want, self._sizes)
            table = tuple(int(place[receiver[device]]) % parts * shape[dim] for device in range(len(place)))
            starts.append(self.devices.lookup(table))
        if tuple(shape) != tuple(handle.type.shape):
            handle = self.build.dynamic_slice(handle, starts, tuple(shape))
        return self.build.permute(handle, pairs)


# ---------------------------------------------------------------- halo exchange
# Each device gets a range of a sharded array that may extend into other devices' shards.
# Device k of n needs `length` elements from `begin + k * pitch` on along a dimension; it has `elements / n` of them.
# The missing ones come in the collective permutes that `plan.reshard` lists.

Range = tuple[int, int]  # from, to (excluded)


@dataclass(frozen=True, slots=True)
class NeededRange:
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


def exchange(build: Builder, devices: Devices, handle: Any, need: NeededRange, sent: Sequence[Permute]) -> Any:
    """The range, from shards that are split by `need.axes`, by the permutes `sent`; zeros
    beyond the ends of the array."""
    members = groups(need.axes, devices.sizes)
    shards = len(members[0])
    own = need.elements // shards
    parts = []
    for permute in [p for p in sent if p.pairs]:
        pairs = [(group[sender], group[receiver]) for group in members for sender, receiver in permute.pairs]
        part = build.permute(build.slice_dim(handle, need.dim, permute.first, permute.last), pairs)
        parts.append(ShardRange(part, permute.first, permute.last, {to: sender for sender, to in permute.pairs}))
    reach = [overlap(need.span(k), k * own, own) for k in range(shards)]
    reached = [(first, last) for first, last in reach if first < last]
    if reached:
        first, last = min(first for first, _ in reached), max(last for _, last in reached)
        own_part = build.slice_dim(handle, need.dim, first, last)
        parts.append(ShardRange(own_part, first, last, {k: k for k in range(shards)}))
    if not parts:
        return nothing_like(build, handle, need.dim, need.length)
    row = sorted_parts(parts, own)
    return concatenated_range(build, devices, row, need, own) if row else masked_range(build, devices, parts, need, own)


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Elements [first, last) of a shard. of: device -> the device whose shard it is, as indices along the axes; devices
    that are not in it have nothing."""

    handle: Any
    first: int
    last: int
    of: dict[int, int]


def sorted_parts(parts: list[ShardRange], own: int) -> list[tuple[int, ShardRange]]:
    """The parts sorted along the dimension, each with its begin relative to the device's own shard; empty if this
    differs between devices, or if parts overlap."""
    row = []
    for part in parts:
        away = {sender - to for to, sender in part.of.items()}
        if len(away) != 1:
            return []
        row.append((away.pop() * own + part.first, part))
    row.sort(key=lambda entry: entry[0])
    ends = [begin + part.last - part.first for begin, part in row]
    return row if all(end <= begin for end, (begin, _) in zip(ends, row[1:], strict=False)) else []


def concatenated_range(
    build: Builder, devices: Devices, row: list[tuple[int, ShardRange]], need: NeededRange, own: int
) -> Any:
    """Concatenates sorted parts and slices the range from them."""
    shards = len(groups(need.axes, devices.sizes)[0])
    begins = [need.first(k) - k * own for k in range(shards)]
    start, end = row[0][0], row[-1][0] + row[-1][1].last - row[-1][1].first
    handles: list[Any] = []
    position = min(*begins, start)
    for begin, part in row:
        if begin > position:
            handles.append(nothing_like(build, part.handle, need.dim, begin - position))
        handles.append(part.handle)
        position = begin + part.last - part.first
    if (beyond := max(begins) + need.length) > end:
        handles.append(nothing_like(build, row[0][1].handle, need.dim, beyond - end))
    table = tuple(begins[int(k)] - min(*begins, start) for k in places(need.axes, devices.sizes))
    return cut(build, devices, build.concatenate(handles, need.dim), need, table)


def masked_range(build: Builder, devices: Devices, parts: list[ShardRange], need: NeededRange, own: int) -> Any:
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
        placed = cut(build, devices, build.pad(part.handle, zero, low, low), need, tuple(begins))
        bounds = [build.broadcast(devices.lookup(tuple(table)), (need.length,)) for table in (firsts, lasts)]
        inside = build.binary("and", build.compare("GE", count, bounds[0]), build.compare("LT", count, bounds[1]))
        stretch = build.select(build.broadcast(inside, shape, [need.dim]), placed, stretch)
    return stretch


def nothing_like(build: Builder, handle: Any, dim: int, length: int) -> Any:
    """Zeros of an array's shape, except for this length along one dimension."""
    shape = list(handle.type.shape)
    shape[dim] = length
    return build.broadcast(build.constant(0, str(handle.type.element_type)), tuple(shape))


def overlap(span: Range, begin: int, length: int) -> Range:
    """The part of a span that is within a piece, relative to the begin of the piece."""
    return max(span[0] - begin, 0), min(span[1] - begin, length)


def from_whole(build: Builder, devices: Devices, handle: Any, need: NeededRange) -> Any:
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


def cut(build: Builder, devices: Devices, handle: Any, need: NeededRange, table: tuple[int, ...]) -> Any:
    """Slices `need.length` elements at offsets from a table [devices]."""
    shape = list(handle.type.shape)
    if len(set(table)) == 1:
        return build.slice_dim(handle, need.dim, table[0], table[0] + need.length)
    starts = [devices.constant(0)] * len(shape)
    starts[need.dim] = devices.lookup(table)
    shape[need.dim] = need.length
    return build.dynamic_slice(handle, starts, tuple(shape))


def filled(build: Builder, devices: Devices, handle: Any, need: NeededRange, fill: Any) -> Any:
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


# ---------------------------------------------------------------- replica groups and pairs of permutes

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
