"""Evaluates plans incrementally: the cost of an item (an array or a kernel) depends only on the shardings of the ops
that make and read it.

Items that the same decisions affect form one bucket. What a bucket adds to the cost is remembered for each combination
of those shardings, which are numbered (see `op_sharding_memo`). A plan is evaluated as a change to an earlier one: only
buckets in which a sharding changed are looked up again. In: a `Problem`. Out: `Cost` per plan, and for a chosen
plan its collectives and the arrays alive at the peak.

A worked example: the docstring of `toast_cli.plan`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product
from math import inf

import numpy as np

from toast_cli.compiler.gpu_libraries import temporary_growth
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.profiles import find_profile
from toast_cli.cost.corrections import NO_CORRECTIONS, Corrections
from toast_cli.cost.model import Alive, CollectiveUse, Cost, KernelUse
from toast_cli.evaluate.array_items import ArrayItem
from toast_cli.evaluate.array_kernels import ArrayKernels
from toast_cli.evaluate.buckets import QUANTUM, Bucket, Key, Share, Vector, make_buckets, quanta
from toast_cli.evaluate.buffers import Buffers, CountedBuffers, Kind
from toast_cli.evaluate.expected_step import Placed, Windows
from toast_cli.evaluate.items import Items, make_items
from toast_cli.evaluate.kernel_pricing import WorkPricer
from toast_cli.evaluate.manual_regions import region_prices
from toast_cli.evaluate.op_sharding_memo import DecisionNumbers, OpShardingMemo, RowNumbers
from toast_cli.evaluate.pricing import Lowered, Pricer
from toast_cli.evaluate.share_memo import ShareMemo
from toast_cli.evaluate.timeline import Spans, Timeline
from toast_cli.plan.decisions import Plan
from toast_cli.plan.lower import lower
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.problem import Problem

GroupSeconds = Mapping[tuple[int, int], float]  # two groups, in either order -> seconds

MEMO_LIMIT = 400_000  # rows and shares in the memos before they are cleared
MOST_PLACED = 500  # parts of plans in each bucket's memo of `Placed`, which are large
# Share of a step below which communication that could overlap with compute is taken not to.
NEGLIGIBLE = 1e-4


@dataclass(frozen=True, slots=True)
class _State:
    """An evaluated plan. steps: its decisions (see `op_sharding_memo`); rows: [views] row numbers; shares: [buckets];
    the others: sums over the shares."""

    steps: DecisionNumbers
    rows: list[int]
    shares: list[Share]
    compute: int
    communication: int
    overlapping: int
    transfers: int
    arguments: int
    alive: Vector  # [moments]


class Evaluator:
    """Costs of plans for one problem. `evaluations` counts the calls of `cost`.

    Args:
        references: plans whose memory peaks decide which moments are evaluated. like: an evaluator of the same program
            for the same chip, if any: it supplies what does not depend on mesh and decisions.
        profile: of the compiler; default: the newest for the mesh's chip.
    """

    def __init__(
        self,
        problem: Problem,
        references: Iterable[Plan] = (),
        like: Evaluator | None = None,
        corrections: Corrections = NO_CORRECTIONS,
        profile: CompilerProfile | None = None,
    ) -> None:
        self.problem = problem
        self._corrections = corrections
        self.profile = profile or find_profile(problem.mesh.chip)
        known = like.items.compilation if like and like.serves(problem) and like.profile == self.profile else None
        self.items: Items = make_items(problem, self.profile, known)
        self.evaluations = 0
        self._growth = temporary_growth(problem.program, self.items.stored, self.profile)
        regions = region_prices(problem, self.profile, corrections)
        self._pricer = Pricer(problem, self.items, corrections, regions)
        self._work = WorkPricer(problem, self.profile, regions)
        self._arrays = ArrayKernels(problem, self.profile)
        self._holdings = Buffers(problem, self.items, self._pricer)
        self.timeline = Timeline(self.items.lives, self._holdings.on_chip.capacity)
        self._rows = OpShardingMemo(problem)
        self._sharing = ShareMemo(
            self._pricer, self._work, self._arrays, self._holdings, self.timeline, self.profile.asynchronous
        )
        self._buckets = make_buckets(self.items, self._rows)
        self._of_view: dict[int, list[int]] = defaultdict(list)  # view -> buckets that depend on it
        for number, bucket in enumerate(self._buckets):
            for view in bucket.views:
                self._of_view[view].append(number)
        self._shares = 0  # memoised, in all buckets
        # The plan evaluated last and the one it was derived from: the next plans mostly differ little from one of them.
        self._state: _State | None = None
        self._before: _State | None = None
        self._lowered: tuple[Plan, PartitionedProgram] | None = None  # the last one requested
        self.timeline.select([self.memory_profile(plan) for plan in ((), *references)])

    def serves(self, problem: Problem) -> bool:
        """Whether another problem has the same program and the same chip."""
        return self.problem.program is problem.program and self.problem.mesh.chip == problem.mesh.chip

    def of(self, problem: Problem) -> Evaluator:
        """An evaluator with the same prices for another problem of the same program and chip."""
        return Evaluator(problem, (), self, self._corrections, self.profile)

    def lowered(self, plan: Plan) -> PartitionedProgram:
        """`plan` lowered to every op, value and use. Memoises the last plan, which a report and a file both ask for."""
        if self._lowered is None or self._lowered[0] != plan:
            self._lowered = plan, lower(self.problem, plan)
        return self._lowered[1]

    # -- whole plans ---------------------------------------------------------------------------------------------

    def cost(self, plan: Plan, below: float = inf) -> Cost:
        """Expected step time and peak memory of `plan`; memory at selected moments only, see `exact_cost`.

        below: a plan that takes this many seconds, however its communication overlaps, is not simulated.
        """
        self.evaluations += 1
        state = self._evaluate(plan)
        arguments = float(state.arguments)
        peak = self._grown(float(state.alive.max(initial=0.0)), arguments)
        compute = state.compute * QUANTUM * self._corrections.compute
        communication, transfers = state.communication * QUANTUM, state.transfers * QUANTUM
        cost = Cost(compute, communication, peak, arguments, self._axis_seconds(state.rows), transfers)
        overlapping = state.overlapping * QUANTUM
        if overlapping <= NEGLIGIBLE * cost.most_seconds or cost.most_seconds - overlapping >= below:
            return cost
        return replace(cost, exposed_seconds=self._added(self._placed(state.rows), communication))

    def exact_cost(self, plan: Plan, *, learn: bool = True) -> Cost:
        """`cost` with memory evaluated at every moment, and the lower bound of the step.

        learn: True to add the moment of the peak to the selected ones.
        """
        cost = self.cost(plan)
        profile = self.memory_profile(plan)
        place = int(profile.argmax()) if len(profile) else 0
        peak = self._grown(float(profile[place]) if len(profile) else 0.0, cost.argument_bytes)
        if learn and peak > cost.peak_bytes * 1.000001 and self.timeline.add(place):
            self._forget()
        least = self._added(self._placed(self._evaluate(plan).rows), cost.communication_seconds, every=True)
        # A schedule in which more collectives overlap is not always the shorter one.
        least = min(least, cost.communication_seconds if cost.exposed_seconds is None else cost.exposed_seconds)
        return replace(cost, peak_bytes=max(peak, cost.peak_bytes), least_exposed_seconds=least)

    def exposed_beside(self, plan: Plan, uses: Sequence[CollectiveUse]) -> float:
        """Seconds that other collectives add beside the kernels of `plan`, as the compiler overlaps them."""
        placed = self._windows.placed(self.kernels(plan), uses, self.profile.asynchronous)
        return self._added([placed], sum(use.seconds for use in uses))

    def _added(self, placed: Sequence[Placed], communication: float, *, every: bool = False) -> float:
        """Seconds that communication adds to a step: what is exposed, and what the rest takes from compute."""
        exposed = min(communication, self._windows.exposed(placed, every=every))  # but for rounding it is
        return exposed + self.profile.communicating * (communication - exposed)

    def _grown(self, alive: float, arguments: float) -> float:
        """Peak bytes with the growth of temporaries by the chip's compiler; arguments keep their size."""
        growth = self._growth * self._corrections.memory
        return alive if growth == 1.0 else arguments + growth * (alive - arguments)

    def unlearn(self) -> None:
        """Resets the selected moments to the initial ones."""
        if self.timeline.reset():
            self._forget()

    def memory_profile(self, plan: Plan) -> Vector:
        """[timeline.candidates] bytes alive at every moment at which memory can peak."""
        rows = self._rows_of(plan)
        return self.timeline.profile([self._bucket_spans(bucket, rows) for bucket in self._buckets])

    def host_bytes(self, plan: Plan) -> float:
        """Peak bytes of one device's arrays in host memory."""
        changes: dict[int, float] = defaultdict(float)
        for item, lowered in self._lowered_arrays(plan):
            size, intervals = self._holdings.on_host(item, lowered[item.pattern])
            for first, last in intervals:
                changes[first] += size
                changes[last + 1] -= size
        return max(accumulate(changes[moment] for moment in sorted(changes)), default=0.0)

    def collectives(self, plan: Plan) -> list[CollectiveUse]:
        """Every collective of `plan`, equal ones of one item merged, the most expensive first."""
        rows = self._evaluate(plan).rows
        found = [use for bucket in self._buckets for use in self._bucket_collectives(bucket, rows)]
        return sorted(found, key=lambda use: -use.seconds)

    def parts(self, plan: Plan) -> dict[tuple[int, Key], float]:
        """(bucket, rows of its views) -> seconds of a step. A key that two plans share stands for the same kernels and
        collectives in both."""
        state = self._evaluate(plan)
        shares = enumerate(zip(self._buckets, state.shares, strict=True))
        return {(k, b.key(state.rows)): (s.compute + s.communication) * QUANTUM for k, (b, s) in shares}

    def seconds_between(self, plan: Plan) -> GroupSeconds:
        """Seconds of a step by pairs of groups: (g, g) -> all buckets that g affects; (g, h) -> all that both affect.
        This bounds the gain of any change to a plan that matters only there."""
        found: dict[tuple[int, int], float] = defaultdict(float)
        for bucket, share in zip(self._buckets, self._evaluate(plan).shares, strict=True):
            seconds = (share.compute + share.communication) * QUANTUM
            for one, other in product(bucket.groups, repeat=2):
                found[one, other] += seconds
        return found

    def kernels(self, plan: Plan) -> list[KernelUse]:
        """Work and time of every kernel of `plan`, equal ones merged, the longest first."""
        rows = self._evaluate(plan).rows
        found = [use for bucket in self._buckets for use in self._bucket_kernels(bucket, rows)]
        return sorted(found, key=lambda use: -use.seconds)

    def memory_by(self, plan: Plan, group: Callable[[int, str], str]) -> dict[str, Vector]:
        """Group -> [timeline.candidates] bytes alive, with the growth of temporaries by the chip's compiler.

        Args:
            group: maps a value's number and role (see `Alive`) to its group.
        """
        found: dict[str, CountedBuffers] = defaultdict(CountedBuffers)
        for item, lowered in self._lowered_arrays(plan):
            for kind, size in self._held(item, lowered):
                role = self._holdings.role(item, kind)
                grown = size if role == "argument" else self._growth * size
                members: dict[str, list[int]] = defaultdict(list)
                for value in item.values:
                    members[group(value, role)].append(value)
                for name, values in members.items():
                    found[name].add(self._holdings, replace(item, values=tuple(values)), kind, grown)
        return self.timeline.shared({name: held.spans(self.timeline) for name, held in found.items() if held.intervals})

    def alive_at_peak(self, plan: Plan) -> tuple[int, list[Alive]]:
        """Op number at which memory peaks under `plan`, and the arrays alive there, largest first."""
        profile = self.memory_profile(plan)
        moment = int(self.timeline.candidates[int(profile.argmax())]) if len(profile) else 0
        return moment // 2, self._alive_then(plan, moment)

    def alive_at(self, plan: Plan, op: int) -> list[Alive]:
        """The arrays alive under `plan` when an op runs, largest first."""
        return self._alive_then(plan, self.items.lives.times[op])

    def _alive_then(self, plan: Plan, moment: int) -> list[Alive]:
        found: list[tuple[Alive, bool]] = []
        for item, lowered in self._lowered_arrays(plan):
            found.extend(self._alive(item, lowered, moment))
        return sorted(self._holdings.on_chip.left(found), key=lambda a: -a.bytes)

    # -- one plan after another ----------------------------------------------------------------------------------

    def _evaluate(self, plan: Plan) -> _State:
        """The state of `plan`, derived from the nearer of the last two states."""
        if self._shares + self._rows.size > MEMO_LIMIT:
            self._forget()
        steps = self._rows.steps(plan)
        near = [state for state in (self._state, self._before) if state is not None]
        if not near:
            self._state = self._evaluate_whole(steps)
            return self._state
        state = min(near, key=lambda known: self._rows.distance(known.steps, steps))
        touches = self._rows.changed(state.steps, steps)
        if touches:
            self._before, self._state = state, self._evaluate_change(state, touches, steps)
            return self._state
        return state

    def _evaluate_whole(self, steps: DecisionNumbers) -> _State:
        rows = [self._rows.row(view, steps) for view in self._rows.views]
        shares = [self._share(bucket, rows) for bucket in self._buckets]
        alive = self.timeline.start()
        for share in shares:
            alive += share.alive
        return _State(
            steps, rows, shares, sum(s.compute for s in shares), sum(s.communication for s in shares),
            sum(s.overlapping for s in shares), sum(s.transfers for s in shares), sum(s.arguments for s in shares),
            alive,
        )  # fmt: skip

    def _evaluate_change(self, state: _State, touches: set[int], steps: DecisionNumbers) -> _State:
        """The state after a change: looks up only the views that the changed decisions touch, and their buckets."""
        rows, views, buckets = state.rows.copy(), self._rows.views, set()
        for number in {view for what in touches for view in self._rows.of_touch[what]}:
            row = self._rows.row(views[number], steps)
            if row != rows[number]:
                rows[number] = row
                buckets.update(self._of_view[number])
        compute, communication, overlapping = state.compute, state.communication, state.overlapping
        transfers, arguments = state.transfers, state.arguments
        alive, shares = state.alive.copy(), state.shares.copy()
        for number in buckets:
            share, before = self._share(self._buckets[number], rows), shares[number]
            compute += share.compute - before.compute
            communication += share.communication - before.communication
            overlapping += share.overlapping - before.overlapping
            transfers += share.transfers - before.transfers
            arguments += share.arguments - before.arguments
            if share.alive is not before.alive:
                alive += share.alive
                alive -= before.alive
            shares[number] = share
        return _State(steps, rows, shares, compute, communication, overlapping, transfers, arguments, alive)

    def _forget(self) -> None:
        """Clears everything that depends on the selected moments, and all shares."""
        for bucket in self._buckets:
            bucket.memo.clear()
            bucket.alive.clear()
            bucket.axis_memo.clear()
            bucket.placed.clear()
        self._rows.forget()
        self._sharing.forget()
        self._shares = 0
        self._state = self._before = None

    @cached_property
    def _windows(self) -> Windows:
        return Windows(self.problem, self.items.lives, self._corrections.compute)

    # -- buckets -------------------------------------------------------------------------------------------------

    def _share(self, bucket: Bucket, rows: list[int]) -> Share:
        key = bucket.key(rows)
        share = bucket.memo.get(key)
        if share is None:
            share = bucket.memo[key] = self._sharing.share(bucket, self._lower(bucket, rows))
            self._shares += 1
        return share

    def _axis_seconds(self, rows: list[int]) -> tuple[float, ...]:
        """[axes] seconds of the collectives over each; () where the goal names no axis."""
        if not self.problem.goal.axes:
            return ()
        total = np.zeros(len(self.problem.mesh.sizes))
        for bucket in self._buckets:
            key = bucket.key(rows)
            found = bucket.axis_memo.get(key)
            if found is None:
                found = bucket.axis_memo[key] = np.zeros(len(total))
                for use in self._bucket_collectives(bucket, rows):
                    found[list(use.axes)] += quanta(use.seconds) * QUANTUM
            total += found
        return tuple(total.tolist())

    def _placed(self, rows: list[int]) -> list[Placed]:
        """[buckets] kernels and collectives of each bucket's items, where they are in the program."""
        found = []
        for bucket in self._buckets:
            key = bucket.key(rows)
            placed = bucket.placed.get(key)
            if placed is None:
                if len(bucket.placed) == MOST_PLACED:
                    bucket.placed.clear()
                kernels, uses = self._bucket_kernels(bucket, rows), self._bucket_collectives(bucket, rows)
                placed = bucket.placed[key] = self._windows.placed(kernels, uses, self.profile.asynchronous)
            found.append(placed)
        return found

    def _bucket_kernels(self, bucket: Bucket, rows: list[int]) -> Iterator[KernelUse]:
        lowered = self._lower(bucket, rows)
        for work in bucket.work:
            yield from self._work.uses(work, lowered[work.pattern])
        for read in bucket.neighbours:
            yield from self._arrays.exchange_uses(self._pricer.neighbour_collectives(read, lowered))
        for item in bucket.arrays:
            copies = self._pricer.copies(item, lowered)
            yield from self._arrays.uses(item, *self._pricer.lies(item, lowered), copies)

    def _bucket_collectives(self, bucket: Bucket, rows: list[int]) -> Iterator[CollectiveUse]:
        lowered = self._lower(bucket, rows)
        for work in bucket.work:
            yield from self._pricer.work_collectives(work, lowered[work.pattern])
        for added in bucket.sums:
            yield from self._pricer.sum_collectives(added, lowered)
        for read in bucket.neighbours:
            yield from self._pricer.neighbour_collectives(read, lowered)
        for array in bucket.arrays:
            made = lowered[array.pattern].shardings[array.result]
            yield from self._pricer.array_collectives(array, made, self._pricer.copies(array, lowered))

    def _lower(self, bucket: Bucket, rows: RowNumbers) -> Lowered:
        views = self._rows.views
        return {pattern: views[view].rows[rows[view]][place] for pattern, view, place in bucket.places}

    def _held(self, item: ArrayItem, lowered: Lowered) -> Iterator[tuple[Kind, float]]:
        return self._holdings.held(item, lowered[item.pattern], self._pricer.copies(item, lowered))

    def _bucket_spans(self, bucket: Bucket, rows: list[int]) -> Spans:
        """Live intervals and bytes of a bucket's arrays; memoises the last rows."""
        key = bucket.key(rows)
        if bucket.held is None or bucket.held[0] != key:
            lowered = self._lower(bucket, rows)
            held = CountedBuffers()
            for item in bucket.arrays:
                for kind, size in self._held(item, lowered):
                    held.add(self._holdings, item, kind, size)
            bucket.held = key, held.spans(self.timeline)
        return bucket.held[1]

    def _rows_of(self, plan: Plan) -> list[int]:
        steps = self._rows.steps(plan)
        return [self._rows.row(view, steps) for view in self._rows.views]

    def _lowered_arrays(self, plan: Plan) -> Iterator[tuple[ArrayItem, Lowered]]:
        rows = self._rows_of(plan)
        for bucket in self._buckets:
            lowered = self._lower(bucket, rows)
            for item in bucket.arrays:
                yield item, lowered

    def _alive(self, item: ArrayItem, lowered: Lowered, moment: int) -> Iterator[tuple[Alive, bool]]:
        """(array alive at that moment, whether it may be in on-chip memory then)."""
        for kind, size in self._held(item, lowered):
            small = size <= self._holdings.on_chip.largest
            for value in item.values:
                there = [i for i in self._holdings.of_value(item, kind, value) if i[0] <= moment <= i[1]]
                if there:
                    brief = small and all(self._holdings.is_brief(kind, value, i) for i in there)
                    yield Alive(value, size, self._holdings.role(item, kind)), brief
