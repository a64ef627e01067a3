"""Evaluates plans, incrementally: an item's cost depends only on the few decisions that touch its groups.

Items whose patterns see the same class groups form one bucket; a bucket's cost is memoised on the decisions that concern it.
A new plan then costs a few dozen look-ups and one vector sum. Enters: a `Problem`. Leaves: `Cost` per plan, and for a chosen
plan its collectives and what is alive at the peak.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from toast_cli.cost.collectives import collective_seconds
from toast_cli.cost.compute import op_seconds
from toast_cli.cost.items import ArrayItem, Items, Reader, WorkItem, make_items
from toast_cli.cost.model import Alive, CollectiveUse, Cost
from toast_cli.cost.timeline import Timeline
from toast_cli.dimensions.model import SlotKind
from toast_cli.plan.decisions import Plan
from toast_cli.plan.iteration import Iteration
from toast_cli.plan.layout import Layout, shards
from toast_cli.plan.problem import Problem
from toast_cli.plan.reshard import reshard_steps
from toast_cli.program.model import ARGUMENT, CARRY

Vector = NDArray[np.float32]  # [moments] bytes


@dataclass(frozen=True, slots=True)
class _Share:
    """What one bucket adds to a plan's cost. `alive` [moments] bytes."""

    compute: float
    communication: float
    arguments: float
    alive: Vector


@dataclass(slots=True)
class _Bucket:
    groups: frozenset[int]
    roles: frozenset[int]
    work: list[WorkItem] = field(default_factory=list)
    arrays: list[ArrayItem] = field(default_factory=list)
    memo: dict[Plan, _Share] = field(default_factory=dict)


class Evaluator:
    """Costs of plans for one problem. `evaluations` counts the calls of `cost`."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.items: Items = make_items(problem)
        self.timeline = Timeline(problem.program, self.items.lives)
        self.evaluations = 0
        self._sizes = problem.mesh.sizes
        self._iterations: dict[tuple[int, Plan], Iteration] = {}
        self._collectives: dict[tuple[str, float, tuple[int, ...]], float] = {}
        self._presence: dict[tuple[int, ...], Vector] = {}
        self._copies: dict[tuple[int, tuple[int, ...]], Vector] = {}
        self._buckets = self._make_buckets()

    # -- whole plans ---------------------------------------------------------------------------------------------

    def cost(self, plan: Plan) -> Cost:
        """Predicted step time and peak memory of `plan`."""
        self.evaluations += 1
        compute = communication = arguments = 0.0
        alive = np.zeros(len(self.timeline.moments), np.float32)
        for bucket in self._buckets:
            share = self._share(bucket, plan)
            compute += share.compute
            communication += share.communication
            arguments += share.arguments
            alive += share.alive
        return Cost(compute, communication, float(alive.max(initial=0.0)), arguments)

    def collectives(self, plan: Plan) -> list[CollectiveUse]:
        """Every collective of `plan`, equal ones of one item together, the most expensive first."""
        found: list[CollectiveUse] = []
        for bucket in self._buckets:
            for work in bucket.work:
                found.extend(self._work_collectives(work, plan))
            for array in bucket.arrays:
                found.extend(self._array_collectives(array, plan))
        return sorted(found, key=lambda use: -use.seconds)

    def alive_at_peak(self, plan: Plan) -> tuple[int, list[Alive]]:
        """Op number at which memory peaks under `plan`, and the arrays alive there, largest first."""
        total = np.zeros(len(self.timeline.moments), np.float32)
        for bucket in self._buckets:
            total += self._share(bucket, plan).alive
        moment = self.timeline.moments[int(total.argmax())] if len(total) else 0
        found: list[Alive] = []
        for bucket in self._buckets:
            for item in bucket.arrays:
                found.extend(self._alive(item, plan, moment))
        return moment // 2, sorted(found, key=lambda a: -a.bytes)

    # -- buckets -------------------------------------------------------------------------------------------------

    def _make_buckets(self) -> list[_Bucket]:
        patterns, groups_of = self.problem.patterns, self.problem.pattern_groups
        buckets: dict[tuple[frozenset[int], frozenset[int]], _Bucket] = {}

        def bucket(numbers: Iterable[int]) -> _Bucket:
            used = set(numbers)
            groups = frozenset().union(*(groups_of[p] for p in used))
            roles = frozenset(patterns[p].role for p in used)
            return buckets.setdefault((groups, roles), _Bucket(groups, roles))

        for work in self.items.work:
            bucket([work.pattern]).work.append(work)
        for array in self.items.arrays:
            bucket([array.pattern, *(r.pattern for r in array.readers)]).arrays.append(array)
        return list(buckets.values())

    def _share(self, bucket: _Bucket, plan: Plan) -> _Share:
        key = self.problem.relevant(plan, bucket.groups, bucket.roles)
        share = bucket.memo.get(key)
        if share is None:
            share = bucket.memo[key] = self._compute_share(bucket, key)
        return share

    def _compute_share(self, bucket: _Bucket, plan: Plan) -> _Share:
        compute = communication = arguments = 0.0
        alive = np.zeros(len(self.timeline.moments), np.float32)
        for work in bucket.work:
            compute += self._work_seconds(work, plan)
            communication += sum(use.seconds for use in self._work_collectives(work, plan))
        for item in bucket.arrays:
            communication += sum(use.seconds for use in self._array_collectives(item, plan))
            for count, size, _ in self._memory(item, plan):
                alive += count * np.float32(size)
            if self.problem.program.ops[self.problem.program.producer[item.values[0]]].name == ARGUMENT:
                arguments += len(item.values) * self._local(item.bytes, self._made(item, plan))
        return _Share(compute, communication, arguments, alive)

    # -- items ---------------------------------------------------------------------------------------------------

    def _iteration(self, pattern: int, plan: Plan) -> Iteration:
        role = frozenset([self.problem.patterns[pattern].role])
        key = (pattern, self.problem.relevant(plan, self.problem.pattern_groups[pattern], role))
        found = self._iterations.get(key)
        if found is None:
            found = self._iterations[key] = self.problem.iterate(pattern, key[1])
        return found

    def _local(self, size: float, layout: Layout) -> float:
        return size / shards(layout, self._sizes)

    def _seconds(self, kind: str, result_bytes: float, axes: tuple[int, ...]) -> float:
        key = (kind, result_bytes, axes)
        found = self._collectives.get(key)
        if found is None:
            found = self._collectives[key] = collective_seconds(self.problem.mesh, kind, result_bytes, axes)
        return found

    def _work_seconds(self, work: WorkItem, plan: Plan) -> float:
        iteration = self._iteration(work.pattern, plan)
        ways = 1
        for axes in iteration.slot_axes:
            for axis in axes:
                ways *= self._sizes[axis]
        traffic = sum(self._local(b, at) for b, at in zip(work.operand_bytes, iteration.operands, strict=True) if b)
        traffic += sum(self._local(b, at) for b, at in zip(work.result_bytes, iteration.computed, strict=True) if b)
        return work.runs * op_seconds(self.problem.mesh.chip, work.name, work.dtype, work.flops / ways, traffic)

    def _work_collectives(self, work: WorkItem, plan: Plan) -> Iterator[CollectiveUse]:
        """All-reduces and reduce-scatters of partial results, halo exchanges of split neighbourhoods."""
        iteration = self._iteration(work.pattern, plan)
        results = self.problem.program.ops[work.op].results
        if iteration.reduced or any(iteration.scattered):
            for k, whole in enumerate(work.whole_bytes):
                size = self._local(whole, iteration.computed[k])
                if iteration.scattered[k]:
                    for axis in iteration.scattered[k]:
                        size /= self._sizes[axis]
                    yield self._use("reduce-scatter", iteration.scattered[k], size, work.runs, work.op, results[k])
                over = tuple(a for a in iteration.reduced if a not in iteration.scattered[k])
                if over:
                    yield self._use("all-reduce", over, size, work.runs, work.op, results[k])
        form = self.problem.patterns[work.pattern].form
        for slot, axes in enumerate(iteration.slot_axes):
            if axes and form.kinds[slot] is SlotKind.PERMUTATION:
                count = 1
                for axis in axes:
                    count *= self._sizes[axis]
                part = _HALO / (max(form.extents[slot]) / count) if work.name in _STENCILS else 1.0
                size = self._local(work.whole_bytes[0], iteration.computed[0]) * min(1.0, part)
                yield self._use("collective-permute", axes, size, work.runs, work.op, results[0])

    def _made(self, item: ArrayItem, plan: Plan) -> Layout:
        return self._iteration(item.pattern, plan).layouts[item.result]

    def _wanted(self, item: ArrayItem, plan: Plan) -> dict[Layout, list[int]]:
        """Layouts in which readers need the array, other than the one it has -> places in `item.readers`."""
        made = self._made(item, plan)
        wanted: dict[Layout, list[int]] = {}
        if not item.free:
            for place, reader in enumerate(item.readers):
                layout = self._iteration(reader.pattern, plan).operands[reader.position]
                if layout != made:
                    wanted.setdefault(layout, []).append(place)
        return wanted

    def _array_collectives(self, item: ArrayItem, plan: Plan) -> Iterator[CollectiveUse]:
        """Reshards between where an array is made and where it is read; equal ones are shared."""
        if not item.readers or item.free:
            return
        made = self._made(item, plan)
        for layout, places in self._wanted(item, plan).items():
            runs = max(item.readers[p].runs for p in places) * len(item.values)
            for step in reshard_steps(made, layout, self._sizes):
                op = self._reader_op(item, item.readers[places[0]])
                yield self._use(step.kind, step.axes, item.bytes * step.fraction, runs, op, item.values[0])

    def _reader_op(self, item: ArrayItem, reader: Reader) -> int:
        for op, position in self.problem.program.users[item.values[0]]:
            if position == reader.position and self.problem.op_pattern[op] == reader.pattern:
                return op
        return self.problem.program.producer[item.values[0]]

    def _use(self, kind: str, axes: tuple[int, ...], size: float, count: float, op: int, value: int) -> CollectiveUse:
        return CollectiveUse(kind, axes, size, count, count * self._seconds(kind, size, axes), op, value)

    # -- memory --------------------------------------------------------------------------------------------------

    def _memory(self, item: ArrayItem, plan: Plan) -> Iterator[tuple[Vector, float, bool]]:
        """(how many are alive at each moment, bytes of one, whether it is a resharded copy)."""
        made = self._made(item, plan)
        if item.stored:
            presence = self._presence.get(item.values)
            if presence is None:
                presence = self._presence[item.values] = self.timeline.presence(self._intervals(item))
            yield presence, self._local(item.bytes, made), False
        for layout, places in self._wanted(item, plan).items():
            if reshard_steps(made, layout, self._sizes):
                key = (item.values[0], tuple(places))
                copies = self._copies.get(key)
                if copies is None:
                    copies = self._copies[key] = self.timeline.presence(self._copy_intervals(item, places))
                yield copies, self._local(item.bytes, layout), True

    def _intervals(self, item: ArrayItem) -> Iterator[tuple[int, int]]:
        for value in item.values:
            yield from self.items.lives.intervals[value]

    def _copy_intervals(self, item: ArrayItem, places: list[int]) -> Iterator[tuple[int, int]]:
        """From the first to the last read of a resharded copy, per array."""
        wanted = {(item.readers[p].pattern, item.readers[p].position) for p in places}
        for value in item.values:
            reads = [
                (op, position) for op, position in self.problem.program.users[value]
                if (self.problem.op_pattern[op], position) in wanted and self.problem.program.ops[op].name != CARRY
            ]  # fmt: skip
            if reads:
                yield 2 * reads[0][0], max(self.items.lives.read_at[read] for read in reads)

    def _alive(self, item: ArrayItem, plan: Plan, moment: int) -> Iterator[Alive]:
        made = self._made(item, plan)
        maker = self.problem.program.ops[self.problem.program.producer[item.values[0]]].name
        role = {ARGUMENT: "argument", CARRY: "carry"}.get(maker, "temporary")
        if item.stored:
            for value in item.values:
                if any(first <= moment <= last for first, last in self.items.lives.intervals[value]):
                    yield Alive(value, self._local(item.bytes, made), role)
        one = defaultdict(list)
        for layout, places in self._wanted(item, plan).items():
            if reshard_steps(made, layout, self._sizes):
                one[layout] = places
        for layout, places in one.items():
            for value in item.values:
                single = ArrayItem(item.pattern, item.result, item.bytes, item.free, item.stored, item.readers, (value,))
                if any(first <= moment <= last for first, last in self._copy_intervals(single, places)):
                    yield Alive(value, self._local(item.bytes, layout), "gathered")


# Rows of neighbours a split stencil needs from both sides together: a 3-wide window. Ops whose neighbours are that near.
_HALO = 2.0
_STENCILS = frozenset({"stablehlo.convolution", "stablehlo.reduce_window", "stablehlo.select_and_scatter", "stablehlo.pad"})
