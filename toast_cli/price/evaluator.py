"""Evaluates plans incrementally: the cost of an item (an array or a kernel) depends only on the shardings of the ops
that make and read it.

Items that the same decisions affect form one bucket. What a bucket adds to the cost is remembered for each combination
of those shardings, which are numbered (see `memo`). A plan is evaluated as a change to an earlier one: only buckets in
which a sharding changed are looked up again. For a chosen plan there are also its kernels, its collectives and the
arrays alive at the peak. A worked example: the docstring of `toast_cli.plan`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product
from math import inf
from typing import Any, NamedTuple

import numpy as np

from toast_cli.plan.decisions import Plan
from toast_cli.plan.loops import LOOP_EDGES
from toast_cli.plan.lower import lower
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import OpSharding, Sharding
from toast_cli.price.arrays import ArrayItem, ArrayKernels
from toast_cli.price.buffers import Buffers, Kind
from toast_cli.price.cost import Alive, CollectiveUse, Cost, KernelUse
from toast_cli.price.gpu_libraries import temporary_growth
from toast_cli.price.items import Items, NeighbourItem, SumItem, WorkItem, make_items
from toast_cli.price.kernel_pricing import WorkPricer
from toast_cli.price.manual_regions import region_prices, regions_of
from toast_cli.price.memo import (
    QUANTUM,
    Bucket,
    DecisionNumbers,
    Key,
    OpShardingMemo,
    RowNumbers,
    Share,
    Vector,
    make_buckets,
    quanta,
)
from toast_cli.price.pricing import Lowered, Pricer
from toast_cli.price.profile import CompilerProfile
from toast_cli.price.profiles import find_profile
from toast_cli.price.timeline import NEGLIGIBLE, Placed, Spans, Timeline, Windows

# ---------------------------------------------------------------- shares of buckets
# Contributions of buckets to a plan's cost, with a memo by item: many rows of a bucket are equal for most of its
# items.

MemoryShares = tuple[tuple[Vector, float], ...]  # pairs of ([moments] number of arrays alive, bytes of one)
NO_MEMORY = 0


class ItemCollectives(NamedTuple):
    """Collectives of one item: seconds of all, and of those that the compiler overlaps with compute."""

    seconds: float
    overlapping: float
    uses: tuple[CollectiveUse, ...]


class ArrayShare(NamedTuple):
    """Contribution of one array item. seconds: of its kernels. arguments: bytes. memory: number of its
    `MemoryShares`."""

    seconds: float
    collectives: ItemCollectives
    arguments: float
    memory: int
    kernels: tuple[KernelUse, ...]


NO_COLLECTIVES = ItemCollectives(0.0, 0.0, ())
NO_SHARE = ArrayShare(0.0, NO_COLLECTIVES, 0.0, NO_MEMORY, ())


class ShareMemo:
    """Shares of the buckets of one problem. Keys hold the numbers that an `OpShardingMemo` gives op shardings.

    asynchronous: kinds of collectives that the compiler overlaps with compute.
    """

    def __init__(
        self,
        pricer: Pricer,
        work: WorkPricer,
        arrays: ArrayKernels,
        buffers: Buffers,
        timeline: Timeline,
        asynchronous: Collection[str],
    ) -> None:
        self._pricer, self._work, self._arrays, self._buffers = pricer, work, arrays, buffers
        self._timeline = timeline
        self._asynchronous = asynchronous
        self._of_work: dict[tuple[int, int], tuple[float, ItemCollectives]] = {}
        self._kernels: dict[tuple[int, int], tuple[KernelUse, ...]] = {}
        self._of_sums: dict[tuple[int | Sharding, ...], ItemCollectives] = {}
        self._of_neighbours: dict[tuple[int, ...], ItemCollectives] = {}
        self._of_arrays: dict[tuple[int | Sharding, ...], ArrayShare] = {}
        self._held: dict[tuple[int | Sharding, ...], tuple[tuple[Kind, float], ...]] = {}
        self._presence: dict[tuple[int, Kind, bool], Vector] = {}
        self._memories: list[MemoryShares] = [()]
        self._number: dict[tuple[int, tuple[tuple[Kind, float], ...]], int] = {}

    def forget(self) -> None:
        """Clears everything that depends on the selected moments."""
        for memo in (self._of_arrays, self._presence, self._number):
            memo.clear()
        del self._memories[1:]

    def share(self, bucket: Bucket, lowered: Lowered) -> Share:
        """The bucket's share under these op shardings."""
        compute = transfers = arguments = 0.0
        sent: list[ItemCollectives] = []
        for work in bucket.work:
            computing, of_work = self._work_share(work, lowered[work.pattern])
            compute += computing
            sent.append(of_work)
            transfers += self._work.transfer_seconds(work, lowered[work.pattern])
        sent += [self._sum_collectives(added, lowered) for added in bucket.sums]
        sent += [self._neighbour_collectives(read, lowered) for read in bucket.neighbours]
        held = []
        for item in bucket.arrays:
            share = self._array_share(item, lowered)
            if share is not NO_SHARE:
                compute += share.seconds
                sent.append(share.collectives)
                arguments += share.arguments
                held.append(share.memory)
        return Share(
            quanta(compute),
            quanta(sum([s.seconds for s in sent])),
            quanta(sum([s.overlapping for s in sent])),
            quanta(transfers),
            round(arguments),
            self._alive(bucket, tuple(held)),
        )

    def collectives(self, bucket: Bucket, lowered: Lowered) -> list[CollectiveUse]:
        """The bucket's collectives under these op shardings."""
        sent = [self._work_share(work, lowered[work.pattern])[1] for work in bucket.work]
        sent += [self._sum_collectives(added, lowered) for added in bucket.sums]
        sent += [self._neighbour_collectives(read, lowered) for read in bucket.neighbours]
        sent += [self._array_share(item, lowered).collectives for item in bucket.arrays]
        return [use for s in sent for use in s.uses]

    def kernels(self, bucket: Bucket, lowered: Lowered) -> list[KernelUse]:
        """The bucket's kernels under these op shardings."""
        uses: list[KernelUse] = []
        for work in bucket.work:
            op_sharding = lowered[work.pattern]
            key = work.op, op_sharding.number
            if key not in self._kernels:
                self._kernels[key] = tuple(self._work.uses(work, op_sharding))
            uses += self._kernels[key]
        for item in bucket.arrays:
            uses += self._array_share(item, lowered).kernels
        return uses

    def _sent(self, uses: Iterable[CollectiveUse]) -> ItemCollectives:
        every = overlapping = 0.0
        listed = tuple(uses)
        for use in listed:
            every += use.seconds
            if use.kind in self._asynchronous:
                overlapping += use.seconds
        return ItemCollectives(every, overlapping, listed) if listed else NO_COLLECTIVES

    def _alive(self, bucket: Bucket, held: tuple[int, ...]) -> Vector:
        """[moments] bytes of a bucket's arrays; held: number of each one's `MemoryShares`."""
        alive = bucket.alive.get(held)
        if alive is None:
            alive = self._timeline.nothing()
            for memory in held:
                for count, size in self._memories[memory]:
                    alive += count * size
            bucket.alive[held] = np.rint(alive, out=alive)
        return alive

    def _work_share(self, work: WorkItem, op_sharding: OpSharding) -> tuple[float, ItemCollectives]:
        """Seconds of compute, and the collectives, of one item."""
        key = (work.op, op_sharding.number)
        share = self._of_work.get(key)
        if share is None:
            communication = self._sent(self._pricer.work_collectives(work, op_sharding))
            share = self._of_work[key] = (self._work.seconds(work, op_sharding), communication)
        return share

    def _sum_collectives(self, item: SumItem, lowered: Lowered) -> ItemCollectives:
        partial, reduced = item.of_loops, False
        for term in () if item.of_loops else item.terms:
            op_sharding = lowered[term.pattern]
            reduced = reduced or bool(op_sharding.reduced)
            partial = partial or reduced or bool(op_sharding.scattered[0])
        if not partial:
            return NO_COLLECTIVES
        parts: list[int | Sharding] = [item.ops[0]]
        parts += [lowered[pattern].number for pattern in item.decisive]
        if reduced:  # the readers' shardings then matter
            parts += [lowered[pattern].operands[position] for pattern, position in item.readers]
        key = tuple(parts)
        sent = self._of_sums.get(key)
        if sent is None:
            sent = self._of_sums[key] = self._sent(self._pricer.sum_collectives(item, lowered))
        return sent

    def _neighbour_collectives(self, item: NeighbourItem, lowered: Lowered) -> ItemCollectives:
        """The halo exchange of one item."""
        key = (item.op, item.value, *[lowered[pattern].number for pattern, _ in item.readers])
        sent = self._of_neighbours.get(key)
        if sent is None:
            sent = self._of_neighbours[key] = self._sent(self._pricer.neighbour_collectives(item, lowered))
        return sent

    def _array_key(self, item: ArrayItem, lowered: Lowered) -> tuple[int | Sharding, ...]:
        """What an array's share depends on; () if nobody stores or moves it."""
        op_sharding = lowered[item.pattern]
        sharding = op_sharding.shardings[item.result]
        shardings = [lowered[reader.pattern].operands[reader.position] for reader in item.readers]
        # For partial results the whole op sharding matters, not only the final sharding.
        partial = op_sharding.reduced or op_sharding.scattered[item.result]
        inside = item.region >= 0
        if not (item.stored or partial or inside or item.row_copies) and shardings.count(sharding) == len(shardings):
            return ()
        edges = (lowered[LOOP_EDGES].number,) if item.at_edges else ()
        return (item.values[0], op_sharding.number if partial or inside else sharding, *shardings, *edges)

    def held(self, item: ArrayItem, lowered: Lowered) -> tuple[tuple[Kind, float], ...]:
        """Kinds and bytes of an array's buffers."""
        key = self._array_key(item, lowered)
        if key and key not in self._held:
            copies = self._pricer.copies(item, lowered)
            self._held[key] = tuple(self._buffers.held(item, lowered[item.pattern], copies))
        return self._held[key] if key else ()

    def _array_share(self, item: ArrayItem, lowered: Lowered) -> ArrayShare:
        key = self._array_key(item, lowered)
        share = self._of_arrays.get(key) if key else NO_SHARE
        if share is None:
            copies, (sharding, shardings) = self._pricer.copies(item, lowered), self._pricer.shardings_of(item, lowered)
            moving = self._sent(self._pricer.array_collectives(item, sharding, copies)) if copies else NO_COLLECTIVES
            rest = self._buffers.resting(item) * self._pricer.local(item.bytes, sharding)
            if key not in self._held:
                self._held[key] = tuple(self._buffers.held(item, lowered[item.pattern], copies))
            memory = self._memory(item, self._held[key])
            kernels = tuple(self._arrays.uses(item, sharding, shardings, copies))
            making = sum([use.seconds for use in kernels])
            counts = copies or rest or memory or making
            share = ArrayShare(making, moving, rest, memory, kernels) if counts else NO_SHARE
            self._of_arrays[key] = share
        return share

    def _memory(self, item: ArrayItem, held: tuple[tuple[Kind, float], ...]) -> int:
        """Number of the `MemoryShares` of one item with buffers of these kinds and bytes."""
        if not held:
            return NO_MEMORY
        key = item.values[0], held
        number = self._number.get(key)
        if number is None:
            number = self._number[key] = len(self._memories)
            self._memories.append(tuple([(self._presence_of(item, kind, size), size) for kind, size in held]))
        return number

    def _presence_of(self, item: ArrayItem, kind: Kind, size: float) -> Vector:
        """[entries of the timeline] how many of the item's buffers of that kind and size are alive."""
        key = (item.values[0], kind, size <= self._buffers.on_chip.largest)
        presence = self._presence.get(key)
        if presence is None:
            brief = self._buffers.brief(item, kind, size)
            presence = self._presence[key] = self._timeline.presence(self._buffers.intervals(item, kind), brief)
        return presence


# ---------------------------------------------------------------- plans

Rank = tuple[Any, ...]  # smaller is better
GroupSeconds = Mapping[tuple[int, int], float]  # two groups, in either order -> seconds

MEMO_LIMIT = 400_000  # rows and shares in the memos before they are cleared
MOST_PLACED = 500  # parts of plans in each bucket's memo of `Placed`, which are large


@dataclass(frozen=True, slots=True)
class _State:
    """An evaluated plan. steps: its decisions (see `memo`); rows: [views] row numbers; shares: [buckets]; total: their
    sum."""

    steps: DecisionNumbers
    rows: list[int]
    shares: list[Share]
    total: Share


class Evaluator:
    """Costs of plans for one problem. `evaluations` counts the calls of `cost`.

    Args:
        references: plans whose memory peaks decide which moments are evaluated.
        profile: of the compiler; default: the newest for the mesh's chip.
        like: of the problem on another mesh (see `on_mesh`), with which it shares what does not depend on the mesh.
    """

    def __init__(
        self,
        problem: Problem,
        references: Iterable[Plan] = (),
        profile: CompilerProfile | None = None,
        like: Evaluator | None = None,
    ) -> None:
        self.problem = problem
        self.profile = profile or find_profile(problem.mesh.chip)
        self._like = like if like is not None and like.problem.patterns is problem.patterns else None
        self.items: Items = self._like.items if self._like is not None else make_items(problem, self.profile)
        self._growth = temporary_growth(problem.program, self.items.stored, self.profile)
        self._regions = region_prices(problem, self.profile)
        pricer = Pricer(problem, self.items, self._regions)
        self._buffers = Buffers(problem, self.items, pricer)
        self.timeline = Timeline(self.items.lives, self._buffers.on_chip.capacity)
        work, arrays = WorkPricer(problem, self.profile, self._regions), ArrayKernels(problem, self.profile)
        self._sharing = ShareMemo(pricer, work, arrays, self._buffers, self.timeline, self.profile.asynchronous)
        self._rows = OpShardingMemo(problem)
        self._buckets = make_buckets(self.items, self._rows)
        self.evaluations = 0
        self._of_view: dict[int, list[int]] = defaultdict(list)  # view -> buckets that depend on it
        for number, bucket in enumerate(self._buckets):
            for view in bucket.views:
                self._of_view[view].append(number)
        self._shares = 0  # memoised, in all buckets
        # The plan evaluated last and the one it was derived from: the next plans mostly differ little from one of them.
        self._state: _State | None = None
        self._before: _State | None = None
        self._lowered: tuple[Plan, PartitionedProgram] | None = None  # the last one requested
        self._exact_costs: dict[Plan, tuple[Cost, int]] = {}
        self._quick_costs: dict[Plan, Cost] = {}
        self.timeline.select([self.memory_profile(plan) for plan in ((), *references)])

    # -- kernels, collectives and arrays of a plan ---------------------------------------------------------------

    def kernels(self, plan: Plan) -> list[KernelUse]:
        """Work and time of every kernel of `plan`, equal ones merged, the longest first."""
        rows = self._rows_of(plan)
        uses = [use for bucket in self._buckets for use in self._sharing.kernels(bucket, self._lower(bucket, rows))]
        return sorted(uses, key=lambda use: -use.seconds)

    def collectives(self, plan: Plan) -> list[CollectiveUse]:
        """Every collective of `plan`, equal ones of one item merged, the most expensive first."""
        rows = self._rows_of(plan)
        uses = [use for bucket in self._buckets for use in self._bucket_collectives(bucket, rows)]
        return sorted(uses, key=lambda use: -use.seconds)

    def host_bytes(self, plan: Plan) -> float:
        """Peak bytes of one device's arrays in host memory."""
        changes: dict[int, float] = defaultdict(float)
        for item, lowered in self._lowered_arrays(plan):
            size, intervals = self._buffers.on_host(item, lowered[item.pattern])
            for first, last in intervals:
                changes[first] += size
                changes[last + 1] -= size
        return max(accumulate(changes[moment] for moment in sorted(changes)), default=0.0)

    def memory_profile(self, plan: Plan) -> Vector:
        """[timeline.candidates] bytes alive at every moment at which memory can peak."""
        rows = self._rows_of(plan)
        return self.timeline.profile([spans for bucket in self._buckets for spans in self._bucket_spans(bucket, rows)])

    def memory_by(self, plan: Plan, group: Callable[[int, str], str]) -> dict[str, Vector]:
        """Group -> [timeline.candidates] bytes alive, with the growth of temporaries by the chip's compiler.

        Args:
            group: maps a value's number and role (see `Alive`) to its group.
        """
        grouped: dict[str, list[Spans]] = defaultdict(list)
        for item, lowered in self._lowered_arrays(plan):
            for kind, size in self._sharing.held(item, lowered):
                role = self._buffers.role(item, kind)
                grown = size if role == "argument" else self._growth * size
                members: dict[str, list[int]] = defaultdict(list)
                for value in item.values:
                    members[group(value, role)].append(value)
                for name, values in members.items():
                    members_of = replace(item, values=tuple(values))
                    grouped[name].append(self._buffers.spans(self.timeline, members_of, kind, grown))
        return self.timeline.shared({name: spans for name, spans in grouped.items() if any(len(s[0]) for s in spans)})

    def alive_at_peak(self, plan: Plan) -> tuple[int, list[Alive]]:
        """Op number at which memory peaks under `plan`, and the arrays alive there, largest first."""
        profile = self.memory_profile(plan)
        moment = int(self.timeline.candidates[int(profile.argmax())]) if len(profile) else 0
        arrays: list[tuple[Alive, bool]] = []
        for item, lowered in self._lowered_arrays(plan):
            arrays.extend(self._alive(item, lowered, moment))
        return moment // 2, sorted(self._buffers.on_chip.left(arrays), key=lambda a: -a.bytes)

    def _alive(self, item: ArrayItem, lowered: Lowered, moment: int) -> Iterator[tuple[Alive, bool]]:
        """(array alive at that moment, whether it may be in on-chip memory then)."""
        for kind, size in self._sharing.held(item, lowered):
            small = size <= self._buffers.on_chip.largest
            for value in item.values:
                there = [i for i in self._buffers.of_value(item, kind, value) if i[0] <= moment <= i[1]]
                if there:
                    brief = small and all(self._buffers.is_brief(kind, value, i) for i in there)
                    yield Alive(value, size, self._buffers.role(item, kind)), brief

    def _bucket_collectives(self, bucket: Bucket, rows: RowNumbers) -> list[CollectiveUse]:
        return self._sharing.collectives(bucket, self._lower(bucket, rows))

    def _bucket_spans(self, bucket: Bucket, rows: list[int]) -> list[Spans]:
        """Live intervals and bytes of a bucket's arrays; memoises the last rows."""
        key = bucket.key(rows)
        if bucket.held is None or bucket.held[0] != key:
            lowered = self._lower(bucket, rows)
            held = [(item, *buffer) for item in bucket.arrays for buffer in self._sharing.held(item, lowered)]
            bucket.held = key, [self._buffers.spans(self.timeline, *buffer) for buffer in held]
        return bucket.held[1]

    def _lowered_arrays(self, plan: Plan) -> Iterator[tuple[ArrayItem, Lowered]]:
        rows = self._rows_of(plan)
        for bucket in self._buckets:
            lowered = self._lower(bucket, rows)
            for item in bucket.arrays:
                yield item, lowered

    def _lower(self, bucket: Bucket, rows: RowNumbers) -> Lowered:
        views = self._rows.views
        return {pattern: views[view].rows[rows[view]][place] for pattern, view, place in bucket.places}

    def _rows_of(self, plan: Plan) -> list[int]:
        steps = self._rows.steps(plan)
        return [self._rows.row(view, steps) for view in self._rows.views]

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
        total, arguments = state.total, float(state.total.arguments)
        peak = self._grown(float(total.alive.max(initial=0.0)), arguments)
        compute, communication, transfers = (
            amount * QUANTUM for amount in (total.compute, total.communication, total.transfers)
        )
        cost = Cost(compute, communication, peak, arguments, self._axis_seconds(state.rows), transfers)
        overlapping = total.overlapping * QUANTUM
        if overlapping <= NEGLIGIBLE * cost.most_seconds or cost.most_seconds - overlapping >= below:
            return cost
        return replace(cost, exposed_seconds=self._added(self._placed(state.rows), communication))

    def exact_cost(self, plan: Plan) -> Cost:
        """`cost` with memory evaluated at every moment, and the lower bound of the step."""
        return self._exact(plan)[0]

    def best(self, plans: Iterable[Plan], rank: Callable[[Plan, Cost], Rank]) -> tuple[Plan, Cost]:
        """The plan with the least rank by its exact cost, and that cost; of equal ones, the first. An exact cost ranks
        no better than a quick one, so that most plans need none."""
        quick = sorted([(rank(plan, self._quick_cost(plan)), k, plan) for k, plan in enumerate(plans)])
        exact: list[tuple[Rank, int, Plan]] = []
        for least, k, plan in quick:
            if not exact or least <= min(exact)[0]:
                exact.append((rank(plan, self.exact_cost(plan)), k, plan))
        best = min(exact)[2]
        return best, self.exact_cost(best)

    def _quick_cost(self, plan: Plan) -> Cost:
        """`cost`, or a better one; memoised."""
        if plan in self._exact_costs:
            return self._exact_costs[plan][0]
        if plan not in self._quick_costs:
            self._quick_costs[plan] = self.cost(plan)
        return self._quick_costs[plan]

    def learn(self, plan: Plan) -> None:
        """Adds the moment of a plan's peak to those that `cost` evaluates."""
        if self.timeline.add(self._exact(plan)[1]):
            self._forget()

    def _exact(self, plan: Plan) -> tuple[Cost, int]:
        """(exact cost, candidate moment of the peak) of a plan; memoised."""
        if plan not in self._exact_costs:
            cost, profile = self.cost(plan), self.memory_profile(plan)
            place = int(profile.argmax()) if len(profile) else 0
            peak = self._grown(float(profile[place]) if len(profile) else 0.0, cost.argument_bytes)
            placed = self._placed(self._evaluate(plan).rows)
            least = self._added(placed, cost.communication_seconds, every=True)
            # A schedule in which more collectives overlap is not always the shorter one.
            least = min(least, cost.communication_seconds if cost.exposed_seconds is None else cost.exposed_seconds)
            exact = replace(cost, peak_bytes=max(peak, cost.peak_bytes), least_exposed_seconds=least)
            self._exact_costs[plan] = exact, place
        return self._exact_costs[plan]

    def exposed_beside(self, plan: Plan, uses: Sequence[CollectiveUse]) -> float:
        """Seconds that other collectives add beside the kernels of `plan`, as the compiler overlaps them."""
        placed = self._windows.placed(self.kernels(plan), uses)
        return self._added([placed], sum(use.seconds for use in uses))

    def _added(self, placed: Sequence[Placed], communication: float, *, every: bool = False) -> float:
        """Seconds that communication adds to a step: what is exposed, and what the rest takes from compute."""
        exposed = min(communication, self._windows.exposed(placed, every=every))  # but for rounding it is
        return exposed + self.profile.communicating * (communication - exposed)

    def _grown(self, alive: float, arguments: float) -> float:
        """Peak bytes with the growth of temporaries by the chip's compiler; arguments keep their size."""
        return alive if self._growth == 1.0 else arguments + self._growth * (alive - arguments)

    def unlearn(self) -> None:
        """Resets the selected moments to the initial ones."""
        if self.timeline.reset():
            self._forget()

    def parts(self, plan: Plan) -> dict[tuple[int, Key], float]:
        """(bucket, rows of its views) -> seconds of a step. A key that two plans share stands for the same kernels and
        collectives in both."""
        state = self._evaluate(plan)
        shares = enumerate(zip(self._buckets, state.shares, strict=True))
        return {(k, b.key(state.rows)): (s.compute + s.communication) * QUANTUM for k, (b, s) in shares}

    def seconds_between(self, plan: Plan) -> GroupSeconds:
        """Seconds of a step by pairs of groups: (g, g) -> all buckets that g affects; (g, h) -> all that both affect.
        This bounds the gain of any change to a plan that matters only there."""
        totals: dict[tuple[int, int], float] = defaultdict(float)
        for bucket, share in zip(self._buckets, self._evaluate(plan).shares, strict=True):
            seconds = (share.compute + share.communication) * QUANTUM
            for first, second in product(bucket.groups, repeat=2):
                totals[first, second] += seconds
        return totals

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
        state = min(near, key=lambda s: self._rows.distance(s.steps, steps))
        touches = self._rows.changed(state.steps, steps)
        if touches:
            self._before, self._state = state, self._evaluate_change(state, touches, steps)
            return self._state
        return state

    def _evaluate_whole(self, steps: DecisionNumbers) -> _State:
        rows = [self._rows.row(view, steps) for view in self._rows.views]
        nothing = Share(0, 0, 0, 0, 0, self.timeline.nothing())
        empty = _State((), rows, [nothing] * len(self._buckets), replace(nothing, alive=self.timeline.start()))
        return self._with_shares(empty, steps, rows, range(len(self._buckets)))

    def _evaluate_change(self, state: _State, touches: set[int], steps: DecisionNumbers) -> _State:
        """The state after a change: looks up only the views that the changed decisions touch, and their buckets."""
        rows, views, buckets = state.rows.copy(), self._rows.views, set[int]()
        for number in {view for what in touches for view in self._rows.of_touch[what]}:
            row = self._rows.row(views[number], steps)
            if row != rows[number]:
                rows[number] = row
                buckets.update(self._of_view[number])
        return self._with_shares(state, steps, rows, buckets)

    def _with_shares(self, state: _State, steps: DecisionNumbers, rows: list[int], buckets: Iterable[int]) -> _State:
        """The state of a plan with these rows, from one that differs from it only in these buckets."""
        total, shares = state.total, state.shares.copy()
        compute, communication, overlapping = total.compute, total.communication, total.overlapping
        transfers, arguments, alive = total.transfers, total.arguments, total.alive.copy()
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
        return _State(steps, rows, shares, Share(compute, communication, overlapping, transfers, arguments, alive))

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
        if self._like is not None:
            return self._like._windows
        return Windows(self.problem, self.items.compilation, self._regions.moments)

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
            per_axis = bucket.axis_memo.get(key)
            if per_axis is None:
                per_axis = bucket.axis_memo[key] = np.zeros(len(total))
                for use in self._bucket_collectives(bucket, rows):
                    per_axis[list(use.axes)] += quanta(use.seconds) * QUANTUM
            total += per_axis
        return tuple(total.tolist())

    def _placed(self, rows: list[int]) -> list[Placed]:
        """[buckets] kernels and collectives of each bucket's items, where they are in the program."""
        parts = []
        for bucket in self._buckets:
            key = bucket.key(rows)
            placed = bucket.placed.get(key)
            if placed is None:
                if len(bucket.placed) == MOST_PLACED:
                    bucket.placed.clear()
                lowered = self._lower(bucket, rows)
                kernels, uses = self._sharing.kernels(bucket, lowered), self._sharing.collectives(bucket, lowered)
                inside = regions_of(bucket, lowered, self._regions)
                placed = self._windows.placed(kernels, uses, inside)
                bucket.placed[key] = placed
            parts.append(placed)
        return parts
