"""Rematerialises values that a step saves for its backward pass, and keeps products that it recomputes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toast_cli import xla
from toast_cli.frontend.inline import NEUTRAL
from toast_cli.frontend.places import place_text
from toast_cli.frontend.source import Source, read_rewritten
from toast_cli.program.model import Program
from toast_cli.program.ops import BARRIER, BROADCAST_IN_DIM, DYNAMIC_SLICE, RESHAPE, WHILE
from toast_cli.request import Recompute
from toast_cli.rewrite.block_graph import (
    BlockGraph,
    before_reshape,
    clone,
    copied_module,
    erase_unread,
    is_pure,
    is_remade,
    replace_operands,
)
from toast_cli.rewrite.loop_pairs import LoopPair, body_of, index_of, loop_pairs, yielded
from toast_cli.xla import ir

# ---------------------------------------------------------------- policies
# Where layers stand in a loop (`lax.scan`), stacks of residuals are removed from both loops: the backward loop
# recomputes their slices from the remaining stacks (the layer's input is added if it was not stacked) and from the
# layer's weights. See `recompute_segments` for layers that are not in a loop.

_WORTH = 0.9  # upper bound on the fraction of the stacked bytes left
_IN_WORDS = {
    Recompute.all: "",
    Recompute.all_but_weight_products: ", except products with weights",
    Recompute.all_but_products: ", except products",
}
_IN_JAX = {
    Recompute.all: "",
    Recompute.all_but_weight_products: ", policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable",
    Recompute.all_but_products: ", policy=jax.checkpoint_policies.dots_saveable",
}


def with_recompute(source: Source, policy: Recompute) -> Source | str:
    """The program with rematerialisation under this policy, or the reason why there is none."""
    if source.annotations:
        return "the program states shardings of its own, which are of arrays that it saves"
    copy = copied_module(source)
    with copy.context, ir.Location.unknown():
        block = xla.main_function(copy).entry_block
        locations = [] if policy is Recompute.all else keep_products(copy, policy)
        while (pair := next((p for p in loop_pairs(copy) if _recompute_pair(p, policy)), None)) is not None:
            locations.append(pair.place)
        locations += recompute_segments(block, source.program, policy)
        if not locations:
            return "the program saves nothing from a forward to a backward pass that this policy recomputes"
        erase_unread(block)
    places = Counter(place_text(str(location), source.text_file) for location in locations)
    place = next((f" at {text}" for text, _ in places.most_common() if text), "")
    notice = (
        f"the backward pass recomputes what it needs of the forward pass{_IN_WORDS[policy]}: the program written "
        f"has it; in JAX it is jax.checkpoint(layer{_IN_JAX[policy]}) for the layers{place}"
    )
    return read_rewritten(source, copy, notice, recompute=policy.value)


def _recompute_pair(pair: LoopPair, policy: Recompute) -> bool:
    """Removes stacks of one pair if that saves enough memory."""
    graph, updates = pair.graph, [stack.update for stack in pair.stacks]
    kept = graph.least_kept(updates, pair.cost, policy)
    if sum(map(graph.size, kept)) > _WORTH * sum(map(graph.size, dict.fromkeys(updates))):
        return False
    makers = graph.makers(updates, kept)
    computed = {result for n in makers for result in graph.operations[n].results} | kept
    twins = pair.stack(kept)
    read = dict.fromkeys(value for n in makers for value in graph.reads[n] if value not in computed)
    twins |= {value: pair.twin(value) for value in read}
    clone((graph.operations[n] for n in makers), twins, pair.build.ip)
    for stack in pair.stacks:
        for piece in stack.slices:
            # What is reshaped to be stacked, and back when it is read, is the array itself.
            twin, before = twins[stack.update], before_reshape(twins[stack.update])
            for reader in [use.owner for use in piece.results[0].uses]:
                if before is not None and reader.name == RESHAPE and reader.results[0].type == before.type:
                    reader.results[0].replace_all_uses_with(before)
            piece.results[0].replace_all_uses_with(twin)
    pair.finish()
    return True


# ---------------------------------------------------------------- keeping products
# Matrix products that a step recomputes in its backward pass (`jax.checkpoint` around a layer) are kept instead. Cheap
# operations are still recomputed: among all sufficient sets of values, the one with the fewest bytes is kept.


def keep_products(module: Any, policy: Recompute) -> list[Any]:
    """Keeps values that are computed twice; returns locations of forward loops and of the first operations kept."""
    places = []
    while (pair := next((p for p in loop_pairs(module) if _keep_in_scan(p, policy)), None)) is not None:
        places.append(pair.place)
    blocks = dict.fromkeys(operation.block for operation in xla.walk_ops(module, BARRIER))
    for block in blocks:
        places += _keep_in_block(block, policy)
    return places


def _keep_in_block(block: Any, policy: Recompute) -> list[Any]:
    """The same for layers outside a loop: recomputed operations are those that read results of
    an optimization barrier."""
    graph, equal = BlockGraph(block), EqualValues()
    behind: set[Any] = set()
    recomputing: set[int] = set()
    for number, operation in enumerate(graph.operations[: graph.end]):
        barred = operation.name == BARRIER or not behind.isdisjoint(graph.reads[number])
        if equal.number(operation, learn=not barred) and barred and operation.name != BARRIER:
            recomputing.add(number)
        if barred:
            behind.update(operation.results)
    start = min(recomputing, default=graph.end)
    live = {
        value
        for value, readers in graph.readers.items()
        if graph.place.get(value, -1) < start and any(n >= start and n not in recomputing for n in readers)
    }

    def cost(value: Any) -> int | None:
        return 0 if value in live or value not in graph.place else None

    kept = _to_keep(graph, graph, equal, recomputing, cost, policy)
    for value, first in kept.items():
        value.replace_all_uses_with(first)
    erase_unread(block)
    return [first.owner.location for first in kept.values()][:1]


def _keep_in_scan(pair: LoopPair, policy: Recompute) -> bool:
    equal, backward = EqualValues(), pair.backward
    for view in pair.forward.block.operations:
        if view.operation == pair.forward:
            break
        equal.number(view.operation)
    for loop in (pair.forward, backward):
        body, passed = body_of(loop), yielded(loop)
        same = (k for k, argument in enumerate(body.arguments) if passed[k] == argument)
        equal.first.update((body.arguments[k], equal.of(loop.operands[k])) for k in same)
    for operation in pair.graph.operations[: pair.graph.end]:
        _same_index(operation, pair.forward, pair.writing, pair.stacks[0].index, equal)
        equal.number(operation)
    for stack in pair.stacks:
        for piece in stack.slices:
            equal.first[piece.results[0]] = equal.of(stack.update)
    graph = BlockGraph(body_of(backward))
    recomputing = set()
    reading = index_of(pair.index, backward)
    for number, operation in enumerate(graph.operations[: graph.end]):
        _same_index(operation, backward, reading, pair.stacks[0].index, equal)
        repeated = any(result in equal.first for result in operation.results)
        if (repeated or equal.number(operation, learn=False)) and operation.name != BARRIER:
            recomputing.add(number)
    stacked = {value for stack in pair.stacks for value in (equal.of(stack.update), before_reshape(stack.update))}

    def cost(value: Any) -> int | None:
        return 0 if value in stacked else pair.cost(value)

    kept = _to_keep(graph, pair.graph, equal, recomputing, cost, policy)
    if not kept:
        return False
    rows = pair.stack(set(kept.values()))
    for value, first in kept.items():
        value.replace_all_uses_with(rows[first])
    pair.finish()
    return True


def _same_index(operation: Any, loop: Any, index: Any, first: Any, equal: EqualValues) -> None:
    """Marks the loop indices of a layer as equal in both loops."""
    if operation.name == DYNAMIC_SLICE:
        for start in list(operation.operands)[1:]:
            start_index = index_of(start, loop)
            if start_index is not None and start_index == index:
                equal.first[start] = first


def _to_keep(
    backward: BlockGraph, forward: BlockGraph, equal: EqualValues, recomputing: set[int],
    cost: Callable[[Any], int | None], policy: Recompute,
) -> dict[Any, Any]:  # fmt: skip
    """Recomputed value -> the forward value to read in its place. recomputing: operations of the backward block that
    recompute."""
    recomputed = [result for n in sorted(recomputing) for result in backward.operations[n].results]
    read = [value for value in recomputed if not recomputing.issuperset(backward.readers.get(value, ()))]
    kept = forward.least_kept([equal.of(value) for value in read], cost, policy)
    dear = {value for value in kept if cost(value) != 0}
    return {value: equal.of(value) for value in recomputed if equal.of(value) in dear}


class EqualValues:
    """Value numbering: for each value, the first one that is equal to it, also behind optimization barriers. Operations
    are numbered in their order. Callers may add further equalities to `first`."""

    def __init__(self) -> None:
        self.first: dict[Any, Any] = {}  # value -> the first that is equal; none where it is itself
        self._by_key: dict[Hashable, Any] = {}  # key of an operation -> the first operation with that key

    def of(self, value: Any) -> Any:
        """The first value equal to this one."""
        return self.first.get(value, value)

    def number(self, operation: Any, *, learn: bool = True) -> bool:
        """True if an earlier operation computes the same. learn: whether later operations may be equal to this one."""
        if operation.name == BARRIER:
            self.first.update((r, self.of(o)) for r, o in zip(operation.results, operation.operands, strict=True))
            return True
        if not is_pure(operation):
            return False
        before = before_reshape(self.of(operation.operands[0])) if operation.name == RESHAPE else None
        cancel = before is not None and before.type == operation.results[0].type  # two successive reshapes
        before = self.of(before) if cancel else self._other_than_neutral(operation)
        if before is not None:
            self.first[operation.results[0]] = before
            return True
        key = self._key(operation, {})
        earlier = self._by_key.get(key)
        if earlier is not None:
            self.first.update((a, self.of(b)) for a, b in zip(operation.results, earlier.results, strict=True))
        elif learn:
            self._by_key[key] = operation
        return earlier is not None

    def _other_than_neutral(self, operation: Any) -> Any | None:
        """The operand that an operation returns unchanged because all numbers of the other are neutral, such as zeros
        that a loop carries: the reader of programs removes the operation only where it sees the zeros."""
        element, sides = NEUTRAL.get(operation.name, (0, ()))
        for side in sides:
            value = self.of(operation.operands[side])
            while not isinstance(value, ir.BlockArgument) and value.owner.name == BROADCAST_IN_DIM:
                value = self.of(value.owner.operands[0])
            if xla.splat_number(value) == element:
                return self.of(operation.operands[1 - side])
        return None

    def _key(self, operation: Any, inner: dict[Any, int]) -> Hashable:
        """A key that equal operations share. inner: numbers of the values of enclosing regions."""
        operands = tuple(inner[o] if o in inner else self.of(o) for o in operation.operands)
        regions = []
        for region in operation.regions:
            for block in region.blocks:
                inner.update({value: len(inner) + k for k, value in enumerate(block.arguments)})
                for view in block.operations:
                    regions.append(self._key(view.operation, inner))
                    inner.update({value: len(inner) + k for k, value in enumerate(view.operation.results)})
        return (
            operation.name,
            operands,
            xla.attribute_key(operation),
            tuple(r.type for r in operation.results),
            tuple(regions),
        )


# ---------------------------------------------------------------- layers that are not in a loop
# The forward pass is divided into segments. The values of a segment that the backward pass reads are recomputed from
# the kept values in front of their first reader, behind an optimization barrier, as `jax.checkpoint` writes it. The
# barrier has a gradient among its operands, so that no compiler computes the segment earlier.

Shape = tuple[int, ...]
_LARGE = 0.5  # a segment that saves a larger fraction is not recomputed
_FEW = 4
_EVERYWHERE = 2  # a value read by more segments is always kept


@dataclass(frozen=True)
class _Segment:
    """Operations [first, last) of the forward pass. needed: their results that the backward pass reads."""

    first: int
    last: int
    needed: list[Any]


def _forward_pass(block: Any, program: Program) -> tuple[BlockGraph, int, list[_Segment], set[Any]]:
    """The graph of a step, the first operation of its backward pass, the segments before it, and the values that stay
    live until then in any case."""
    graph = BlockGraph(block)
    backward = _backward_begin(graph, {program.values[argument.value].shape for argument in program.arguments})
    segments = _segments(graph, backward)
    return graph, backward, segments, _live_anyway(graph, segments, backward)


def recompute_segments(block: Any, program: Program, policy: Recompute) -> list[Any]:
    """Recomputes residuals in the backward pass of a program's block; returns the location of the first operation of
    each segment."""
    graph, backward, segments, live = _forward_pass(block, program)
    early = [value for value in graph.place if not is_remade(value)]  # in the order in which they are made
    available, locations = live.union(early), []
    for segment, kept in _kept_of(graph, segments, live, policy):
        if kept is None:
            continue
        while early and graph.place[early[-1]] >= segment.first:
            available.difference_update({early.pop()} - live)
        added = kept - available
        available |= added
        if _recompute_segment(graph, segment, available, backward):
            locations.append(graph.operations[segment.first].location)
        available -= added
    return locations


def kept_bytes(source: Source) -> dict[Recompute | None, int]:
    """Policy -> bytes of the arrays that the forward pass keeps for the backward pass under it; None: as it is. Empty
    where layers are in loops."""
    with source.module.context:
        graph, backward, segments, live = _forward_pass(xla.main_function(source.module).entry_block, source.program)
        if _layer_loops(graph, backward):
            return {}
        bytes_of: dict[Recompute | None, int] = {}
        for policy in (None, *Recompute):
            every: set[Any] = set()
            for segment, kept in _kept_of(graph, segments, live, policy):
                every.update(segment.needed if kept is None else kept - live)
            bytes_of[policy] = sum(map(graph.size, every))
        return bytes_of


def _kept_of(
    graph: BlockGraph, segments: list[_Segment], live: set[Any], policy: Recompute | None
) -> Iterator[tuple[_Segment, set[Any] | None]]:
    """The segments that the backward pass needs values of, the last first, and which values each keeps; None: as it is,
    as recomputing saves little. live: see `_live_anyway`."""
    for segment in reversed([s for s in segments[:-1] if s.needed]):
        first = segment.first

        def cost(value: Any, first: int = first) -> int | None:
            if value in live or value not in graph.place:
                return 0
            return None if graph.place[value] >= first or is_remade(value) else graph.size(value)

        kept = None if policy is None else graph.least_kept(segment.needed, cost, policy)
        if kept and sum(map(graph.size, kept)) > _WORTH * sum(map(graph.size, segment.needed)):
            kept = None
        yield segment, kept


def _live_anyway(graph: BlockGraph, segments: list[_Segment], backward: int) -> set[Any]:
    """Values that stay live until the backward pass in any case: results of the step, values that it reads and must not
    recompute, and values that many segments read."""
    needed = {value for segment in segments[:-1] for value in segment.needed}
    ends = np.array([segment.last for segment in segments])
    live = set[Any]()
    for value, readers in graph.readers.items():
        many = (
            len(set(np.searchsorted(ends, [n for n in readers if n < backward], side="right").tolist())) > _EVERYWHERE
        )
        if value not in needed and not is_remade(value) and (readers[-1] >= backward or many):
            live.add(value)
    return live


def _backward_begin(graph: BlockGraph, weights: set[Shape]) -> int:
    """The first operation of the backward pass: where values with earlier and later readers take the most bytes.
    weights: shapes of arrays that the forward pass neither makes nor saves, although a step passes such along."""
    change = np.zeros(len(graph.operations) + 1, dtype=np.int64)
    for value in graph.place:
        readers = [n for n in graph.readers.get(value, ()) if n < graph.end]
        shape = tuple(getattr(value.type, "shape", ()))
        if len(readers) > 1 and shape not in weights and not is_remade(value):
            change[readers[0] + 1] += graph.size(value)
            change[readers[-1] + 1] -= graph.size(value)
    return int(np.argmax(np.cumsum(change)))


def _segments(graph: BlockGraph, backward: int) -> list[_Segment]:
    """The segments of the forward pass; empty if recomputation would save little."""
    values, rows = [], []
    for value, maker in graph.place.items():
        readers = graph.readers.get(value, ())
        if maker < backward and readers and not is_remade(value):
            last = max((reader for reader in readers if reader < backward), default=-1)
            values.append(value)
            rows.append((maker, last, backward <= readers[-1] < graph.end, graph.size(value)))
    if not rows:
        return []
    lives = Lifetimes(*(np.array(column) for column in zip(*rows, strict=True)))
    cuts, least = checkpoints(lives, backward)
    total, loops = int(lives.bytes[lives.saved].sum()), _layer_loops(graph, backward)
    if least > _WORTH * total:
        return []
    segments = []
    for first, end in pairwise((0, *cuts, backward)):
        inside = np.flatnonzero(lives.saved & (lives.maker >= first) & (lives.maker < end) & (lives.last < end))
        worth = lives.bytes[inside].sum() <= _LARGE * total and loops.isdisjoint(range(first, end))
        segments.append(_Segment(first, end, [values[k] for k in inside] if worth else []))
    return segments


def _layer_loops(graph: BlockGraph, backward: int) -> set[int]:
    """The loops that run a step's layers: few, and each read by another loop. `with_recompute` handles them."""
    loops = {n for n, operation in enumerate(graph.operations[:backward]) if operation.name == WHILE}
    read = {
        graph.place.get(v)
        for n in range(backward, graph.end)
        if graph.operations[n].name == WHILE
        for v in graph.reads[n]
    }
    return loops & read if len(loops & read) <= _FEW else set()


def _recompute_segment(graph: BlockGraph, segment: _Segment, available: set[Any], backward: int) -> bool:
    """Recomputes a segment from known values, and makes the backward pass read the recomputed ones."""
    missing = [value for value in segment.needed if value not in available]
    readers = sorted({reader for value in missing for reader in graph.readers[value] if reader >= backward})
    makers = graph.makers(missing, available)
    if not makers or not readers:
        return False
    computed = {result for n in makers for result in graph.operations[n].results}
    inputs = list(dict.fromkeys(v for n in makers for v in graph.reads[n] if v not in computed))
    # The last backward value that is computed before the first reader and that the readers need.
    places = {v: graph.place.get(v, -1) for reader in readers for v in graph.reads[reader] if graph.size(v)}
    gradients = [value for value, place in places.items() if backward <= place < readers[0]]
    gate = max(gradients, key=places.__getitem__, default=None)
    inputs += [gate] if gate is not None and gate not in inputs else []
    front = graph.operations[readers[0]]
    point, types = ir.InsertionPoint(front), [value.type for value in inputs]
    barrier = ir.Operation.create(BARRIER, results=types, operands=inputs, loc=front.location, ip=point)
    twins = dict(zip(inputs, barrier.results, strict=True))
    later = {} if gate is None else {gate: twins[gate]}
    clone((graph.operations[n] for n in makers), twins, point)
    later |= {value: twins[value] for value in missing}
    for number in {n for value in later for n in graph.readers[value] if n >= readers[0]}:
        replace_operands(graph.operations[number], later)
    return True


# ---------------------------------------------------------------- cuts between segments
# The backward pass rematerialises the segments one by one.
# Values alive at a cut are kept, and all others in a segment are recomputed from them (Chen et al., "Training Deep
# Nets with Sublinear Memory Cost", 2016). The cuts minimise the bytes of the kept values plus the largest segment:
# they fall between the layers of a deep network.

_STEP = 1.2  # ratio of successive bounds on the largest segment


@dataclass(frozen=True)
class Lifetimes:
    """Lifetimes of the values of the forward pass.

    Attributes:
        maker: statement that computes it. last: last statement of the forward pass that reads it. saved: whether the
            backward pass reads it.
    """

    maker: NDArray[np.int64]  # [values]
    last: NDArray[np.int64]  # [values]
    saved: NDArray[np.bool_]  # [values]
    bytes: NDArray[np.int64]  # [values]


def checkpoints(lifetimes: Lifetimes, end: int) -> tuple[tuple[int, ...], int]:
    """(the statements before which a segment ends, bytes alive at these cuts plus those that the largest segment saves)
    of the best cuts of a forward pass of `end` statements."""
    cuts = _candidates(lifetimes, end)
    kept, inner = _costs(lifetimes, [*cuts, end])
    kept[-1] = 0
    cap = float(np.max(np.diagonal(inner, 1)))
    best, least = tuple[int, ...](), int(inner[0, -1])
    while cap < least:
        total, chosen = _chain(kept, inner, cap)
        total += max(inner[a, b] for a, b in pairwise(chosen))
        if total < least:
            best, least = tuple(cuts[k] for k in chosen[1:-1]), int(total)
        cap = max(_STEP * cap, cap + 1)
    return best, least


def _candidates(lifetimes: Lifetimes, end: int) -> list[int]:
    """Candidate cuts: 0, then the local minima of the live bytes."""
    change = np.zeros(end + 2, dtype=np.int64)
    np.add.at(change, lifetimes.maker + 1, lifetimes.bytes)
    np.add.at(change, np.maximum(lifetimes.last, lifetimes.maker) + 1, -lifetimes.bytes)
    alive = np.cumsum(change)[: end + 1]
    minima, falling = [0], False
    for place in range(1, end):
        falling = falling or alive[place] < alive[place - 1]
        if falling and alive[place + 1] > alive[place]:
            minima.append(place)
            falling = False
    return minima


def _costs(lifetimes: Lifetimes, cuts: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """([later cut, cut] bytes made after the cut and alive at the later one, [cut, later cut] bytes saved between them
    and not alive at the later one)."""
    count = len(cuts)
    kept, inner = (np.zeros((count, count), dtype=np.int64) for _ in range(2))
    part = np.searchsorted(cuts, lifetimes.maker, side="right") - 1  # [values] last cut before its statement
    for later in range(1, count):
        before = lifetimes.maker < cuts[later]
        alive = before & (lifetimes.last >= cuts[later])
        for table, which in ((kept, alive), (inner, before & ~alive & lifetimes.saved)):
            sums = np.bincount(part[which], lifetimes.bytes[which], minlength=count)
            table[:, later] = np.cumsum(sums[::-1])[::-1]
    return kept.T, inner


def _chain(kept: NDArray[np.int64], inner: NDArray[np.int64], cap: float) -> tuple[float, list[int]]:
    """(bytes kept, cuts) with the fewest bytes kept such that no segment saves more than `cap` bytes."""
    count = len(inner)
    total = np.full(count, np.inf)
    total[0], before = 0, np.zeros(count, dtype=np.int64)
    for later in range(1, count):
        sums = np.where(inner[:later, later] <= cap, total[:later] + kept[later, :later], np.inf)
        before[later] = np.argmin(sums)
        total[later] = sums[before[later]]
    chosen = [count - 1]
    while chosen[-1]:
        chosen.append(int(before[chosen[-1]]))
    return float(total[-1]), chosen[::-1]
