"""Overrides: where some ops do otherwise than all decisions about groups say, because it pays.

A decision about a group holds wherever the group is. That keeps plans short, and is mostly the best there is; but where
arrays have a dimension twice the best plan may take an axis away from a group in some ops and give it to another there.
What ops could do instead is looked for without decisions: each pattern may keep what the plan makes of it, do what an
expert's plan would, or change one thing (in small programs anything); the cheapest assignment is the solution of an
integer program (see `integer_program`). Where that differs from the plan, ops become places of an `Override` for each
axis; connected ones that do not gain what they take to say are left out, one after the other, by exact costs.

Enters: a search's result, and plans of experts. Leaves: a better plan, with the problem whose patterns know their
parts, or what came in.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import permutations
from math import perm
from typing import NamedTuple

import numpy as np

from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.plan.axis_assignment import START, AxisClaim, assigned_order, claim_of
from toast_cli.plan.decisions import Decision, Override, Plan, Replicate
from toast_cli.plan.goal import FASTEST
from toast_cli.plan.iteration import NO_PART, Iteration, lay_out
from toast_cli.plan.loop_reads import LOOP_READS
from toast_cli.plan.parts import fine_parts, has_parts, with_parts
from toast_cli.plan.problem import Problem
from toast_cli.search.every_split import every_iteration, iterations_of, splits_near
from toast_cli.search.integer_program import IntegerProgram
from toast_cli.search.interrupts import interruptible
from toast_cli.search.model import SearchResult
from toast_cli.search.objective import Objective, Rank
from toast_cli.search.pair_prices import PairPrices
from toast_cli.search.run import Confirmed
from toast_cli.search.ways import PatternWays

# Of a step: gains of less are not seen in what compilers make of it (benchmarks/overrides.py).
MUST_GAIN = 0.05
# That ops are told apart into where patterns are fewer: small programs only. In larger ones ops that are alike had
# better do alike; XLA gives plans like that other collectives than they promise.
MOST_PARTS = 100
MOST_PATTERNS = 600  # with more nothing is tried
PASSES, GAP = 60, 1e-3  # of `leave_out`, and of the solver: good plans, not proofs
CLOSE = 1.01  # times the bound: where some assignment may be so fast, slower ones are not looked at
UNLIKE = 1e-3  # of a step: what it costs in all if every op does otherwise, so that as few as can be do
TRIALS = 600  # plans looked at to leave overrides out
ROUNDS = 4  # at most
GAINS_MORE = 0.005  # of a step: what a round must promise to gain, from the second on


class Effort(NamedTuple):
    """Up to what sizes a program is looked at.

    Attributes:
        ways: of all patterns, near to a plan. all_ways: where there are no more, all are looked at besides. variables:
            of an integer program. whole: with more variables the solver may give a pattern several ways in part, and
            the one it has most of is taken.
    """

    ways: int
    all_ways: int
    variables: int
    whole: int


QUICK = Effort(12_000, 4_000, 60_000, 4_000)
THOROUGH = Effort(12_000, 60_000, 100_000, 100_000)  # for a search that is asked for a proof

Claims = dict[int, tuple[int, ...]]  # axis -> slots, as an `Override` has them


class _Place(NamedTuple):
    """What ops of one pattern are to do otherwise. pattern: of the problem told apart finely."""

    pattern: int
    claims: Mapping[int, tuple[int, ...]]


def overridden(
    evaluator: Evaluator,
    result: SearchResult,
    starts: Iterable[Plan] = (),
    must_gain: float = MUST_GAIN,
    seconds: float | None = None,
    effort: Effort = QUICK,
) -> tuple[Evaluator, SearchResult]:
    """`result`, or a plan in which some ops do otherwise, where that is better by at least `must_gain` of its step.

    Its evaluations and seconds come on top of those of `result`. Nothing is tried where the goal is another than step
    time, nothing fits, or the user has fixed or closed something.

    Args:
        starts: other plans worth a look. seconds: of wall time at most. effort: up to what sizes.
    """
    problem, start = evaluator.problem, time.monotonic()
    if (
        not result.fits
        or result.stopped == "interrupted"
        or problem.fixed
        or problem.closed
        or has_parts(problem)
        or problem.goal.minimise != FASTEST.minimise
        or not any(size > 1 for size in problem.mesh.sizes)
        or len(problem.patterns) > MOST_PATTERNS
    ):
        return evaluator, result
    with interruptible() as stop:

        def ended() -> bool:
            return stop.asked or (seconds is not None and time.monotonic() - start > seconds)

        fine = with_parts(problem, fine_parts(problem, MOST_PARTS))
        search = _Search(fine, evaluator, result, starts, effort, ended)
        best = search.run(must_gain, seconds, lambda: stop.asked)
        stopped = "interrupted" if stop.asked else result.stopped
    spent = replace(
        result, evaluations=result.evaluations + search.looked, stopped=stopped,
        seconds=result.seconds + time.monotonic() - start,
    )  # fmt: skip
    if not any(isinstance(decision, Override) for decision in best):
        return evaluator, spent
    narrow, plan = narrowed(problem, fine, best)
    final = Evaluator(narrow, [plan], evaluator)
    cost = final.exact_cost(plan)
    objective = Objective(problem, evaluator.cost(problem.fixed))
    gained = objective.reward(plan, cost) - objective.reward(result.plan, result.cost)
    if not objective.met(cost) or gained < must_gain:
        return evaluator, spent
    better = replace(
        spent, plan=plan, cost=cost, best_found_at=spent.evaluations, seconds=result.seconds + time.monotonic() - start
    )
    return final, better


def narrowed(problem: Problem, fine: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """The problem with those of its ops in parts that overrides of the plan are about, and the plan for it. Ops of one
    pattern that are to do the same are one part."""
    told: dict[int, list[tuple[int, int, tuple[int, ...]]]] = defaultdict(list)  # fine part -> what is said of it
    for number, decision in enumerate(plan):
        if isinstance(decision, Override):
            for part, slots in decision.places:
                told[part].append((number, decision.axis, slots))
    coarse: dict[int, set[int]] = defaultdict(set)
    for old, at in zip(problem.op_pattern, fine.op_pattern, strict=True):
        coarse[fine.patterns[at].part].add(old)
    alike: dict[object, int] = {}
    number_of = {
        part: alike.setdefault((tuple(said), tuple(sorted(coarse[part]))), len(alike)) for part, said in told.items()
    }
    parts = [number_of.get(fine.patterns[at].part, NO_PART) for at in fine.op_pattern]
    found: list[Decision] = []
    for decision in plan:
        if isinstance(decision, Override):
            places = sorted({(number_of[part], slots) for part, slots in decision.places})
            found.append(decision._replace(places=tuple(places)))
        else:
            found.append(decision)
    return with_parts(problem, parts), tuple(found)


class _Search:
    """Looks for overrides of one plan. looked: plans evaluated so far."""

    def __init__(
        self,
        fine: Problem,
        evaluator: Evaluator,
        result: SearchResult,
        starts: Iterable[Plan],
        effort: Effort,
        ended: Callable[[], bool],
    ) -> None:
        """fine: the problem of `evaluator`, whose plan the result has, told apart finely."""
        self._problem, self._before = fine, evaluator
        self._effort, self._ended = effort, ended
        self._plan, self._plan_seconds = result.plan, result.cost.step_seconds
        self._starts = list(dict.fromkeys(fine.canonical(plan) for plan in starts))
        self._axes = [axis for axis, size in enumerate(fine.mesh.sizes) if size > 1]
        self.looked = 0

    @cached_property
    def _evaluator(self) -> Evaluator:
        """Most programs need none: nothing can be gained."""
        return Evaluator(self._problem, [self._plan], self._before)

    @cached_property
    def _cost(self) -> Confirmed:
        return Confirmed(self._evaluator)

    @cached_property
    def _objective(self) -> Objective:
        return Objective(self._problem, self._evaluator.cost(self._problem.fixed))

    def run(self, must_gain: float, seconds: float | None, asked: Callable[[], bool]) -> Plan:
        """The best plan found."""
        patterns, axes = self._problem.patterns, len(self._axes)
        few = sum((len(p.form.sizes) + 1) ** axes * perm(axes) for p in patterns) <= self._effort.all_ways
        found = [self._in_rounds(must_gain, seconds, asked, near=near) for near in ((True, False) if few else (True,))]
        other = [plan for plan in found if plan != self._plan]
        return min(other, key=self._rank, default=self._plan)

    def _in_rounds(self, must_gain: float, seconds: float | None, asked: Callable[[], bool], *, near: bool) -> Plan:
        """The best plan that rounds lead to, each from where the one before has led."""
        best = self._plan
        for _ in range(ROUNDS):
            gain = must_gain if best == self._plan else min(must_gain, GAINS_MORE)
            seconds_now = self._plan_seconds if best == self._plan else self._evaluator.cost(best).step_seconds
            possible = (1.0 - gain) * seconds_now
            picked = self._assignment(best, possible, seconds, asked, near=near)
            if picked is None or self._ended():
                break
            plan = self._said(picked)
            if self._rank(plan) >= self._rank(best):
                break
            best = plan
            if self._evaluator.cost(plan).step_seconds > possible:  # it gained less than a round must promise
                break
        return best

    # -- the assignment --------------------------------------------------------------------------------------------

    def _assignment(
        self, plan: Plan, possible: float, seconds: float | None, asked: Callable[[], bool], *, near: bool
    ) -> list[Iteration] | None:
        """[patterns] what each had better do, of what lies near to what a plan makes it do or of everything; None where
        nothing takes less than `possible` seconds, or nobody knows."""
        patterns = self._problem.patterns
        if near:
            some = [self._near(number, plan) for number in range(len(patterns))]
        else:
            some = [every_iteration(pattern, self._problem.mesh.sizes) for pattern in patterns]
        if (near and sum(map(len, some)) > self._effort.ways) or self._ended():
            return None
        ways = PatternWays(self._problem, some)
        prices = PairPrices(ways)
        least = prices.leave_out(possible, self._ended, PASSES)
        if least >= possible:
            return None
        left, close = ways.of_pattern, CLOSE * least
        if close < possible and prices.leave_out(close, self._ended, PASSES) < close:
            picked = self._solved(ways, prices, possible, seconds, asked)
            if picked is not None:
                return picked
        ways.take(left)
        return self._solved(ways, prices, possible, seconds, asked)

    def _solved(
        self, ways: PatternWays, prices: PairPrices, possible: float, seconds: float | None, asked: Callable[[], bool]
    ) -> list[Iteration] | None:
        """[patterns] what each had better do; None where the solver finds nothing that takes less than `possible`
        seconds, of the ways that are left, or there are too many of them."""
        program = IntegerProgram(ways, prices)
        if not program.state(self._ended) or len(program.cost) > self._effort.variables:
            return None
        unlike = UNLIKE * possible / len(ways.of_pattern)
        for number, of in enumerate(ways.of_pattern):
            now = self._problem.iterate(number, self._plan).slot_axes
            for variable, way in zip(ways.variables(number), of, strict=True):
                if way.iteration.slot_axes != now:
                    program.cost[variable] += unlike
        values = program.solve(seconds, asked, GAP, relaxed=len(program.cost) > self._effort.whole).values
        if values is None or float(np.dot(program.cost, values)) > possible * (1.0 + UNLIKE):
            return None
        found = []
        for number, of in enumerate(ways.of_pattern):
            variables = ways.variables(number)
            found.append(of[int(np.argmax(values[variables.start : variables.stop]))].iteration)
        return found

    def _near(self, number: int, plan: Plan) -> list[Iteration]:
        """What ops of a pattern do in a plan, in one that differs in a single thing, and in plans of experts."""
        problem, pattern = self._problem, self._problem.patterns[number]
        split = problem.iterate(number, plan).slot_axes
        splits = splits_near(pattern, problem.mesh.sizes, split, self._axes)
        others = [problem.iterate(number, start).slot_axes for start in (self._plan, *self._starts)]
        return iterations_of(pattern, problem.mesh.sizes, dict.fromkeys((*splits, *others)))

    # -- how to say it ---------------------------------------------------------------------------------------------

    def _said(self, picked: Sequence[Iteration]) -> Plan:
        """The best plan that says what an assignment has otherwise than the plan, or a part of it."""
        order, places = self._places(picked)
        problem = self._problem
        base = self._plan
        if LOOP_READS in problem.roles:
            role = problem.roles.index(LOOP_READS)
            base = (*base, *(Replicate(role, axis) for axis in self._axes if Replicate(role, axis) not in base))
        kept: list[list[_Place]] = self._connected(places)
        units: list[Decision] = list(base)

        def plan_of(groups: Sequence[Sequence[_Place]], others: Sequence[Decision]) -> Plan:
            places = [place for group in groups for place in group]
            return problem.canonical((*others, *_overrides(problem, order, places)))

        best = plan_of(kept, units)
        rank = self._rank(best)
        improved = True
        while improved and self.looked < TRIALS and not self._ended():
            improved = False
            for groups, others in self._shorter(kept, units):
                plan = plan_of(groups, others)
                if self.looked >= TRIALS or self._ended():
                    break
                if plan != best and self._rank(plan) < rank:
                    best, rank, kept, units, improved = plan, self._rank(plan), groups, others, True
                    break
        return best

    def _shorter(
        self, groups: list[list[_Place]], others: list[Decision]
    ) -> Iterable[tuple[list[list[_Place]], list[Decision]]]:
        """The same without one group of places, one place, or one other decision."""
        for number in range(len(groups)):
            yield [*groups[:number], *groups[number + 1 :]], others
        for number in range(len(others)):
            yield groups, [*others[:number], *others[number + 1 :]]
        for number, group in enumerate(groups):
            for place in range(len(group)) if len(group) > 1 else ():
                less = [*group[:place], *group[place + 1 :]]
                yield [*groups[:number], less, *groups[number + 1 :]], others

    def _places(self, picked: Sequence[Iteration]) -> tuple[tuple[int, ...], list[_Place]]:
        """In which order overrides name axes, and where there is something to say."""
        best: tuple[int, tuple[int, ...], list[_Place]] | None = None
        for order in permutations(self._axes):
            claims = [self._claims(number, to, order) for number, to in enumerate(picked)]
            lost = sum(of is None for of in claims)
            if best is None or lost < best[0]:
                best = lost, order, [_Place(number, of) for number, of in enumerate(claims) if of]
            if not lost:
                break
        assert best is not None
        return best[1:]

    def _claims(self, number: int, to: Iteration, order: tuple[int, ...]) -> Claims | None:
        """What makes ops of a pattern do so, empty where the plan does; None where nothing can."""
        problem = self._problem
        pattern, assigner = problem.patterns[number], problem.assigners[number]
        now = problem.iterate(number, self._plan)
        if _alike(now, to):
            return {}
        of_now, of_to = _slot_of(now), _slot_of(to)
        others = [claim_of(pattern, decision, problem.resolution_place) for decision in assigned_order(self._plan)]
        scattered = _scattered_on(pattern.form.results, to)
        for axes in ([axis for axis in order if of_now.get(axis) != of_to.get(axis)], order):
            claims = {
                axis: (of_to[axis], *scattered.get(axis, ())) if axis in of_to else () for axis in axes
            }  # fmt: skip
            state = START
            for claim in (*(AxisClaim(axis, slots) for axis, slots in claims.items()), *others):
                state = state if claim is None else assigner.after(state, claim)
            if _alike(lay_out(pattern, assigner.choices[assigner.choice(state)]), to):
                return claims
        return None

    def _connected(self, places: Iterable[_Place]) -> list[list[_Place]]:
        """Places between which arrays travel, together."""
        found = {place.pattern: place for place in places}
        program, pattern_of = self._problem.program, self._problem.op_pattern
        beside: dict[int, set[int]] = defaultdict(set)
        for value, users in enumerate(program.users):
            made = pattern_of[program.producer[value]]
            for read in {pattern_of[op] for op, _ in users} & found.keys() if made in found else ():
                beside[made].add(read)
                beside[read].add(made)
        groups: list[list[_Place]] = []
        seen: set[int] = set()
        for number in found:
            members, waiting = set[int](), [number]
            while waiting:
                at = waiting.pop()
                if at not in seen:
                    seen.add(at)
                    members.add(at)
                    waiting += sorted(beside[at])
            if members:
                groups.append([found[member] for member in sorted(members)])
        return groups

    def _rank(self, plan: Plan) -> Rank:
        self.looked += 1
        return self._objective.rank(plan, self._cost(plan))


def _overrides(problem: Problem, order: Sequence[int], places: Sequence[_Place]) -> list[Override]:
    """Decisions that say these places, one for each axis."""
    found = []
    for axis in order:
        of = {problem.patterns[p.pattern].part: p.claims[axis] for p in reversed(places) if axis in p.claims}
        if of:
            found.append(Override(axis, tuple(sorted(of.items()))))
    return found


def _alike(one: Iteration, other: Iteration) -> bool:
    return one.slot_axes == other.slot_axes and one.shardings == other.shardings


def _slot_of(iteration: Iteration) -> dict[int, int]:
    """Axis -> the slot that it splits."""
    return {axis: slot for slot, axes in enumerate(iteration.slot_axes) for axis in axes}


def _scattered_on(results: Sequence[Sequence[Sequence[int]]], iteration: Iteration) -> dict[int, tuple[int, ...]]:
    """Axis -> slots on which results that are partial over it are scattered; of a dimension of several, any of them."""
    found: dict[int, tuple[int, ...]] = {}
    for dims, sharding, scattered in zip(results, iteration.shardings, iteration.scattered, strict=True):
        for slots, axes in zip(dims, sharding, strict=True):
            for axis in axes:
                if axis in scattered:
                    found[axis] = tuple(dict.fromkeys((*found.get(axis, ()), *slots)))
    return found
