"""Evaluates plans incrementally: the cost of an item (an array or a kernel) depends only on the shardings of the ops
that make and read it.

Items that the same decisions affect form one bucket. What a bucket adds to the cost is remembered for each combination
of those shardings, which are numbered (see `op_sharding_memo`). A plan is evaluated as a change to an earlier one: only
buckets in which a sharding changed are looked up again. In: a `Problem`. Out: `Cost` per plan; for a chosen plan,
`listing` has its kernels, its collectives and the arrays alive at the peak.

A worked example: the docstring of `toast_cli.plan`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf

import numpy as np

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.cost.corrections import NO_CORRECTIONS, Corrections
from toast_cli.cost.model import CollectiveUse, Cost
from toast_cli.evaluate.buckets import QUANTUM, Bucket, Key, Share, Vector, quanta
from toast_cli.evaluate.expected_step import Placed, Windows
from toast_cli.evaluate.listing import Listing
from toast_cli.evaluate.manual_regions import regions_of
from toast_cli.evaluate.op_sharding_memo import DecisionNumbers
from toast_cli.evaluate.region_price import most_moments
from toast_cli.evaluate.share_memo import ShareMemo
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


class Evaluator(Listing):
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
        super().__init__(problem, like, corrections, profile)
        self.evaluations = 0
        self._sharing = ShareMemo(
            self._pricer, self._work, self._arrays, self._holdings, self.timeline, self.profile.asynchronous
        )
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
        return Windows(self.problem, self.items.lives, self._corrections.compute, most_moments(self._regions))

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
                inside = regions_of(bucket, self._lower(bucket, rows), self._regions)
                placed = self._windows.placed(kernels, uses, self.profile.asynchronous, inside)
                bucket.placed[key] = placed
            found.append(placed)
        return found
