"""A plan with a proof: the default search, then a lower bound on the step time of every sharding of the program's
arrays, including those that no plan expresses.

The bound is an integer program over the evaluator's own prices: ops of each pattern take any legal split by the mesh
axes and any reduce-scatter of their partial results (see `integer_program`). Every plan is such an assignment, so no
plan is faster than the cheapest. Dual ascent first excludes most ways. The bound ignores device memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from math import inf, perm
from typing import NamedTuple

import numpy as np

from toast_cli.cost.model import Cost
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.interrupts import interruptible
from toast_cli.plan.decisions import Plan
from toast_cli.plan.goal import FASTEST
from toast_cli.plan.problem import Problem
from toast_cli.search.incumbent import Incumbent, OutOfBudget, SearchResult
from toast_cli.search.integer_program import GAP, IntegerProgram
from toast_cli.search.mcts import explore
from toast_cli.search.objective import PRICE
from toast_cli.search.pair_prices import PairPrices
from toast_cli.search.ways import PatternWays

EXACT_SECONDS, CERTIFY_SECONDS = 60.0, 30.0  # for the proof, if the user sets no time
MOST_SPLITS = 20_000  # of one pattern; with more there is no bound
CLOSE = PRICE / 2.0  # relative gap at which the solver may stop


class Bound(NamedTuple):
    """A lower bound on the seconds of a step in which nothing overlaps; 0 where the program or the mesh is too large.
    closed: whether the known plan is optimal by the order in which searches compare plans."""

    seconds: float = 0.0
    closed: bool = False


class Known(NamedTuple):
    """The best known plan before a proof.

    Attributes:
        possible: seconds of that plan, with the price of its decisions. enough: a lower bound of this many seconds
            proves that it is optimal.
    """

    possible: float = inf
    enough: float = inf

    @classmethod
    def of(cls, plan: Plan, cost: Cost) -> Known:
        seconds = cost.most_seconds
        return cls(seconds * (1.0 + PRICE * len(plan)), seconds / (1.0 + PRICE * max(1, len(plan))))


class Deadline:
    """The deadline of a proof. asked: whether the user wants it to end now."""

    def __init__(self, seconds: float, asked: Callable[[], bool] = lambda: False) -> None:
        self._seconds, self._start, self.asked = seconds, time.monotonic(), asked

    def left(self) -> float:
        """Seconds left."""
        return self._seconds - (time.monotonic() - self._start)

    def passed(self, part: float = 0.0) -> bool:
        """Whether at most this fraction of the time is left."""
        return self.asked() or self.left() <= part * self._seconds


def exact(incumbent: Incumbent, rng: np.random.Generator) -> SearchResult:
    """The default search to its end, then the proof; see the module docstring."""
    stopped, least = "plateau", Bound()
    try:
        try:
            explore(incumbent, rng)
        except OutOfBudget as why:
            stopped = str(why)
            if stopped != "iterations":
                raise
        known = Known.of(incumbent.best, incumbent.best_cost) if incumbent.fits(incumbent.best_cost) else Known()
        left = incumbent.seconds_left
        least = bound(incumbent.problem, Deadline(EXACT_SECONDS if left is None else left, incumbent.is_over), known)
    except OutOfBudget as why:
        stopped = str(why)
    except KeyboardInterrupt:
        stopped = "interrupted"
    result = incumbent.result(stopped)
    return replace(result, lower_bound=least.seconds, proven=is_proven(incumbent.problem, result, least))


def certify(evaluator: Evaluator, result: SearchResult, seconds: float = CERTIFY_SECONDS) -> SearchResult:
    """The result with the lower bound and the proof that `seconds` of wall time allow."""
    start = time.monotonic()
    with interruptible() as stop:
        known = Known.of(result.plan, result.cost) if result.fits else Known()
        least = bound(evaluator.problem, Deadline(seconds, lambda: stop.asked), known)
    proven = is_proven(evaluator.problem, result, least)
    taken = result.seconds + time.monotonic() - start
    return replace(result, lower_bound=least.seconds, proven=proven, seconds=taken)


def is_proven(problem: Problem, result: SearchResult, least: Bound) -> bool:
    """Whether no plan is better than the result's by more than the price of decisions."""
    if not result.fits or problem.goal.minimise != FASTEST.minimise or result.cost.most_seconds <= 0.0:
        return False
    return least.closed or least.seconds >= Known.of(result.plan, result.cost).enough


def bound(problem: Problem, deadline: Deadline, known: Known = Known()) -> Bound:  # noqa: B008 - it is frozen
    """A lower bound on every sharding of the program's arrays, `known.possible` at most. It is found sooner if `known`
    is close to the optimum."""
    axes = sum(size > 1 for size in problem.mesh.sizes)
    if any((len(p.form.sizes) + 1) ** axes * perm(axes) > MOST_SPLITS for p in problem.patterns):
        return Bound()
    ways = PatternWays(problem)
    prices = PairPrices(ways)
    if known.possible == inf:
        return _solved(ways, prices, Bound(), deadline, known)
    ascent = prices.ascent(known.possible * (1.0 + GAP))
    least = min(ascent.run(ended=lambda: deadline.passed(0.5)), known.possible)
    if least >= known.enough:
        return Bound(least, closed=True)
    ways.keep(ascent.left)
    return _solved(ways, prices, Bound(least), deadline, known)


def _solved(ways: PatternWays, prices: PairPrices, least: Bound, deadline: Deadline, known: Known) -> Bound:
    """The bound on assignments of these ways, at least `least`: by the integer program and, if that does not suffice,
    by the one that charges for decisions as searches do."""
    program = IntegerProgram(ways, prices)
    if deadline.passed() or not program.state(deadline.passed):
        return least
    found = program.solve(max(1.0, deadline.left()), deadline.asked, CLOSE)
    seconds = min(known.possible, max(least.seconds, found))
    if seconds >= known.enough:
        return Bound(seconds, closed=True)
    most = program.take_decisions(PRICE * seconds)
    pinned = any(any((*pattern.operand_pins, *pattern.result_pins)) for pattern in ways.problem.patterns)
    if pinned or deadline.passed() or not seconds < known.possible <= seconds + most:
        return Bound(seconds)
    charged = program.solve(max(1.0, deadline.left()), deadline.asked, CLOSE)
    return Bound(seconds, known.possible <= charged * (1.0 + PRICE))
