"""A lower bound on the step time of any sharding at all: an integer program over the evaluator's own prices, which
HiGHS solves.

No decisions and no groups: ops of each pattern take any way in which the mesh axes can split them, and any way in which
their partial results are scattered (see `integer_program`). Every plan is such an assignment, so no plan is faster than
the cheapest of them. Most ways are left out by dual ascent before, and what is left is solved case by case (see
`branches`). What the bound does not know: device memory, and ops of one pattern that are split otherwise than
each other (those of mirrored layers).

Enters: a `Problem`. Leaves: seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf, perm
from typing import NamedTuple

from toast_cli.plan.decisions import Plan
from toast_cli.plan.iteration import Iteration
from toast_cli.plan.problem import Problem
from toast_cli.search.branches import cases_of
from toast_cli.search.integer_program import GAP, IntegerProgram
from toast_cli.search.objective import PRICE
from toast_cli.search.pair_prices import PairPrices
from toast_cli.search.ways import PatternWays

MOST_SPLITS = 20_000  # of one pattern, for which there is a bound
CLOSE = PRICE / 2.0  # at which the solver may stop
UNLIKE = 1e-4  # of a step: what it costs in all if every op does otherwise than a plan


class Bound(NamedTuple):
    """What no sharding of a program's arrays can beat; 0 where the program and the mesh are too large to say.

    Attributes:
        seconds: of a step. closed: whether no plan is better than the one that is known, as searches compare plans.
        picked: [patterns] what each does in the best assignment that was found, if one may be fast enough.
    """

    seconds: float = 0.0
    closed: bool = False
    picked: tuple[Iteration, ...] = ()


def bound(
    problem: Problem,
    seconds: float,
    ended: Callable[[], bool] = lambda: False,
    asked: Callable[[], bool] = lambda: False,
    possible: float = inf,
    enough: float = inf,
    plan: Plan | None = None,
) -> Bound:
    """What no sharding of the program's arrays can beat.

    Args:
        seconds: of wall time for the solver, at most. ended: whether time is up before it starts. asked: whether the
            user wants it to end: then there is no bound. possible: seconds that some plan takes, with the price of its
            decisions. The bound is no larger than that, and the closer it is the sooner it is found: ways that no
            faster sharding has are left out. enough: a bound of so many seconds says that the plan is the best. plan:
            what is picked differs from it in no more than it has to.
    """
    axes = sum(size > 1 for size in problem.mesh.sizes)
    if any((len(p.form.sizes) + 1) ** axes * perm(axes) > MOST_SPLITS for p in problem.patterns):
        return Bound()
    return _Bounding(problem, seconds, ended, asked, possible, min(enough, possible), plan).bound()


class _Bounding:
    """Bounds one problem."""

    def __init__(
        self,
        problem: Problem,
        seconds: float,
        ended: Callable[[], bool],
        asked: Callable[[], bool],
        possible: float,
        enough: float,
        plan: Plan | None,
    ) -> None:
        self._seconds, self._start, self._is_over, self._asked = seconds, time.monotonic(), ended, asked
        self._possible, self._enough = possible, enough
        of_plan = plan is not None and possible < inf
        self._now = [problem.iterate(k, plan or ()) for k in range(len(problem.patterns))] if of_plan else []
        self._pinned = any(any((*pattern.operand_pins, *pattern.result_pins)) for pattern in problem.patterns)
        self._ways = PatternWays(problem)
        self._prices = PairPrices(self._ways)

    def bound(self) -> Bound:
        if self._possible == inf:
            return self._of_ways(0.0, self._left())
        ascent = self._prices.ascent(self._possible * (1.0 + GAP))
        least = min(ascent.run(ended=lambda: self._ended(0.5)), self._possible)
        if least >= self._possible:
            return Bound(least, closed=True)
        found = Bound(max(least, self._enough), closed=True)
        every, cases = self._ways.of_pattern, cases_of(self._ways, ascent, self._enough, lambda: self._ended(0.4))
        for number, case in enumerate(cases):
            asked_of_it = self._enough if found.closed else found.seconds  # then the bound on all is no larger
            if case.below(asked_of_it, lambda: self._ended(0.0)) >= asked_of_it:
                continue
            self._ways.take(every)
            self._ways.keep(case.left)
            of_case = self._of_ways(case.bound, self._left() / (len(cases) - number))
            if self._asked():
                return Bound()
            picked = of_case.picked if of_case.seconds < found.seconds or not found.picked else found.picked
            found = Bound(min(found.seconds, of_case.seconds), found.closed and of_case.closed, picked)
        return found

    def _of_ways(self, least: float, seconds: float) -> Bound:
        """The bound on assignments of the ways that are left, of which `least` is known."""
        if self._ended(0.0):
            return Bound(least)
        start, spared = time.monotonic(), UNLIKE * self._possible if self._now else 0.0
        if self._now:
            self._ways.prefer(self._now, spared / len(self._now))
        program = IntegerProgram(self._ways, self._prices)
        if not program.state(lambda: self._ended(0.0)):
            return Bound(least)
        found = program.solve(max(1.0, seconds), self._asked, CLOSE)
        least = min(self._possible, max(least, found.bound - spared))
        left = seconds - (time.monotonic() - start)
        picked = () if found.values is None else tuple(way.iteration for way in program.picked(found.values))
        if least >= self._enough:
            return Bound(least, closed=True, picked=picked)
        most = program.take_decisions(PRICE * least)
        if self._pinned or left < 0.0 or not least < self._possible <= least + most:
            return Bound(least, picked=picked)
        charged = program.solve(max(1.0, left), self._asked, CLOSE).bound - spared
        return Bound(least, self._possible <= charged * (1.0 + PRICE), picked)

    def _left(self) -> float:
        return self._seconds - (time.monotonic() - self._start)

    def _ended(self, part: float) -> bool:
        """Whether no more than this part of the time is left, or none."""
        return self._is_over() or self._left() <= part * self._seconds
