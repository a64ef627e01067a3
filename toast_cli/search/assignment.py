"""What ops had better do, whatever decisions say: the cheapest assignment of ways to patterns near a plan.

Each pattern may keep what the plan makes of it, do what an expert's plan would, or change one thing; of small programs
also anything. Dual ascent comes first, and mostly says that nothing can be gained; the rest is the solution of an
integer program (see `integer_program`).

Enters: a problem, a plan and others worth a look. Leaves: an `Iteration` for each pattern, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import perm

import numpy as np

from toast_cli.compiler.compilation import Compilation
from toast_cli.plan.decisions import Plan
from toast_cli.plan.iteration import Iteration
from toast_cli.plan.problem import Problem
from toast_cli.search.every_split import every_iteration, iterations_of, splits_near
from toast_cli.search.integer_program import IntegerProgram
from toast_cli.search.pair_prices import PairPrices
from toast_cli.search.ways import PatternWays

PASSES, GAP = 60, 1e-3  # of `leave_out`, and of the solver: good plans, not proofs
CLOSE = 1.01  # times the bound: where some assignment may be so fast, slower ones are not looked at
UNLIKE = 1e-3  # of a step: what it costs in all if every op does otherwise, so that as few as can be do


# Up to what sizes a program is looked at: ways of all patterns that are near to a plan; ways in all, if there are no
# more of which everything is looked at besides; and variables of an integer program. With more variables than `WHOLE`
# the solver may give a pattern several ways in part, and the one it has most of is taken. It looks at so many nodes of
# its tree. What these leave open gained nothing on any program of benchmarks/overrides.py.
MOST_NEAR, MOST_IN_ALL, MOST_VARIABLES, WHOLE, NODES = 12_000, 4_000, 60_000, 8_000, 1


class CheapestAssignment:
    """Looks for what ops of a problem had better do than a plan makes of them.

    Attributes:
        few: whether there are so few ways in all that everything can be looked at.
    """

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        starts: Iterable[Plan],
        ended: Callable[[], bool],
        seconds: float | None,
        asked: Callable[[], bool],
        compilation: Compilation | None = None,
    ) -> None:
        """starts: other plans worth a look. ended: whether time is up. seconds, asked: see `IntegerProgram.solve`.
        compilation: of the program, where it is known."""
        self._problem, self._plan, self._ended = problem, plan, ended
        self._seconds, self._asked, self._compilation = seconds, asked, compilation
        self._starts = list(dict.fromkeys(problem.canonical(start) for start in starts))
        self._axes = [axis for axis, size in enumerate(problem.mesh.sizes) if size > 1]
        self._known: tuple[PatternWays, PairPrices] | None = None
        axes = len(self._axes)
        ways = sum((len(p.form.sizes) + 1) ** axes * perm(axes) for p in problem.patterns)
        self.few = ways <= MOST_IN_ALL

    def find(self, plan: Plan, possible: float, otherwise: float, *, near: bool) -> list[Iteration] | None:
        """[patterns] what each had better do, of what lies near to what a plan makes it do or of everything; None where
        nothing takes less than `possible` seconds, or nobody knows.

        Args:
            otherwise: seconds with which each pattern counts that does otherwise than in the plan this was made for.
        """
        patterns = self._problem.patterns
        if near:
            some = [self._near(number, plan) for number in range(len(patterns))]
        else:
            some = [every_iteration(pattern, self._problem.mesh.sizes) for pattern in patterns]
        if (near and sum(map(len, some)) > MOST_NEAR) or self._ended():
            return None
        ways, prices = self._priced(some)
        now = [self._problem.iterate(number, self._plan) for number in range(len(patterns))]
        ways.prefer(now, max(otherwise, UNLIKE * possible / len(patterns)))
        least = prices.leave_out(possible, self._ended, PASSES)
        if least >= possible:
            return None
        left, close = ways.of_pattern, CLOSE * least
        if close < possible and prices.leave_out(close, self._ended, PASSES) < close:
            picked = self._solved(ways, prices, possible)
            if picked is not None:
                return picked
        ways.take(left)
        return self._solved(ways, prices, possible)

    def _solved(self, ways: PatternWays, prices: PairPrices, possible: float) -> list[Iteration] | None:
        """[patterns] what each had better do; None where the solver finds nothing that takes less than `possible`
        seconds, of the ways that are left, or there are too many of them."""
        program = IntegerProgram(ways, prices)
        if not program.state(self._ended) or len(program.cost) > MOST_VARIABLES:
            return None
        relaxed = len(program.cost) > WHOLE
        values = program.solve(self._seconds, self._asked, GAP, NODES, relaxed=relaxed).values
        if values is None or float(np.dot(program.cost, values)) > possible * (1.0 + UNLIKE):
            return None
        return [way.iteration for way in program.picked(values)]

    def _priced(self, some: list[list[Iteration]]) -> tuple[PatternWays, PairPrices]:
        """Ways and their prices; what does not depend on which ways there are is worked out once."""
        if self._known is None:
            ways = PatternWays(self._problem, some, self._compilation)
            self._known = ways, PairPrices(ways, unsliced=True)
        else:
            self._known[0].look_at(some)
        return self._known

    def _near(self, number: int, plan: Plan) -> list[Iteration]:
        """What ops of a pattern do in a plan, in one that differs in a single thing, and in plans of experts."""
        problem, pattern = self._problem, self._problem.patterns[number]
        split = problem.iterate(number, plan).slot_axes
        splits = splits_near(pattern, problem.mesh.sizes, split, self._axes)
        others = [problem.iterate(number, start).slot_axes for start in (self._plan, *self._starts)]
        return iterations_of(pattern, problem.mesh.sizes, dict.fromkeys((*splits, *others)))
