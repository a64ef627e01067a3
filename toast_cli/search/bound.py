"""A lower bound on what any plan that starts with given decisions can cost; see `exact`.

The cost of a plan is a sum over parts of the program (the evaluator's buckets), and a part sees only the decisions about its own
dimension groups. So parts are gathered into clusters of few groups, in each of which the best completion is found by looking at all
(see `cluster`). The sum of these minima is admissible: it lets every cluster complete the plan as it likes best.
What lies outside clusters, and clusters of too many completions, count less: there each op by itself takes the best of all ways
in which its free axes could split it, and what lies between ops costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product
from math import factorial, prod

import numpy as np

from toast_cli.dimensions.model import SlotKind
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.evaluate.items import WorkItem
from toast_cli.evaluate.iteration_memo import touch
from toast_cli.plan.decisions import NOWHERE, Plan
from toast_cli.plan.iteration import Choice, lay_out
from toast_cli.plan.problem import Problem
from toast_cli.search.cluster import Cluster, Least, TooMany
from toast_cli.search.states import States

CLUSTER_STATES = 20_000  # looked at, at most
CLUSTER_ORDERS = 5_000.0  # orders of decisions a cluster is begun with, at most,
JOINED_ORDERS = 1_500.0  # and when it is joined from smaller ones
_MOMENTS = 16  # at which memory is looked at
_SPLITS = 4_000  # ways to split one op that are looked at, at most

SlotAxes = tuple[tuple[int, ...], ...]


class LowerBound:
    """`bound(plan)`: seconds no plan that begins with `plan` can beat. Plans name all `Replicate`s first."""

    def __init__(self, problem: Problem, ended: Callable[[], bool] = lambda: False) -> None:
        """ended: whether time is up; clusters that are not looked at by then are given up."""
        self._problem, self._ended = problem, ended
        self._evaluator = Evaluator(problem)
        self._evaluator.watch(
            _MOMENTS if self._evaluator.cost(problem.fixed).peak_bytes > problem.mesh.limit_bytes else 0
        )
        self.states = States(self._evaluator.rows)
        self._work: dict[tuple[WorkItem, SlotAxes], float] = {}
        self._clusters, self._loose = self._gather()
        self._given_up = [cluster is self._loose for cluster in self._clusters]

    def __call__(self, plan: Plan) -> float:
        """Seconds."""
        return sum(least.seconds for least in self.parts(plan))

    def may_fit(self, parts: list[Least]) -> bool:
        """Whether memory may suffice for some completion."""
        alive = np.sum([self._evaluator.timeline.start(), *(least.alive for least in parts)], axis=0)
        return bool(alive.max(initial=0.0) <= self._problem.mesh.limit_bytes)

    def parts(self, plan: Plan, before: list[Least] | None = None) -> list[Least]:
        """[clusters] the least of each; `before`: those of the plan without its last decision."""
        if before is None:
            return [self._least(number, plan) for number in range(len(self._clusters))]
        what = touch(plan[-1])
        return [
            self._least(number, plan) if what in cluster.touches else before[number]
            for number, cluster in enumerate(self._clusters)
        ]

    def _gather(self) -> tuple[list[Cluster], Cluster]:
        """Clusters, and among them one of all buckets that see too many groups; small ones that share most are joined."""
        parts = self._evaluator.parts
        sets: list[frozenset[int]] = []
        for touches in sorted(set(parts), key=lambda t: (-len(t), sorted(t))):
            if self._orders(touches) <= CLUSTER_ORDERS and not any(touches <= other for other in sets):
                sets.append(touches)
        sets = self._join(sets)
        homes: dict[frozenset[int], list[int]] = {touches: [] for touches in sets}
        loose: list[int] = []
        for number, touches in enumerate(parts):
            home = next((other for other in sets if touches <= other), None)
            (loose if home is None else homes[home]).append(number)
        clusters = [self._cluster(touches, buckets) for touches, buckets in homes.items()]
        outside = self._cluster(frozenset().union(*(parts[n] for n in loose)), loose)
        return [*clusters, outside], outside

    def _cluster(self, touches: frozenset[int], buckets: list[int]) -> Cluster:
        return Cluster(self._evaluator, self.states, touches, buckets, CLUSTER_STATES)

    def _join(self, sets: list[frozenset[int]]) -> list[frozenset[int]]:
        joined: list[frozenset[int]] = []
        for touches in sets:
            fitting = [other for other in joined if self._orders(other | touches) <= JOINED_ORDERS]
            best = max(fitting, key=lambda other: len(other & touches), default=None)
            if best is None:
                joined.append(touches)
            else:
                joined[joined.index(best)] = best | touches
        return joined

    def _orders(self, touches: frozenset[int]) -> float:
        """About how many plans can be told apart by what touches these: ordered choices of groups for each axis."""
        groups = sum(what >= 0 for what in touches)
        axes = sum(size > 1 for size in self._problem.mesh.sizes)
        orders = sum(factorial(groups) // factorial(groups - taken) for taken in range(groups + 1))
        return float(orders**axes * 2 ** (axes * (len(touches) - groups)))

    def _least(self, number: int, plan: Plan) -> Least:
        cluster = self._clusters[number]
        if not self._given_up[number]:
            try:
                return cluster.least(plan, self._ended)
            except TooMany:
                self._given_up[number] = True
                cluster.forget()
        work = (work for bucket in cluster.buckets for work in self._evaluator.work_of(bucket))
        seconds = sum(self._work_least(item, plan) for item in work)
        return Least(seconds, self._evaluator.timeline.nothing())

    def _work_least(self, work: WorkItem, plan: Plan) -> float:
        """Least seconds of one work item, whatever its free axes are spent on."""
        taken = self._problem.iterate(work.pattern, plan).slot_axes
        key = (work, taken)
        found = self._work.get(key)
        if found is None:
            pattern = self._problem.patterns[work.pattern]
            ways = _splits(self._problem, work.pattern, taken)
            costs = (self._evaluator.work_cost(work, lay_out(pattern, choice)) for choice in ways)
            found = self._work[key] = min(costs, default=0.0)
        return found


def _splits(problem: Problem, number: int, taken: SlotAxes) -> list[Choice]:
    """All ways in which axes that are still free could split one pattern, and its partial results be scattered; none where
    there are too many."""
    pattern, sizes = problem.patterns[number], problem.mesh.sizes
    form = pattern.form
    spent = {axis for axes in taken for axis in axes}
    free = [axis for axis, size in enumerate(sizes) if axis not in spent and size > 1]
    open_slots = [slot for slot, kind in enumerate(form.kinds) if kind is not SlotKind.BLOCKED]
    found: dict[SlotAxes, None] = {}
    for order in permutations(free):
        for places in product((NOWHERE, *open_slots), repeat=len(order)):
            extended = list(taken)
            for axis, slot in zip(order, places, strict=True):
                if slot != NOWHERE:
                    extended[slot] = (*extended[slot], axis)
            found[tuple(extended)] = None
    choices: list[Choice] = []
    for split in found:
        shards = [prod(sizes[axis] for axis in axes) for axes in split]
        if any(extent % n for n, extents in zip(shards, form.extents, strict=True) for extent in extents):
            continue
        partial = [a for kind, axes in zip(form.kinds, split, strict=True) if kind is SlotKind.REDUCTION for a in axes]
        targets = [(NOWHERE, *(slot for slots in dims for slot in slots)) for dims in form.results] if partial else []
        wanted = product(*(tuple(product(slots, repeat=len(partial))) for slots in targets))
        choices += [(split, w) for w in wanted]
        if len(choices) > _SPLITS:
            return []
    return choices
