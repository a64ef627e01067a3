"""Resharding: the cheapest sequence of slices (free), all-to-alls, permutes and all-gathers between two shardings;
halo exchanges, where an op reads a split dimension through windows; and ops that one device runs for all.

XLA does one such step well. For several at once it often gathers the whole array on every device and slices; so the
emitted program constrains the intermediate shardings (`waypoints`).

Uses of one array that need the same sharding share one reshard, but not across the edges of a loop: a loop gathers in
each trip. For an array that a loop only reads, steps before the first gather, which do not enlarge it, run once, ahead
of the loop. So do gathers of an array that the loop slices differently in each trip, and gathers over axes for which
the plan says so (see `loops`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import permutations
from math import ceil
from typing import NamedTuple, TypeVar

from toast_cli.dimensions.model import FactorKind
from toast_cli.plan.partials import ALL_REDUCE
from toast_cli.plan.sharding import OpSharding, Sharding, axes_of, shards
from toast_cli.program.model import Op, Program, Window
from toast_cli.program.ops import ADD, RNG

SLICE, GATHER, EXCHANGE, PERMUTE = "slice", "all-gather", "all-to-all", "collective-permute"
# All orders of a dimension's axes are tried for up to this many; with more, unwanted axes are gathered along with
# wanted ones.
MOST_REORDERED = 3


@dataclass(frozen=True, slots=True, order=True)
class ReshardStep:
    """One collective. `fraction` of the whole array is its result on each device (1 = everything)."""

    kind: str
    axes: tuple[int, ...]
    fraction: float


RoutedStep = tuple[ReshardStep, Sharding]  # a step and the sharding it leads to
# The number of a step and the steps up to the next constrained sharding: copies share a step where these are equal.
Way = tuple[int, tuple[RoutedStep, ...]]


class Copy(NamedTuple):
    """A resharded copy of an array: in `sharding`, for the uses at `places`, by `steps`, the first `ahead` of which run
    ahead of loops that only read the array."""

    sharding: Sharding
    places: tuple[int, ...]
    steps: tuple[RoutedStep, ...]
    ahead: int


class ShardingMove(NamedTuple):
    """One collective of a reshard, shared by one or more copies.

    Attributes:
        before, after: shardings on either side; the first step starts from the sharding in which the array is made.
        places: of the uses that it serves. ahead: it runs before the loops that only read the array, see `steps_ahead`.
    """

    step: ReshardStep
    before: Sharding
    after: Sharding
    places: tuple[int, ...]
    ahead: bool


_Queued = tuple[float, int, Sharding, tuple[RoutedStep, ...]]  # bytes moved, number of steps, sharding reached, steps


@lru_cache(maxsize=200_000)
def reshard_steps(
    source: Sharding, target: Sharding, sizes: tuple[int, ...], shape: tuple[int, ...] | None = None
) -> tuple[ReshardStep, ...]:
    """Collectives that reshard an array from `source` to `target`; `sizes` [axes] of the mesh.

    Given the `shape` of the array, no dimension is cut unevenly on the way, which would pad it.
    """
    return tuple(step for step, _ in route(source, target, sizes, shape) if step.kind != SLICE)


def copies_of(
    source: Sharding,
    needed: Sequence[Sharding],
    sizes: tuple[int, ...],
    shape: tuple[int, ...] | None = None,
    whole_ahead: Sequence[bool | None] | None = None,
    held: Collection[int] = (),
) -> list[Copy]:
    """The resharded copies of an array made in `source` that need communication. needed: [uses] sharding of each.
    whole_ahead: [uses] see `program.values.Reading`; uses outside loops share the copy made ahead of loops. held: see
    `steps_ahead`."""
    wanted: dict[tuple[Sharding, bool], list[int]] = {}
    wholly = whole_ahead or [None] * len(needed)
    if held:
        wholly = [
            takes if takes is None else takes or gathers_over(route(source, sharding, sizes, shape), held)
            for sharding, takes in zip(needed, wholly, strict=True)
        ]
    ahead_of_loops = {sharding for sharding, takes in zip(needed, wholly, strict=True) if takes}
    for place, (sharding, takes) in enumerate(zip(needed, wholly, strict=True)):
        if sharding is not source and sharding != source:
            ahead = sharding in ahead_of_loops if takes is None else takes
            wanted.setdefault((sharding, ahead), []).append(place)
    copies = []
    for (target, ahead), places in wanted.items():
        steps = route(source, target, sizes, shape)
        if communicates(steps):
            copies.append(Copy(target, tuple(places), steps, steps_ahead(steps, whole_ahead=ahead, held=held)))
    return copies


def communicates(steps: tuple[RoutedStep, ...]) -> bool:
    """Whether some step is more than a slice."""
    return any(step.kind != SLICE for step, _ in steps)


def moves_of(source: Sharding, copies: Sequence[Copy]) -> Iterator[ShardingMove]:
    """The collectives that make the copies of an array that is made in `source`.

    Copies whose steps begin alike share those, up to a sharding that both constrain (see `waypoints`): XLA's
    partitioner keeps an array in every sharding that it was asked for.
    """
    served: dict[tuple[Way, bool], tuple[int, ...]] = {}  # a step and its way, and whether it runs ahead -> uses
    ways = [ways_of(copy.steps, copy.ahead) for copy in copies]
    for copy, way in zip(copies, ways, strict=True):
        for k, key in enumerate(way):
            served[key, k < copy.ahead] = (*served.get((key, k < copy.ahead), ()), *copy.places)
    for copy, way in zip(copies, ways, strict=True):
        before = source
        for k, ((step, after), key) in enumerate(zip(copy.steps, way, strict=True)):
            places = served.pop((key, k < copy.ahead), None)
            if step.kind != SLICE and places is not None:
                yield ShardingMove(step, before, after, places, k < copy.ahead)
            before = after


def ways_of(steps: tuple[RoutedStep, ...], ahead: int = 0) -> list[Way]:
    """[steps] its number, and the steps up to the next constrained sharding, or up to the loop's edge where the first
    `ahead` steps run ahead of a loop."""
    ends = sorted({*constrained_after(steps), ahead or len(steps), len(steps)})
    return [(k, steps[: next(end for end in ends if end > k)]) for k in range(len(steps))]


Region = TypeVar("Region", bound=Hashable)


def runs_by_region(uses: Iterable[tuple[Region, float]]) -> dict[Region, float]:
    """Region (see `program.values`) -> how often a copy is made in it, for uses given by their region and how often
    they are read."""
    runs: dict[Region, float] = {}
    for region, count in uses:
        runs[region] = max(runs.get(region, 0.0), count)
    return runs


def steps_ahead(steps: tuple[RoutedStep, ...], *, whole_ahead: bool = False, held: Collection[int] = ()) -> int:
    """Number of steps that run ahead of a loop that only reads the array: all-to-alls, permutes and the slices before
    them, up to the first gather. They do not enlarge the array, so repeating them in each trip would save no memory.
    All steps do with `whole_ahead`. Gathers over axes in `held` run ahead of the loop as well."""
    in_trips = (k for k, (step, _) in enumerate(steps) if step.kind == GATHER and not set(step.axes).issubset(held))
    stop = None if whole_ahead else next(in_trips, None)
    if stop is None:
        return len(steps) if communicates(steps) else 0
    return max([k + 1 for k, (step, _) in enumerate(steps[:stop]) if step.kind != SLICE], default=0)


def gathers_over(steps: tuple[RoutedStep, ...], axes: Collection[int]) -> bool:
    """Whether the steps have gathers, and only over these axes."""
    over = [step.axes for step, _ in steps if step.kind == GATHER]
    return bool(over) and all(set(each).issubset(axes) for each in over)


@lru_cache(maxsize=200_000)
def waypoints(
    source: Sharding, target: Sharding, sizes: tuple[int, ...], shape: tuple[int, ...] | None = None
) -> tuple[Sharding, ...]:
    """Intermediate shardings that must be constrained for XLA to take this route; none where it takes one step."""
    steps = route(source, target, sizes, shape)
    return tuple([steps[end - 1][1] for end in constrained_after(steps)])


class ReshardPart(NamedTuple):
    """A part of a reshard, with the intermediate shardings to constrain (see `waypoints`)."""

    start: Sharding
    end: Sharding
    through: tuple[Sharding, ...] = ()


def reshard_parts(
    source: Sharding,
    target: Sharding,
    sizes: tuple[int, ...],
    shape: tuple[int, ...] | None = None,
    *,
    whole_ahead: bool = False,
    held: Collection[int] = (),
) -> tuple[ReshardPart | None, ReshardPart | None]:
    """(steps ahead of loops that only read the array, see `steps_ahead`; the rest). None for an empty part."""
    steps = route(source, target, sizes, shape)
    count = steps_ahead(steps, whole_ahead=whole_ahead, held=held)
    along = {stop: steps[stop - 1][1] for stop in constrained_after(steps)}
    if not count:
        return None, ReshardPart(source, target, tuple(along.values()))
    middle = steps[count - 1][1]
    ahead = ReshardPart(source, middle, tuple([sharding for stop, sharding in along.items() if stop < count]))
    rest = ReshardPart(middle, target, tuple([sharding for stop, sharding in along.items() if stop > count]))
    return ahead, rest if count < len(steps) else None


def constrained_after(steps: tuple[RoutedStep, ...]) -> list[int]:
    """Numbers of steps after which the sharding has to be constrained; see `waypoints`."""
    kinds = [step.kind for step, _ in steps]
    moves = set(kinds) - {SLICE}
    single_step = len(kinds) - kinds.count(SLICE) < 2 or set(kinds) == {GATHER}  # gathers XLA takes in one go
    if len(moves) < 2 and (SLICE not in kinds or set(kinds) <= {SLICE, PERMUTE}) and single_step:
        return []
    return [k for k in range(1, len(steps)) if (kinds[k - 1], kinds[k]) != (SLICE, SLICE)]


def route(
    source: Sharding, target: Sharding, sizes: tuple[int, ...], shape: tuple[int, ...] | None
) -> tuple[RoutedStep, ...]:
    """Steps from one sharding to the other, each with the sharding it leads to; slices too.

    The cheapest route whatever the shape; if it cuts this shape unevenly, the cheapest that does not.
    """
    steps = _route(source, target, sizes)
    if shape is None or all(is_even(sharding, shape, sizes) for _, sharding in steps[:-1]):
        return steps
    return _route(source, target, sizes, shape)


def is_even(sharding: Sharding, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether every dimension is cut into pieces of one size."""
    return all(size % shards((axes,), sizes) == 0 for size, axes in zip(shape, sharding, strict=True))


@lru_cache(maxsize=200_000)
def _route(
    source: Sharding, target: Sharding, sizes: tuple[int, ...], shape: tuple[int, ...] | None = None
) -> tuple[RoutedStep, ...]:
    """Steps from one sharding to the other that move the fewest bytes; with a `shape`, over shardings that cut it
    evenly."""
    if source == target:
        return ()
    if all(have[: len(want)] == want for have, want in zip(source, target, strict=True)):
        return tuple(_gathers(source, target, sizes))
    queue: list[_Queued] = [(0.0, 0, source, ())]
    done: set[Sharding] = set()
    while queue:
        cost, count, current, steps = heappop(queue)
        if current == target:
            return steps
        if current in done:
            continue
        done.add(current)
        for step, to in _next_steps(current, target, sizes, may_gather=shape is not None):
            if to not in done and (shape is None or _is_allowed(to, source, target, shape, sizes)):
                moved = 0.0 if step.kind == SLICE else step.fraction
                heappush(queue, (cost + moved, count + 1, to, (*steps, (step, to))))
    raise ValueError(f"no way from {source} to {target}")  # gathering everything and slicing is always one


def _gathers(source: Sharding, target: Sharding, sizes: tuple[int, ...]) -> Iterator[RoutedStep]:
    """One all-gather a dimension, the last first, as XLA does."""
    current = source
    for dim in reversed(range(len(source))):
        gone = current[dim][len(target[dim]) :]
        if gone:
            current = _replaced(current, dim, target[dim])
            yield ReshardStep(GATHER, gone, 1 / shards(current, sizes)), current


def _is_allowed(
    sharding: Sharding, source: Sharding, target: Sharding, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> bool:
    """Whether each dimension is cut evenly, or begins as at either end."""
    return all(
        size % shards((axes,), sizes) == 0 or axes == have[: len(axes)] or axes == want[: len(axes)]
        for size, axes, have, want in zip(shape, sharding, source, target, strict=True)
    )


def _next_steps(current: Sharding, target: Sharding, sizes: tuple[int, ...], may_gather: bool) -> Iterator[RoutedStep]:
    """Single steps that may lead to the target; gathers axes that the target uses only if `may_gather`."""
    home = {axis: dim for dim, axes in enumerate(target) for axis in axes}
    present = {axis for axes in current for axis in axes}
    local = 1 / shards(current, sizes)
    for axis, dim in home.items():
        if axis not in present:
            to = _replaced(current, dim, (*current[dim], axis))
            yield ReshardStep(SLICE, (axis,), 1 / shards(to, sizes)), to
    for dim, axes in enumerate(current):
        if axes == target[dim]:
            continue
        for count in range(1, len(axes) + 1):
            kept, minor = axes[:-count], axes[-count:]
            to = _replaced(current, dim, kept)
            if may_gather or len(axes) > MOST_REORDERED or not home.keys() & set(minor):
                yield ReshardStep(GATHER, minor, 1 / shards(to, sizes)), to
            goals = {home.get(axis, dim) for axis in minor}
            if len(goals) == 1 and dim not in goals:
                (goal,) = goals
                yield ReshardStep(EXCHANGE, minor, local), _replaced(to, goal, (*to[goal], *minor))
        if 1 < len(axes) <= MOST_REORDERED:
            for order in permutations(axes):
                if order != axes:
                    moved = tuple(a for a, b in zip(axes, order, strict=True) if a != b)
                    yield ReshardStep(PERMUTE, moved, local), _replaced(current, dim, order)
    # Pieces of `target` are pieces of those of `at`, so that each device can be sent the one it needs.
    if all(shards((y,), sizes) % shards((x,), sizes) == 0 for x, y in zip(current, target, strict=True)):
        moved = tuple(sorted({a for x, y in zip(current, target, strict=True) for a in _unlike(x, y)}))
        yield ReshardStep(PERMUTE, moved, 1 / shards(target, sizes)), target


def _unlike(have: tuple[int, ...], want: tuple[int, ...]) -> tuple[int, ...]:
    """Axes of both after their common prefix."""
    same = next((k for k, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), min(len(have), len(want)))
    return have[same:] + want[same:]


def _replaced(sharding: Sharding, dim: int, axes: tuple[int, ...]) -> Sharding:
    return (*sharding[:dim], axes, *sharding[dim + 1 :])


# ---------------------------------------------------------------- halo exchange
# Each device needs a range of the operand: its own shard, a halo on either side, or a range elsewhere. XLA's
# partitioner sends the missing elements in collective-permutes, one for each distance in shards to the left and to the
# right, as wide as the widest part needed; it sends short, distant ranges piece by piece; and it gathers the operand
# where nearly all of it would be sent. (As read in `ExchangeHalo`, `ExchangeHaloCompact` and `ReshardAsWindowedInput`
# of XLA's SPMD partitioner, 2025.)

# [shards] first and last element (excluded) of the operand that each needs; a range may extend beyond the array.
NeededRanges = tuple[tuple[int, int], ...]
# Ranges shorter than the distance to them by this factor are sent piece by piece.
_FAR = 2


class Permute(NamedTuple):
    """A collective-permute. first, last (excluded): range of its shard that each sender sends. pairs: (sender,
    receiver) shard numbers; empty if only positions outside the array are at this distance."""

    first: int
    last: int
    pairs: tuple[tuple[int, int], ...]


class Transfer(NamedTuple):
    """A collective that fetches elements from other devices. bytes: of its result on each device."""

    kind: str
    axes: tuple[int, ...]
    bytes: float


class WindowRead(NamedTuple):
    """How an op reads its first operand through windows. sharding: the one it requires. summed: operand dimensions over
    which the op sums across devices."""

    windows: tuple[Window, ...]
    sharding: Sharding
    summed: tuple[int, ...]


def read_of(windows: tuple[Window, ...], op_sharding: OpSharding) -> WindowRead:
    """How an op that has these windows reads its first operand."""
    sharding, result = op_sharding.operands[0], op_sharding.computed[0]
    summed = tuple([w.operand_dim for w in windows if result[w.result_dim] != sharding[w.operand_dim]])
    return WindowRead(windows, sharding, summed)


def neighbours(
    whole_bytes: float, reads: Sequence[WindowRead], sizes: tuple[int, ...]
) -> list[tuple[Transfer, list[int]]]:
    """The halo exchanges of one array for all ops that read it through windows, each with the indices of the reads it
    serves.

    Identical reads share an exchange, as in XLA's partitioner.
    """
    alike: dict[WindowRead, list[int]] = {}
    for place, read in enumerate(reads):
        alike.setdefault(read, []).append(place)
    return [(exchange, places) for read, places in alike.items() for exchange in _of_read(whole_bytes, read, sizes)]


def _of_read(whole_bytes: float, read: WindowRead, sizes: tuple[int, ...]) -> Iterator[Transfer]:
    size = whole_bytes / shards(read.sharding, sizes)
    for window in read.windows:
        axes = read.sharding[window.operand_dim]
        if not axes:
            continue
        count = shards((axes,), sizes)
        summed = window.operand_dim in read.summed
        sent = exchanged(window, count, summed=summed)
        if sent is None:
            size *= count
            yield Transfer(GATHER, axes, size)
            continue
        element = size * count / window.inputs
        for permute in sent:
            if permute.pairs:
                yield Transfer(PERMUTE, axes, element * (permute.last - permute.first))
        size = element * max(last - first for first, last in ranges_needed(window, count, summed=summed) or ())


def windowed(program: Program, value: int) -> list[tuple[int, list[int]]]:
    """Ops that read a value through windows, grouped by loop and branch: exchanges are not shared between these."""
    readers: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, position in program.users[value]:
        op = program.ops[number]
        if op.windows and position == 0:
            readers.setdefault((op.loop, op.branches), []).append(number)
    return [(loop, numbers) for (loop, _), numbers in readers.items()]


def rotations(
    op: Op, whole_bytes: float, kinds: Sequence[FactorKind], op_sharding: OpSharding, sizes: tuple[int, ...]
) -> Iterator[Transfer]:
    """The collective-permute of an op that moves elements without windows, over all axes that split a permuted factor.
    whole_bytes: of its result. kinds: [factors] of the op's form."""
    factors = zip(op_sharding.factor_axes, kinds, strict=True)
    moved = tuple(axis for axes, kind in factors if kind is FactorKind.PERMUTATION for axis in axes)
    if moved and not op.kind.windowed:
        yield Transfer(PERMUTE, moved, whole_bytes / shards(op_sharding.computed[0], sizes))


@lru_cache(maxsize=50_000)
def exchanged(window: Window, shards: int, *, summed: bool = False) -> tuple[Permute, ...] | None:
    """The collective-permutes along the window's dimension; None where the operand is gathered instead.

    Args:
        summed: the kernel is split alike, and each device computes a partial sum of the whole result.
    """
    needed = ranges_needed(window, shards, summed=summed)
    return None if needed is None else permutes(needed, window.inputs)


def ranges_needed(window: Window, shards: int, *, summed: bool = False) -> NeededRanges | None:
    """Range that each device needs along the window's dimension; None for windows that XLA does not split."""
    return contracted(window, shards) if summed else tiled(window, shards)


def permutes(needed: NeededRanges, elements: int) -> tuple[Permute, ...] | None:
    """The collective-permutes for these ranges of a dimension of that size; None where the operand is gathered."""
    shards = len(needed)
    shard = ceil(elements / shards)
    left = [k * shard - first for k, (first, _) in enumerate(needed)]
    right = [last - (k + 1) * shard for k, (_, last) in enumerate(needed)]
    longest = max(last - first for first, last in needed)
    if max(*left, *right) > _FAR * longest:
        return None if 2 * longest >= shards * shard else pieces(needed, shard, elements)
    return halos(left, right, shard)


def tiled(window: Window, shards: int) -> NeededRanges | None:
    """Range that each device needs to compute its shard of the result; None for windows that XLA does not split."""
    own = ceil(window.outputs / shards)
    step, holes = window.stride * own, window.dilation - 1
    if window.stride > 1 and step % window.dilation:
        return None
    low = int(window.low / window.dilation)  # rounded towards zero
    rest = window.low - low * window.dilation
    length = window.stride * (own - 1) + 1 + (window.size - 1) * window.spread
    return tuple(
        (
            (step * k + holes - rest) // window.dilation - low,
            (step * k + length + holes - rest) // window.dilation - low,
        )
        for k in range(shards)
    )


def contracted(window: Window, shards: int) -> NeededRanges | None:
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
    sent = [
        Permute(
            max(shard * (away + 1) - widest_left, 0),
            shard - max(-away * shard - end, 0),
            tuple([(k, k + away + 1) for k in range(count - away - 1)]),
        )
        for away in reversed(range(ceil(widest_left / shard)))
        if -(away + 1) * shard < end
    ]
    skipped = min(max(begin - shard, 0), max(widest_right, 0)) // shard
    sent += [
        Permute(
            max(begin - (away + 1) * shard, 0),
            min(widest_right - shard * away, shard),
            tuple([(k + away + 1, k) for k in range(count - away - 1)]),
        )
        for away in range(skipped, ceil(widest_right / shard))
    ]
    return tuple(sent)


def pieces(needed: NeededRanges, shard: int, elements: int) -> tuple[Permute, ...]:
    """Permutes that send pieces of shards: in each permute a device sends and receives at most one piece, all padded to
    the union of the pieces."""
    waiting: list[list[tuple[int, int, int, int]]] = [
        [] for _ in needed
    ]  # [source] (place in the range, receiver, first, last)
    for receiver, (first, last) in enumerate(needed):
        position = max(first, 0)
        while position < min(last, elements):
            source, begin = divmod(position, shard)
            end = min(begin + last - position, shard)
            if source != receiver:
                waiting[source].append((position - first, receiver, begin, end))
            position += end - begin
    for queue in waiting:
        queue.sort()
    sent = []
    while any(waiting):
        pairs: dict[int, int] = {}  # receiver -> sender
        begin, end = shard, 0
        for source, queue in enumerate(waiting):
            if not queue:
                continue
            _, receiver, first, last = queue[0]
            disjoint = (begin > last and end == shard and first == 0) or (end < first and begin == 0 and last == shard)
            if pairs and (receiver in pairs or disjoint):
                continue
            queue.pop(0)
            pairs[receiver] = source
            begin, end = min(begin, first), max(end, last)
        sent.append(Permute(begin, end, tuple([(source, receiver) for receiver, source in pairs.items()])))
    return tuple(sent)


# ---------------------------------------------------------------- ops that one device runs
# Ops that one device runs for all: host callbacks, and random numbers of `stablehlo.rng`.


def not_reduced(program: Program) -> frozenset[int]:
    """Results of such ops that need no all-reduce of their own: they have no readers, or they are only added to others
    and XLA reduces the sum (see `partials`)."""
    unreduced: set[int] = set()
    added: dict[int, int] = {}  # a sum with one reader -> the term whose all-reduce is counted for it
    for op in program.ops:
        if op.one_device:
            unreduced.update(value for value in op.results if not program.users[value])
            terms = {value: value for value in op.results}
        elif op.name == ADD and all(value in added for value in op.operands):
            left, right = (added[value] for value in op.operands)
            unreduced.add(right)
            terms = {op.results[0]: left}
        else:
            continue
        for value, term in terms.items():
            uses = [program.ops[user] for user, _ in program.users[value]]
            if len(uses) == 1 and (uses[0].loop, uses[0].branches) == (op.loop, op.branches):
                added[value] = term
    return frozenset(unreduced)


def spread(
    op: Op, whole_bytes: Sequence[int], op_sharding: OpSharding, sizes: tuple[int, ...]
) -> Iterator[tuple[int, Transfer]]:
    """The all-reduces of an op's results, each with the number of its result. whole_bytes: [results], 0 for those in
    `not_reduced`."""
    if not op.one_device and op.name != RNG:
        return
    for k, array_bytes in enumerate(whole_bytes):
        sharding = op_sharding.computed[k]
        axes = tuple(axis for axis, size in enumerate(sizes) if size > 1 and axis not in axes_of(sharding))
        if axes and array_bytes:
            yield k, Transfer(ALL_REDUCE, axes, array_bytes / shards(sharding, sizes))
