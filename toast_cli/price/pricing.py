"""Prices the communication of single items, given the shardings around them: collectives, and the copies they make.

In: work and array items with the op shardings of the patterns they touch. Out: collectives with their seconds. It
does not depend on earlier plans; the evaluator memoises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from toast_cli.plan.loops import LOOP_EDGES
from toast_cli.plan.partials import (
    ALL_REDUCE,
    REDUCE_SCATTER,
    CollectiveStep,
    Completion,
    Cuts,
    Partial,
    completed,
    completion_of,
    partial_of,
)
from toast_cli.plan.partitioned import Reason
from toast_cli.plan.problem import Problem
from toast_cli.plan.reshard import (
    GATHER,
    Copy,
    ReshardStep,
    Transfer,
    copies_of,
    moves_of,
    neighbours,
    reshard_steps,
    rotations,
    spread,
)
from toast_cli.plan.sharding import OpSharding, Sharding, axes_of, shards, split_further
from toast_cli.price.arrays import ArrayItem, reader_op
from toast_cli.price.collectives import collective_seconds
from toast_cli.price.compiled_collectives import (
    ScatterDecisions,
    ScatterSource,
    latency_part,
    stays_gather,
    stays_slice_gather,
)
from toast_cli.price.cost import CollectiveUse
from toast_cli.price.items import Carried, Items, NeighbourItem, SumItem, WorkItem, op_sharding_finder, reduced
from toast_cli.price.kernel_pricing import RegionPrices
from toast_cli.price.memo import Bucket

# Pattern -> its op sharding under the current plan; also `LOOP_EDGES` where loops have loop-invariant reads.
Lowered = dict[int, OpSharding]


class _ReducedOps(NamedTuple):
    """The ops whose partial results are reduced: `op` and all equal ones, `runs` times in one run of the program.
    needed: [results] fraction of the bits that readers need. terms: number of partial results that are added first.
    share: see `SumItem`. each: all-reduces in one run, see `reductions_each`. separate: see
    `partials.Reduction.separate`."""

    op: int
    runs: float
    needed: tuple[float, ...]
    late: bool
    share: float
    terms: int = 1
    each: float = 1.0
    separate: bool = False


class Pricer:
    """Prices items of one problem."""

    def __init__(self, problem: Problem, items: Items, regions: RegionPrices) -> None:
        self._problem = problem
        self._regions = regions
        self._items = items
        self._sizes = problem.mesh.sizes
        self._seconds: dict[tuple[str, float, tuple[int, ...], float], float] = {}
        self._profile = items.compilation.profile
        self._scatters = ScatterDecisions(problem, self._profile)
        self._steps: dict[tuple[Partial, Completion, Cuts], tuple[CollectiveStep, ...]] = {}

    def collectives(self, items: Items | Bucket, lowered: Lowered) -> Iterator[CollectiveUse]:
        """All collectives of some items."""
        for work in items.work:
            yield from self.work_collectives(work, lowered[work.pattern])
        for added in items.sums:
            yield from self.sum_collectives(added, lowered)
        for read in items.neighbours:
            yield from self.neighbour_collectives(read, lowered)
        for array in items.arrays:
            source = lowered[array.pattern].shardings[array.result]
            yield from self.array_collectives(array, source, self.copies(array, lowered))

    # -- collectives of work items ----------------------------------------------------------------------------

    def work_collectives(self, work: WorkItem, op_sharding: OpSharding) -> Iterator[CollectiveUse]:
        """All-reduces and reduce-scatters of partial results outside sums, reshards to pinned shardings, permutes of
        ops that move elements, and collectives of manual regions."""
        if work.region >= 0:
            yield from self._regions.price[work.region](op_sharding.factor_axes).collectives_in(work.runs)
        results = self._problem.program.ops[work.op].results
        if not work.summed and (op_sharding.reduced or any(op_sharding.scattered)):
            how = _ReducedOps(work.op, work.runs, work.needed, work.late, work.share)
            for k, whole_bytes in enumerate(work.whole_bytes):
                partial = partial_of(op_sharding, k)
                if partial is not None:
                    yield from self._reductions(op_sharding, partial, k, whole_bytes, how)
        for k, (source, target) in enumerate(zip(op_sharding.reduced_to, op_sharding.shardings, strict=True)):
            for step in reshard_steps(source, target, self._sizes, self._shape(results[k])):
                written = (step.kind, work.whole_bytes[k] * step.fraction)
                size, waited_for = written[1] * work.needed[k], not work.late
                seconds = self._seconds_of(step.kind, size, step.axes)
                seconds *= work.runs
                yield CollectiveUse(
                    step.kind, step.axes, size, work.runs, seconds, work.op, results[k], waited_for, written, "pin"
                )
        op = self._problem.program.ops[work.op]
        kinds, size = self._problem.patterns[work.pattern].form.kinds, work.whole_bytes[0]
        sent = rotations(op, size, kinds, op_sharding, self._sizes)
        yield from self._exchanged(sent, work.runs, work.op, results[0])
        for k, exchange in spread(op, work.whole_bytes, op_sharding, self._sizes):
            yield from self._exchanged([exchange], work.runs, work.op, results[k], "one device")

    def neighbour_collectives(self, item: NeighbourItem, lowered: Lowered) -> Iterator[CollectiveUse]:
        """Halo exchanges of arrays that are read through windows."""
        sent = [exchange for exchange, _ in neighbours(item.bytes, item.reads(lowered), self._sizes)]
        yield from self._exchanged(sent, item.runs, item.op, item.value)

    def _exchanged(
        self, sent: Iterable[Transfer], runs: float, op: int, value: int, reason: Reason = "neighbours"
    ) -> Iterator[CollectiveUse]:
        for kind, axes, size in sent:
            seconds = runs * self._seconds_of(kind, size, axes)
            yield CollectiveUse(kind, axes, size, runs, seconds, op, value, True, (kind, size), reason)

    def sum_collectives(self, item: SumItem, lowered: Lowered) -> Iterator[CollectiveUse]:
        """All-reduces and reduce-scatters of partial results that are terms of sums."""
        for part in reduced(item, lowered):
            term, number = item.terms[part.place], item.ops[part.place]
            needed = item.needed if part.count == len(item.terms) else 1.0
            how = _ReducedOps(number, item.runs, (needed,), item.late, item.share, part.count, item.each, part.separate)
            if part.partial is not None:
                yield from self._reductions(part.op_sharding, part.partial, 0, term.bytes, how, part.cut)
        if item.into is not None and item.left(lowered) is None:
            yield from self._to_carry(item, item.into, lowered)

    def _to_carry(self, item: SumItem, into: tuple[Carried, int], lowered: Lowered) -> Iterator[CollectiveUse]:
        """Reshards of a sum that is reduced in each trip to the sharding in which the loop adds it to its carry."""
        carried, place = into
        reader, position = carried.first[place]
        source = op_sharding_finder(item.within, lowered)(item.steps[-1].op).shardings[0]
        steps = reshard_steps(source, lowered[reader].operands[position], self._sizes, self._shape(item.end))
        sent = [Transfer(step.kind, step.axes, item.terms[0].bytes * step.fraction) for step in steps]
        yield from self._exchanged(sent, item.runs, item.ops[0], item.end, "reshard")

    def _steps_of(self, partial: Partial, how: Completion, cut: Cuts) -> tuple[CollectiveStep, ...]:
        key = partial, how, cut
        if key not in self._steps:
            self._steps[key] = tuple(completed(partial, self._sizes, how, cut))
        return self._steps[key]

    def _reductions(
        self, op_sharding: OpSharding, partial: Partial, k: int, whole_bytes: int, how: _ReducedOps, cut: Cuts = ()
    ) -> Iterator[CollectiveUse]:
        """Collectives that complete partial result k, an array of `whole_bytes`. cut: see `completed`."""
        sharding, alone = op_sharding.computed[k], how.terms == 1
        op = self._problem.program.ops[how.op]
        completion = completion_of(op, op_sharding, k, self._sizes, how.terms, separate=how.separate)
        for step in self._steps_of(partial, completion, cut):
            size = whole_bytes * step.fraction
            if step.kind != REDUCE_SCATTER:
                yield self._reduction(step.kind, step.axes, size, k, how)
                continue
            first = step.after is None and self._scatters.reduced_first(how.op, op_sharding, cut[0])
            if first or not self._scatters.stays(ScatterSource(how.op, k, alone), step.axes, sharding, op_sharding):
                before = size * shards((step.axes,), self._sizes)
                yield self._reduction("all-reduce", step.axes, before, k, how, (step.kind, size))
            else:
                yield self._reduction(step.kind, step.axes, size, k, how)
            if not first:
                sharding = split_further(sharding, op_sharding.reduced_to[k], step.axes)

    def _reduction(
        self,
        kind: str,
        axes: tuple[int, ...],
        size: float,
        k: int,
        how: _ReducedOps,
        written: tuple[str, float] | None = None,
    ) -> CollectiveUse:
        moved = size * how.needed[k] if kind == "all-reduce" else size
        seconds = self._seconds_of(kind, moved, axes, how.share)
        seconds *= how.each if kind == "all-reduce" and written is None else 1.0
        value = self._problem.program.ops[how.op].results[k]
        seconds *= how.runs
        return CollectiveUse(
            kind, axes, moved, how.runs, seconds, how.op, value, not how.late, written or (kind, size), "partial"
        )

    # -- arrays --------------------------------------------------------------------------------------------------

    def is_cut_late(self, item: ArrayItem, op_sharding: OpSharding) -> bool:
        """Whether the item's reduce-scattered arrays are in fact all-reduced, and each device slices them where it
        reads them. op_sharding: of the op that makes them."""
        op, k = self._problem.program.producer[item.values[0]], item.result
        partial = partial_of(op_sharding, k)
        if partial is None or not item.waited_for:
            return False
        how = completion_of(self._problem.program.ops[op], op_sharding, k, self._sizes)
        sharding = partial.sharding
        for step in self._steps_of(partial, how, ()):
            if step.kind != REDUCE_SCATTER:
                return step.kind == ALL_REDUCE and not axes_of(sharding).issuperset(axes_of(partial.to))
            if not self._scatters.stays(ScatterSource(op, k), step.axes, sharding, op_sharding):
                return True
            sharding = split_further(sharding, partial.to, step.axes)
        return False

    def shardings_of(self, item: ArrayItem, lowered: Lowered) -> tuple[Sharding, list[Sharding]]:
        """(sharding in which the array is made, [readers] sharding that each takes)."""
        source = lowered[item.pattern].shardings[item.result]
        return source, [lowered[reader.pattern].operands[reader.position] for reader in item.readers]

    def copies(self, item: ArrayItem, lowered: Lowered) -> list[Copy]:
        """Copies of the array in the other shardings that its readers need, if making them communicates."""
        if item.free or not item.readers:
            return []
        source, needed = self.shardings_of(item, lowered)
        wholly = [reader.whole_if_ahead for reader in item.readers]
        held = axes_of(lowered[LOOP_EDGES].factor_axes) if item.at_edges else ()
        return copies_of(source, needed, self._sizes, item.shape, wholly, held)

    def moved_bytes(self, item: ArrayItem, places: tuple[int, ...]) -> float:
        """Bytes of one whole array as it is moved and stored for the readers at those places: in the narrowest type
        that they take, see `Narrowing`."""
        return item.bytes * max([item.readers[place].needed for place in places])

    def array_collectives(self, item: ArrayItem, source: Sharding, copies: list[Copy]) -> Iterator[CollectiveUse]:
        """Reshards between the producer of an array and its readers."""
        for step, _, _, places, ahead in moves_of(source, copies):
            first = item.readers[places[0]]
            op = reader_op(self._problem, item, first.pattern, first.position)
            value = item.values[0]
            written = (step.kind, item.bytes * step.fraction)
            size = self.moved_bytes(item, places) * step.fraction
            kind = self._as_emitted(step, value, shards(source, self._sizes))
            waited_for, count = item.waited_for, item.runs_of(places, ahead=ahead) * len(item.values)
            seconds = count * self._seconds_of(kind, size, step.axes)
            yield CollectiveUse(kind, step.axes, size, count, seconds, op, value, waited_for, written, "reshard")

    def _as_emitted(self, step: ReshardStep, value: int, pieces: int) -> str:
        """The collective that XLA emits for a reshard step of a value in that many shards."""
        profile, size = self._profile, self._problem.program.values[value].bytes * step.fraction
        stays = step.kind != GATHER or (
            stays_gather(profile, self._shape(value), pieces)
            and stays_slice_gather(profile, self._problem.mesh, step.axes, size)
        )
        return step.kind if stays else ALL_REDUCE

    def _shape(self, value: int) -> tuple[int, ...]:
        return self._problem.program.values[value].shape

    def inside_bytes(self, item: ArrayItem, op_sharding: OpSharding) -> float:
        """Peak bytes on one device inside the manual region that makes the item."""
        return self._regions.price[item.region](op_sharding.factor_axes).bytes

    def local(self, size: float, sharding: Sharding) -> float:
        """Bytes on one device of an array of `size` bytes."""
        return size / shards(sharding, self._sizes)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _seconds_of(self, kind: str, size: float, axes: tuple[int, ...], share: float = 1.0) -> float:
        """Seconds of one collective. share: see `collectives.latency_part`."""
        key = (kind, size, axes, share)
        if key not in self._seconds:
            part = latency_part(kind, size, share, self._profile)
            self._seconds[key] = collective_seconds(self._problem.mesh, kind, size, axes, latency_part=part)
        return self._seconds[key]
