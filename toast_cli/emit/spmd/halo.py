"""A stretch of a split array for each device, which may reach into what others have.

Device k of n needs elements `begin + k * pitch` and `length` more of a dimension; it has `elements / n` of them. What
is missing comes in collective permutes, one for each neighbour near or far, as wide as the widest part that anybody
needs of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toast_cli.emit.spmd.build import Builder
from toast_cli.emit.spmd.devices import groups, places
from toast_cli.emit.spmd.moves import Devices

Range = tuple[int, int]  # from, to (excluded)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What each device needs along dimension `dim`, of `elements` in all: `length` from `begin + k * pitch` on, k
    its place along `axes`."""

    dim: int
    axes: tuple[int, ...]
    elements: int
    begin: int
    pitch: int
    length: int

    def first(self, k: int) -> int:
        return self.begin + k * self.pitch

    def outside(self, shards: int) -> bool:
        """Whether any device needs what is beyond the ends of the array."""
        ends = [self.first(k) for k in (0, shards - 1)]
        return min(ends) < 0 or max(ends) + self.length > self.elements


def exchange(build: Builder, devices: Devices, handle: Any, need: Stretch, fill: Any, *, zero: bool) -> Any:
    """The stretch from pieces that are split by `need.axes`; beyond the ends of the array there is `fill`, which
    `zero` says is 0."""
    members = groups(need.axes, devices.sizes)
    shards = len(members[0])
    own = need.elements // shards
    spans = [(need.first(k), need.first(k) + need.length) for k in range(shards)]
    nearest = min(first // own - k for k, (first, _) in enumerate(spans))
    farthest = max((last - 1) // own - k for k, (_, last) in enumerate(spans))
    parts, start = [], 0
    for away in range(nearest, farthest + 1):
        reach = [overlap(span, (k + away) * own, own) for k, span in enumerate(spans)]
        held = (
            0 if away > nearest else min(a for a, b in reach if b > a),
            own if away < farthest else max(b for a, b in reach if b > a),
        )
        if away == nearest:
            start = nearest * own + held[0]
        parts.append(
            part_of_neighbour(
                build,
                handle,
                need,
                away,
                held,
                [r for k, r in enumerate(reach) if 0 <= k + away < shards and r[1] > r[0]],
                members,
                fill,
            )
        )
    around = build.concatenate(parts, need.dim)
    table = tuple(need.first(int(k)) - int(k) * own - start for k in places(need.axes, devices.sizes))
    found = cut(build, devices, around, need, table)
    return found if zero or not need.outside(shards) else filled(build, devices, found, need, fill)


def overlap(span: Range, begin: int, length: int) -> Range:
    """The part of a span that lies in a piece, counted from where the piece begins."""
    return max(span[0] - begin, 0), min(span[1] - begin, length)


def part_of_neighbour(
    build: Builder, handle: Any, need: Stretch, away: int, held: Range, wanted: list[Range], members: Any, fill: Any
) -> Any:
    """Elements `held` of the piece of the device so many places further on; what nobody needs of it is `fill`."""
    if away == 0:
        return build.slice_dim(handle, need.dim, *held)
    low, high = (min(a for a, _ in wanted), max(b for _, b in wanted)) if wanted else (held[0], held[0])
    shape = list(handle.type.shape)
    if not wanted:
        shape[need.dim] = held[1] - held[0]
        return build.broadcast(build.convert(fill, str(handle.type.element_type)), tuple(shape))
    count = len(members[0])
    pairs = [(group[k + away], group[k]) for group in members for k in range(count) if 0 <= k + away < count]
    sent = build.permute(build.slice_dim(handle, need.dim, low, high), pairs)
    if (low, high) == held:
        return sent
    before, behind = [0] * len(shape), [0] * len(shape)
    before[need.dim], behind[need.dim] = low - held[0], held[1] - high
    return build.pad(sent, fill, before, behind)


def from_whole(build: Builder, devices: Devices, handle: Any, need: Stretch, fill: Any) -> Any:
    """The stretch from an array that every device has whole."""
    shards = len(groups(need.axes, devices.sizes)[0])
    ends = [need.first(k) for k in (0, shards - 1)]
    low, high = [0] * handle.type.rank, [0] * handle.type.rank
    low[need.dim] = max(0, -min(ends))
    high[need.dim] = max(0, max(ends) + need.length - need.elements)
    if low[need.dim] or high[need.dim]:
        handle = build.pad(handle, fill, low, high)
    table = tuple(need.first(int(k)) + low[need.dim] for k in places(need.axes, devices.sizes))
    return cut(build, devices, handle, need, table)


def cut(build: Builder, devices: Devices, handle: Any, need: Stretch, table: tuple[int, ...]) -> Any:
    """`need.length` elements from where `table` has it, [devices]."""
    shape = list(handle.type.shape)
    if len(set(table)) == 1:
        return build.slice_dim(handle, need.dim, table[0], table[0] + need.length)
    starts = [devices.constant(0)] * len(shape)
    starts[need.dim] = devices.lookup(table)
    shape[need.dim] = need.length
    return build.dynamic_slice(handle, starts, tuple(shape))


def filled(build: Builder, devices: Devices, handle: Any, need: Stretch, fill: Any) -> Any:
    """`fill` where the stretch is beyond the ends of the array."""
    shape = tuple(handle.type.shape)
    first = devices.lookup(tuple(need.first(int(k)) for k in places(need.axes, devices.sizes)))
    place = build.binary("add", build.iota("i32", (need.length,), 0), build.broadcast(first, (need.length,)))
    from_start = build.compare("GE", place, build.constant(0, "i32", (need.length,)))
    to_end = build.compare("LT", place, build.constant(need.elements, "i32", (need.length,)))
    inside = build.broadcast(build.binary("and", from_start, to_end), shape, [need.dim])
    return build.select(inside, handle, build.broadcast(fill, shape))
