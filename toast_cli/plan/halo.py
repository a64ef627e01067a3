"""Halo exchange: the transfers needed when an op reads a split dimension through windows, slices or paddings.

Each device needs a range of the operand: its own shard, a halo on either side, or a range elsewhere. XLA's partitioner
sends the missing elements in collective-permutes, one for each distance in shards to the left and to the right, as wide
as the widest part needed; it sends short, distant ranges piece by piece; and it gathers the operand where nearly all of
it would be sent. (As read in `ExchangeHalo`, `ExchangeHaloCompact` and `ReshardAsWindowedInput` of XLA's SPMD
partitioner, 2025.)

In: a `Window` and the number of shards of its dimension, or all reads of one array. Out: the permutes with their
senders, receivers and elements, or the collectives with their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from toast_cli.dimensions.model import FactorKind
from toast_cli.plan.op_sharding import OpSharding
from toast_cli.plan.reshard import GATHER, PERMUTE
from toast_cli.plan.sharding import Sharding, shards
from toast_cli.program.model import Op, Program, Window

# [shards] first and last element (excluded) of the operand that each needs; a range may extend beyond the array.
Stretches = tuple[tuple[int, int], ...]
# Ranges shorter than the distance to them by this factor are sent piece by piece.
_FAR = 2


class Permute(NamedTuple):
    """A collective-permute. first, last (excluded): range of its shard that each sender sends. pairs: (sender,
    receiver) shard numbers; empty if only positions outside the array are at this distance."""

    first: int
    last: int
    pairs: tuple[tuple[int, int], ...]


class Exchange(NamedTuple):
    """A collective that fetches elements from other devices. bytes: of its result on each device."""

    kind: str
    axes: tuple[int, ...]
    bytes: float


class WindowRead(NamedTuple):
    """How an op reads its first operand through windows. at: the sharding it requires. summed: operand dimensions over
    which the op sums across devices."""

    windows: tuple[Window, ...]
    at: Sharding
    summed: tuple[int, ...]


def read_of(windows: tuple[Window, ...], op_sharding: OpSharding) -> WindowRead:
    """How an op that has these windows reads its first operand."""
    at, made = op_sharding.operands[0], op_sharding.computed[0]
    return WindowRead(windows, at, tuple([w.operand_dim for w in windows if made[w.result_dim] != at[w.operand_dim]]))


def neighbours(
    whole_bytes: float, reads: Sequence[WindowRead], sizes: tuple[int, ...]
) -> list[tuple[Exchange, list[int]]]:
    """The halo exchanges of one array for all ops that read it through windows, each with the indices of the reads it
    serves.

    Identical reads share an exchange, as in XLA's partitioner.
    """
    alike: dict[WindowRead, list[int]] = {}
    for place, read in enumerate(reads):
        alike.setdefault(read, []).append(place)
    return [(exchange, places) for read, places in alike.items() for exchange in _of_read(whole_bytes, read, sizes)]


def _of_read(whole_bytes: float, read: WindowRead, sizes: tuple[int, ...]) -> Iterator[Exchange]:
    size = whole_bytes / shards(read.at, sizes)
    for window in read.windows:
        axes = read.at[window.operand_dim]
        if not axes:
            continue
        count = shards((axes,), sizes)
        summed = window.operand_dim in read.summed
        sent = exchanged(window, count, summed=summed)
        if sent is None:
            size *= count
            yield Exchange(GATHER, axes, size)
            continue
        element = size * count / window.inputs
        for permute in sent:
            if permute.pairs:
                crossed = crossed_by(permute.pairs, axes, sizes)
                yield Exchange(PERMUTE, crossed, element * (permute.last - permute.first))
        size = element * max(last - first for first, last in stretches(window, count, summed=summed) or ())


@lru_cache(maxsize=10_000)
def crossed_by(pairs: tuple[tuple[int, int], ...], axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes along which the sender and receiver of some pair differ. axes: those that split the dimension, major to
    minor."""
    crossed = []
    inner = shards((axes,), sizes)
    for axis in axes:
        outer, inner = inner, inner // sizes[axis]
        if any(one % outer // inner != other % outer // inner for one, other in pairs):
            crossed.append(axis)
    return tuple(crossed)


def windowed(program: Program, value: int) -> list[tuple[int, list[int]]]:
    """Ops that read a value through windows, grouped by loop and branch: exchanges are not shared between these."""
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, position in program.users[value]:
        op = program.ops[number]
        if op.windows and position == 0:
            found.setdefault((op.loop, op.branches), []).append(number)
    return [(loop, numbers) for (loop, _), numbers in found.items()]


def rotations(
    op: Op, whole_bytes: float, kinds: Sequence[FactorKind], op_sharding: OpSharding, sizes: tuple[int, ...]
) -> Iterator[Exchange]:
    """The collective-permute of an op that moves elements without windows, over all axes that split a permuted factor.
    whole_bytes: of its result. kinds: [factors] of the op's form."""
    factors = zip(op_sharding.factor_axes, kinds, strict=True)
    moved = tuple(axis for axes, kind in factors if kind is FactorKind.PERMUTATION for axis in axes)
    if moved and not op.kind.windowed:
        yield Exchange(PERMUTE, moved, whole_bytes / shards(op_sharding.computed[0], sizes))


@lru_cache(maxsize=50_000)
def exchanged(window: Window, shards: int, *, summed: bool = False) -> tuple[Permute, ...] | None:
    """The collective-permutes along the window's dimension; None where the operand is gathered instead.

    Args:
        summed: the kernel is split alike, and each device computes a partial sum of the whole result.
    """
    needed = stretches(window, shards, summed=summed)
    return None if needed is None else permutes(needed, window.inputs)


def stretches(window: Window, shards: int, *, summed: bool = False) -> Stretches | None:
    """Range that each device needs along the window's dimension; None for windows that XLA does not split."""
    return contracted(window, shards) if summed else tiled(window, shards)


def permutes(needed: Stretches, elements: int) -> tuple[Permute, ...] | None:
    """The collective-permutes for these ranges of a dimension of that size; None where the operand is gathered."""
    shards = len(needed)
    shard = ceil(elements / shards)
    left = [k * shard - first for k, (first, _) in enumerate(needed)]
    right = [last - (k + 1) * shard for k, (_, last) in enumerate(needed)]
    longest = max(last - first for first, last in needed)
    if max(*left, *right) > _FAR * longest:
        return None if 2 * longest >= shards * shard else pieces(needed, shard, elements)
    return halos(left, right, shard)


def tiled(window: Window, shards: int) -> Stretches | None:
    """Range that each device needs to compute its shard of the result; None for windows that XLA does not split."""
    own = ceil(window.outputs / shards)
    step, holes = window.stride * own, window.dilation - 1
    if window.stride > 1 and step % window.dilation:
        return None
    whole = int(window.low / window.dilation)  # rounded towards zero
    rest = window.low - whole * window.dilation
    length = window.stride * (own - 1) + 1 + (window.size - 1) * window.spread
    return tuple(
        (
            (step * k + holes - rest) // window.dilation - whole,
            (step * k + length + holes - rest) // window.dilation - whole,
        )
        for k in range(shards)
    )


def contracted(window: Window, shards: int) -> Stretches | None:
    """Range that each device needs to apply its shard of the kernel to the whole result; None for dilated operands."""
    if window.dilation != 1:
        return None
    own = ceil(window.size / shards)
    step, length = own * window.spread, (own - 1) * window.spread + 1 + (window.outputs - 1) * window.stride
    return tuple((step * k - window.low, step * k - window.low + length) for k in range(shards))


def halos(left: list[int], right: list[int], shard: int) -> tuple[Permute, ...] | None:
    """Permutes that fetch the halos; None where the operand is gathered. left, right: [shards] halo elements (negative:
    the device does not need all of its own shard)."""
    count = len(left)
    widest_left, widest_right = max(left[1:]), max(right[:-1])
    if widest_left + widest_right + shard >= count * shard and max(widest_left, widest_right) > shard:
        return None
    begin, end = -max(left), shard + max(right)  # union of all ranges, relative to the shard's first element
    if begin >= end:
        return None
    found = [
        Permute(
            max(shard * (away + 1) - widest_left, 0),
            shard - max(-away * shard - end, 0),
            tuple([(k, k + away + 1) for k in range(count - away - 1)]),
        )
        for away in reversed(range(ceil(widest_left / shard)))
        if -(away + 1) * shard < end
    ]
    skipped = min(max(begin - shard, 0), max(widest_right, 0)) // shard
    found += [
        Permute(
            max(begin - (away + 1) * shard, 0),
            min(widest_right - shard * away, shard),
            tuple([(k + away + 1, k) for k in range(count - away - 1)]),
        )
        for away in range(skipped, ceil(widest_right / shard))
    ]
    return tuple(found)


def pieces(needed: Stretches, shard: int, elements: int) -> tuple[Permute, ...]:
    """Permutes that send pieces of shards: in each permute a device sends and receives at most one piece, all padded to
    the union of the pieces."""
    waiting: list[list[tuple[int, int, int, int]]] = [
        [] for _ in needed
    ]  # [source] (place in the stretch, receiver, first, last)
    for receiver, (first, last) in enumerate(needed):
        at = max(first, 0)
        while at < min(last, elements):
            source, begin = divmod(at, shard)
            end = min(begin + last - at, shard)
            if source != receiver:
                waiting[source].append((at - first, receiver, begin, end))
            at += end - begin
    for queue in waiting:
        queue.sort()
    found = []
    while any(waiting):
        pairs: dict[int, int] = {}  # receiver -> sender
        begin, end = shard, 0
        for source, queue in enumerate(waiting):
            if not queue:
                continue
            _, receiver, first, last = queue[0]
            apart = (begin > last and end == shard and first == 0) or (end < first and begin == 0 and last == shard)
            if pairs and (receiver in pairs or apart):
                continue
            queue.pop(0)
            pairs[receiver] = source
            begin, end = min(begin, first), max(end, last)
        found.append(Permute(begin, end, tuple([(source, receiver) for receiver, source in pairs.items()])))
    return tuple(found)
