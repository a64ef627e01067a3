"""Overrides: where some ops do otherwise than all decisions about groups say, because it pays.

A decision about a group holds wherever the group is. That keeps plans short, and is mostly the best there is; but where
arrays have a dimension twice the best plan may take an axis away from a group in some ops and give it to another there.
In rounds, each from where the one before has led, `assignment` finds what ops had better do and `override_places` how
that is said; connected places that do not gain what they take to say are left out, one after the other, by exact costs.

Enters: a search's result, and plans of experts. Leaves: a better plan, with the problem whose patterns know their
parts, or what came in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from toast_cli.cost.model import Cost
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.plan.decisions import Decision, Override, Plan
from toast_cli.plan.goal import FASTEST
from toast_cli.plan.iteration import Iteration
from toast_cli.plan.parts import fine_parts, has_parts, narrowed, with_parts
from toast_cli.plan.problem import Problem
from toast_cli.search.assignment import CheapestAssignment
from toast_cli.search.interrupts import interruptible
from toast_cli.search.mesh_search import Confirmed
from toast_cli.search.model import SearchResult
from toast_cli.search.objective import Objective, Rank
from toast_cli.search.override_places import Place, connected, otherwise, overrides

# Of a step: gains of less are not seen in what compilers make of it (benchmarks/overrides.py).
MUST_GAIN = 0.05
# The same for each kind of op: the more prices pick, the more of the gain is errors of prices. Steps of
# seven published models on 256 v5e took up to 17 % longer by XLA:TPU without this, now 6 % (docs/benchmarks.md).
PLACE_MUST_GAIN = 0.001
# That ops are told apart into where patterns are fewer: small programs only. In larger ones ops that are alike had
# better do alike; XLA gives plans like that other collectives than they promise.
MOST_PARTS = 100
MOST_PATTERNS = 600  # with more nothing is tried
TRIALS = 600  # plans looked at to leave overrides out
ROUNDS = 4  # at most
GAINS_MORE = 0.005  # of a step: what a round must promise to gain, from the second on


def overridden(
    evaluator: Evaluator,
    result: SearchResult,
    starts: Iterable[Plan] = (),
    must_gain: float = MUST_GAIN,
    seconds: float | None = None,
    place_must_gain: float = PLACE_MUST_GAIN,
) -> tuple[Evaluator, SearchResult]:
    """`result`, or a plan in which some ops do otherwise, where that is better by at least `must_gain` of its step, and
    `place_must_gain` for each place besides.

    Its evaluations and seconds come on top of those of `result`. Nothing is tried where the goal is another than step
    time, nothing fits, or the user has fixed or closed something.

    Args:
        starts: other plans worth a look. seconds: of wall time at most.
    """
    problem, start = evaluator.problem, time.monotonic()
    if not may_do_otherwise(problem, result):
        return evaluator, result
    with interruptible() as stop:

        def ended() -> bool:
            return stop.asked or (seconds is not None and time.monotonic() - start > seconds)

        fine = finely(problem)
        compilation = evaluator.items.compilation
        cheapest = CheapestAssignment(fine, result.plan, starts, ended, seconds, lambda: stop.asked, compilation)
        search = _Search(fine, evaluator, result, ended, place_must_gain)
        best = search.run(cheapest, must_gain)
        stopped = "interrupted" if stop.asked else result.stopped
    spent = replace(
        result, evaluations=result.evaluations + search.looked, stopped=stopped,
        seconds=result.seconds + time.monotonic() - start,
    )  # fmt: skip
    return _taken(evaluator, search, spent, best, must_gain)


def may_do_otherwise(problem: Problem, result: SearchResult) -> bool:
    """Whether it is looked for ops of the problem that do otherwise than the result's plan says."""
    return (
        result.fits
        and result.stopped != "interrupted"
        and not problem.fixed
        and not problem.closed
        and not has_parts(problem)
        and problem.goal.minimise == FASTEST.minimise
        and any(size > 1 for size in problem.mesh.sizes)
        and len(problem.patterns) <= MOST_PATTERNS
    )


def finely(problem: Problem) -> Problem:
    """The problem with its ops told apart, where it is small."""
    return with_parts(problem, fine_parts(problem, MOST_PARTS))


def doing(
    evaluator: Evaluator, result: SearchResult, fine: Problem, picked: Sequence[Iteration], must_gain: float
) -> tuple[Evaluator, SearchResult]:
    """`result`, or a plan with what an assignment has otherwise, where that is better by at least `must_gain`.

    Args:
        fine: the problem, told apart. picked: [patterns of it] what each does.
    """
    start, search = time.monotonic(), _Search(fine, evaluator, result, lambda: False, 0.0)
    best = search.said(picked)
    spent = replace(
        result, evaluations=result.evaluations + search.looked, seconds=result.seconds + time.monotonic() - start
    )
    return _taken(evaluator, search, spent, best, must_gain)


def _taken(
    evaluator: Evaluator, search: _Search, result: SearchResult, plan: Plan, must_gain: float
) -> tuple[Evaluator, SearchResult]:
    """`result`, or this plan where it is better by that much, by exact costs; its problem knows the plan's parts."""
    problem, start = evaluator.problem, time.monotonic()
    if not any(isinstance(decision, Override) for decision in plan) or search.gained(plan) < must_gain:
        return evaluator, result
    narrow, best = narrowed(problem, search.problem, plan)
    final = Evaluator(narrow, [best], evaluator)
    cost = final.exact_cost(best)
    if not search.objective.met(cost) or search.better(plan, cost) < must_gain:
        return evaluator, result
    seconds = result.seconds + time.monotonic() - start
    return final, replace(result, plan=best, cost=cost, best_found_at=result.evaluations, seconds=seconds)


class _Search:
    """Looks for overrides of one plan.

    Attributes:
        problem: told apart finely. looked: plans evaluated so far.
    """

    def __init__(
        self,
        fine: Problem,
        evaluator: Evaluator,
        result: SearchResult,
        ended: Callable[[], bool],
        place_must_gain: float,
    ) -> None:
        """fine: the problem of `evaluator`, whose plan the result has, told apart finely. place_must_gain: see
        `overridden`."""
        self.problem, self._before, self._ended = fine, evaluator, ended
        self._plan, self._cost_before = result.plan, result.cost
        self._place_must_gain = place_must_gain
        self.looked = 0

    @cached_property
    def _evaluator(self) -> Evaluator:
        """Most programs need none: nothing can be gained."""
        return Evaluator(self.problem, [self._plan], self._before)

    @cached_property
    def _cost(self) -> Confirmed:
        return Confirmed(self._evaluator)

    @cached_property
    def objective(self) -> Objective:
        return Objective(self.problem, self._evaluator.cost(self.problem.fixed))

    def run(self, cheapest: CheapestAssignment, must_gain: float) -> Plan:
        """The best plan found."""
        everything = (True, False) if cheapest.few else (True,)
        found = [self._in_rounds(cheapest, must_gain, near=near) for near in everything]
        other = [plan for plan in found if plan != self._plan]
        return min(other, key=self._rank, default=self._plan)

    def _in_rounds(self, cheapest: CheapestAssignment, must_gain: float, *, near: bool) -> Plan:
        """The best plan that rounds lead to."""
        best, now, gain = self._plan, self._cost_before, must_gain
        for _ in range(ROUNDS):
            possible = (1.0 - gain) * now.step_seconds
            otherwise = self._place_must_gain * self._cost_before.step_seconds
            picked = cheapest.find(best, possible, otherwise, near=near)
            if picked is None or self._ended():
                break
            plan = self.said(picked)
            if self._rank(plan) >= self._rank(best):
                break
            best, now, gain = plan, self._charged(plan, self._cost(plan)), min(must_gain, GAINS_MORE)
            if now.step_seconds > possible:  # it gained less than a round must promise
                break
        return best

    def said(self, picked: Sequence[Iteration]) -> Plan:
        """The best plan that says what an assignment has otherwise than the plan, or a part of it."""
        problem = self.problem
        places = otherwise(problem, self._plan, picked)
        kept, units = connected(problem, places), list(self._plan)

        def plan_of(groups: Sequence[Sequence[Place]], others: Sequence[Decision]) -> Plan:
            said = [place for group in groups for place in group]
            return problem.canonical((*others, *overrides(problem, said)))

        best = plan_of(kept, units)
        rank, improved = self._rank(best), True
        while improved:
            improved = False
            for groups, others in _shorter(kept, units):
                if self.looked >= TRIALS or self._ended():
                    break
                plan = plan_of(groups, others)
                if plan != best and (shorter := self._rank(plan)) < rank:
                    best, rank, kept, units, improved = plan, shorter, groups, others, True
                    break
        return best

    def gained(self, plan: Plan) -> float:
        """How much better it is than the result's plan, in units of reward, by costs that may leave out memory."""
        return self.better(plan, self._cost(plan))

    def better(self, plan: Plan, cost: Cost) -> float:
        """The same of a plan that costs so much."""
        before = self.objective.reward(self._plan, self._cost_before)
        return self.objective.reward(plan, self._charged(plan, cost)) - before

    def _rank(self, plan: Plan) -> Rank:
        self.looked += 1
        return self.objective.rank(plan, self._charged(plan, self._cost(plan)))

    def _charged(self, plan: Plan, cost: Cost) -> Cost:
        """What a plan costs, with what its places must gain."""
        parts = {part for decision in plan if isinstance(decision, Override) for part, _ in decision.places}
        more = 1.0 + self._place_must_gain * len(parts)
        return replace(
            cost, compute_seconds=more * cost.compute_seconds, communication_seconds=more * cost.communication_seconds
        )


def _shorter(groups: list[list[Place]], others: list[Decision]) -> Iterable[tuple[list[list[Place]], list[Decision]]]:
    """The same without one group of places, one other decision, or one place."""
    for number in range(len(groups)):
        yield [*groups[:number], *groups[number + 1 :]], others
    for number in range(len(others)):
        yield groups, [*others[:number], *others[number + 1 :]]
    for number, group in enumerate(groups):
        for place in range(len(group)) if len(group) > 1 else ():
            less = [*group[:place], *group[place + 1 :]]
            yield [*groups[:number], less, *groups[number + 1 :]], others
