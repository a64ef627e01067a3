"""What the evaluator remembers, so that a plan costs no more than what it changes.

The op shardings of patterns under successive plans are numbered rows; cost items that the same decisions affect form a
bucket, which remembers what it adds to the cost for each combination of rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from operator import attrgetter, itemgetter

import numpy as np
from numpy.typing import NDArray

from toast_cli.dimensions.model import FactorKind
from toast_cli.plan.axis_assignment import START, AxisAssigner, AxisClaim, SplitRules, assigned_order, claim_of
from toast_cli.plan.decisions import Decision, Plan, Shard
from toast_cli.plan.loops import LOOP_EDGES, LOOP_READS
from toast_cli.plan.problem import Problem
from toast_cli.plan.sharding import NO_ROLE, Choice, OpPattern, OpSharding, Sharding, lay_out
from toast_cli.price.arrays import ArrayItem
from toast_cli.price.items import Items, NeighbourItem, SumItem, WorkItem
from toast_cli.price.timeline import Placed, Spans

# ---------------------------------------------------------------- buckets
# Buckets: cost items grouped by the decisions that affect them, each with a memo of its costs.

Vector = NDArray[np.float64]
QUANTUM = 2.0**-48  # seconds


@dataclass(frozen=True, slots=True)
class Share:
    """Contribution of one bucket to a plan's cost.

    All numbers are integral, so that sums are exact in any order and on any machine.

    Attributes:
        compute, communication, transfers: in quanta. overlapping: the part of communication that the compiler overlaps
        with compute. arguments: bytes.
        alive: [moments] bytes. Shares of a bucket with the same arrays share one vector.
    """

    compute: int
    communication: int
    overlapping: int
    transfers: int
    arguments: int
    alive: Vector


Key = int | tuple[int, ...]  # row numbers of a bucket's views, in their order


@dataclass(slots=True)
class Bucket:
    """Items whose patterns the same decisions affect.

    Attributes:
        touches: groups and roles whose decisions affect the cost, see `touches`.
        groups: class groups among them.
        views: those whose rows determine the share. key: selects the rows of these views from those of all.
        patterns, places: patterns of the items, including `LOOP_EDGES`, and (pattern, view, place in the view) of each.
        work, sums, neighbours, arrays: the items.
        memo: rows -> share. alive: numbers of `MemoryShares` -> [moments] bytes of its arrays. axis_memo: rows ->
        [axes] seconds. placed: rows -> its kernels and collectives, where they are in the program.
        held: the rows of the last exact memory profile, and the `Spans` of the bucket's buffers in it.
    """

    touches: frozenset[int]
    groups: tuple[int, ...] = ()
    views: list[int] = field(default_factory=list)
    key: Callable[[RowNumbers], Key] = itemgetter(0)
    patterns: set[int] = field(default_factory=set)
    places: list[tuple[int, int, int]] = field(default_factory=list)
    work: list[WorkItem] = field(default_factory=list)
    sums: list[SumItem] = field(default_factory=list)
    neighbours: list[NeighbourItem] = field(default_factory=list)
    arrays: list[ArrayItem] = field(default_factory=list)
    memo: dict[Key, Share] = field(default_factory=dict)
    alive: dict[tuple[int, ...], Vector] = field(default_factory=dict)
    axis_memo: dict[Key, Vector] = field(default_factory=dict)
    placed: dict[Key, Placed] = field(default_factory=dict)
    held: tuple[Key, list[Spans]] | None = None


def quanta(seconds: float) -> int:
    return round(seconds / QUANTUM)


def make_buckets(items: Items, rows: OpShardingMemo) -> list[Bucket]:
    """All items in their buckets."""
    buckets: dict[frozenset[int], Bucket] = {}

    def bucket(patterns: Iterable[int]) -> Bucket:
        used = set(patterns)
        touches = frozenset().union(*(rows.views[rows.place[p][0]].touches for p in used))
        shared = buckets.setdefault(touches, Bucket(touches))
        shared.patterns |= used
        return shared

    for work in items.work:
        bucket([work.pattern]).work.append(work)
    for added in items.sums:
        bucket(added.patterns).sums.append(added)
    for read in items.neighbours:
        bucket(read.patterns).neighbours.append(read)
    for array in filter(attrgetter("costs"), items.arrays):
        edges = [LOOP_EDGES] if array.at_edges else []
        bucket([array.pattern, *(r.pattern for r in array.readers), *edges]).arrays.append(array)
    for each in buckets.values():
        each.groups = groups_of(each.touches)
        each.views = sorted({rows.place[p][0] for p in each.patterns})
        each.key = itemgetter(*each.views)
        each.places = [(p, *rows.place[p]) for p in sorted(each.patterns)]
    return list(buckets.values())


# ---------------------------------------------------------------- op shardings
# Memo of the op shardings of a program's op patterns under successive plans.
#
# Patterns that the same decisions affect form one *view*. The op shardings of all patterns of a view under some plan
# are one *row* of it; equal rows have one number, so that callers can tell by a number whether anything has changed.
#
# The edges of loops are one more pattern, `LOOP_EDGES`: its op sharding has a factor for each mesh axis, which is
# split if the plan gathers loop-invariant arrays over that axis before loops.
#
# The axis assignment of a view's patterns after some decisions (see `plan.axis_assignment`) is a *state* of the view.
# One more decision leads to the next state, so that most rows are found by following memoised transitions.

Row = tuple[OpSharding, ...]  # [patterns of the view]
RowNumbers = list[int] | dict[int, int]  # of all views, or of some by number


DecisionNumbers = tuple[int, ...]  # a plan by the numbers of its decisions, `Replicate`s first

_UNKNOWN = -1


@dataclass(slots=True, eq=False)
class ViewState:
    """The axis assignment of a view's patterns after some decisions.

    Attributes:
        assigned: [kinds of the view] number of the state of its `AxisAssigner`.
        after: memo of decision -> next state. row: number of the row without further decisions.
    """

    assigned: tuple[int, ...]
    after: dict[int, ViewState] = field(default_factory=dict)
    row: int = _UNKNOWN


@dataclass(frozen=True, slots=True)
class AlikePatterns:
    """Patterns that always choose alike. patterns: their numbers."""

    assigner: AxisAssigner
    patterns: list[int] = field(default_factory=list)


@dataclass(slots=True)
class View:
    """touches: those of the decisions that affect it, see `touches`. matters: such a decision -> [kinds] its claims."""

    touches: frozenset[int]
    kinds: list[AlikePatterns]
    matters: dict[int, list[AxisClaim | None]] = field(default_factory=dict)
    states: dict[tuple[int, ...], ViewState] = field(default_factory=dict)  # by assignment
    start: ViewState = field(init=False)
    rows: list[Row] = field(default_factory=list)
    row_number: dict[tuple[int, ...], int] = field(default_factory=dict)  # [kinds] choices -> row

    def enter(self, assigned: tuple[int, ...]) -> ViewState:
        """The state with that assignment."""
        state = self.states.get(assigned)
        if state is None:
            state = self.states[assigned] = ViewState(assigned)
        return state

    def forget(self) -> None:
        """Clears the transitions."""
        self.states.clear()
        self.start = self.enter((START,) * len(self.kinds))


def touches(decision: Decision) -> tuple[int, ...]:
    """The group (by number) or argument role (by a number below -1) that a decision affects."""
    return (decision.group if isinstance(decision, Shard) else _role(decision.role),)


def groups_of(touches: Iterable[int]) -> tuple[int, ...]:
    """The groups among `touches`, in ascending order."""
    return tuple(sorted(what for what in touches if what >= 0))


def _role(role: int) -> int:
    return -2 - role


class OpShardingMemo:
    """Rows of one problem. `size` counts the memoised transitions over all views."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._sizes = problem.mesh.sizes
        self.size = 0
        self.place: dict[int, tuple[int, int]] = {}  # pattern -> number of its view, place in it
        self.of_touch: dict[int, list[int]] = defaultdict(list)  # touch -> views
        self._decisions: list[Decision] = []
        self._number: dict[Decision, int] = {}
        self._weights: list[int] = []  # [decisions] number of views it affects, plus one
        self._op_shardings: dict[int, dict[int, OpSharding]] = defaultdict(dict)  # pattern -> choice -> op sharding
        self._op_sharding_count = 0
        self._shardings: dict[Sharding, Sharding] = {}
        self._alike: dict[tuple[object, ...], dict[Choice, OpSharding]] = {}
        self._known = [self._alike.setdefault(_arrangement(pattern), {}) for pattern in problem.patterns]
        self.views = self._make_views()
        self.forget()

    def _make_views(self) -> list[View]:
        assigners, chosen_by = self._problem.assigners, self._problem.chosen_by
        alike: dict[frozenset[int], dict[tuple[object, ...], AlikePatterns]] = defaultdict(dict)
        for number, pattern in enumerate(self._problem.patterns):
            roles = [_role(role) for role in (pattern.role, pattern.kind, pattern.loop_role) if role != NO_ROLE]
            kinds = alike[frozenset([*pattern.groups, *roles])]
            kinds.setdefault(chosen_by[number], AlikePatterns(assigners[number])).patterns.append(number)
        views = [View(touches, list(kinds.values())) for touches, kinds in alike.items()]
        if LOOP_READS in self._problem.roles:
            touches = frozenset([_role(self._problem.roles.index(LOOP_READS))])
            views.append(View(touches, [AlikePatterns(_edges(self._sizes), [LOOP_EDGES])]))
        for index, view in enumerate(views):
            for what in view.touches:
                self.of_touch[what].append(index)
            for place, number in enumerate(number for kind in view.kinds for number in kind.patterns):
                self.place[number] = index, place
        return views

    def steps(self, plan: Plan) -> DecisionNumbers:
        """The plan as numbers of its decisions, in the order of assignment."""
        numbers = self._number
        return tuple([numbers[d] if d in numbers else self._enter(d) for d in assigned_order(plan)])

    def _enter(self, decision: Decision) -> int:
        number = self._number[decision] = len(self._decisions)
        self._decisions.append(decision)
        reached = sorted({view_number for what in touches(decision) for view_number in self.of_touch[what]})
        self._weights.append(len(reached) + 1)
        for view in (self.views[view_number] for view_number in reached):
            view.matters[number] = [self._claim(kind.patterns[0], decision) for kind in view.kinds]
        return number

    def _claim(self, pattern: int, decision: Decision) -> AxisClaim | None:
        """The claim of a decision on ops of a pattern."""
        if pattern == LOOP_EDGES:
            return AxisClaim(decision.axis, (decision.axis,))
        return claim_of(self._problem.patterns[pattern], decision, self._problem.resolution_place)

    def row(self, view: View, steps: DecisionNumbers) -> int:
        """Number of the view's row under a plan."""
        state = self.state(view, steps)
        if state.row == _UNKNOWN:
            state.row = self._settle(view, state)
        return state.row

    def state(self, view: View, steps: DecisionNumbers) -> ViewState:
        """The view's state after these decisions."""
        state, matters = view.start, view.matters
        for decision in steps:
            if decision in matters:
                reached = state.after.get(decision)
                state = self._step(view, state, decision) if reached is None else reached
        return state

    def _step(self, view: View, state: ViewState, decision: int) -> ViewState:
        assigned = [
            now if claim is None else kind.assigner.after(now, claim)
            for kind, now, claim in zip(view.kinds, state.assigned, view.matters[decision], strict=True)
        ]
        reached = state.after[decision] = view.enter(tuple(assigned))
        self.size += 1
        return reached

    def _settle(self, view: View, state: ViewState) -> int:
        """The row of a state without further decisions."""
        chosen = [kind.assigner.choice(now) for kind, now in zip(view.kinds, state.assigned, strict=True)]
        row = view.row_number.setdefault(tuple(chosen), len(view.rows))
        if row == len(view.rows):
            view.rows.append(
                tuple(
                    [
                        self._lay_out(number, kind.assigner, choice)
                        for kind, choice in zip(view.kinds, chosen, strict=True)
                        for number in kind.patterns
                    ]
                )
            )
        return row

    def _lay_out(self, pattern: int, assigner: AxisAssigner, number: int) -> OpSharding:
        """The op sharding of a choice; equal choices share one object, whose number serves as a memo key."""
        op_sharding = self._op_shardings[pattern].get(number)
        if op_sharding is None:
            choice = assigner.choices[number]
            if pattern == LOOP_EDGES:
                edges = OpSharding(choice[0], (), (), (), (), (), ())
                return self._op_shardings[pattern].setdefault(number, self._numbered(edges))
            alike = self._known[pattern]
            op_sharding = alike.get(choice)
            if op_sharding is None:
                op_sharding = alike[choice] = self._numbered(lay_out(self._problem.patterns[pattern], choice))
            self._op_shardings[pattern][number] = op_sharding
        return op_sharding

    def _numbered(self, op_sharding: OpSharding) -> OpSharding:
        """The op sharding with a number of its own. Equal shardings become one object, which makes comparing them
        cheap."""
        self._op_sharding_count += 1
        interned = self._shardings
        operands, shardings = (
            tuple([interned.setdefault(sharding, sharding) for sharding in arrays])
            for arrays in (op_sharding.operands, op_sharding.shardings)
        )
        return replace(op_sharding, operands=operands, shardings=shardings, number=self._op_sharding_count)

    def op_sharding(self, pattern: int, rows: RowNumbers) -> OpSharding:
        """The op sharding of a pattern; rows: [views]."""
        view, place = self.place[pattern]
        return self.views[view].rows[rows[view]][place]

    def forget(self) -> None:
        """Clears the transitions; rows keep their numbers."""
        for view in self.views:
            view.forget()
        self.size = 0

    def distance(self, first: DecisionNumbers, second: DecisionNumbers) -> int:
        """Distance of two plans: for each decision that only one of them has, the number of views it affects plus
        one."""
        weights = self._weights
        return sum([weights[decision] for decision in set(first).symmetric_difference(second)])

    def changed(self, old: DecisionNumbers, new: DecisionNumbers) -> set[int]:
        """Touches of the decisions in which two plans differ: those that only one of them has, and those that have
        another place among the decisions that both have. The others keep their order, and change nothing."""
        moved = set(old).symmetric_difference(new)
        both = ([decision for decision in plan if decision not in moved] for plan in (old, new))
        for pair in zip_longest(*both, fillvalue=_UNKNOWN):  # a plan may have one twice
            if pair[0] != pair[1]:
                moved.update(pair)
        moved.discard(_UNKNOWN)
        return {what for decision in moved for what in touches(self._decisions[decision])}


def _edges(sizes: tuple[int, ...]) -> AxisAssigner:
    """The assigner of `LOOP_EDGES`, whose factor k only axis k may split."""
    none = ((),) * len(sizes)
    return AxisAssigner(SplitRules(sizes, (0,) * len(sizes), none, frozenset(), (), (), None), sizes)


def _arrangement(pattern: OpPattern) -> tuple[object, ...]:
    """The parts of a pattern that determine the shardings of a choice, see `lay_out`."""
    form = pattern.form
    summed = tuple([kind is FactorKind.REDUCTION for kind in form.kinds])
    return form.operands, form.results, summed, pattern.operand_pins, pattern.result_pins
