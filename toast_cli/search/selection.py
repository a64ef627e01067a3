"""A lower bound on the step time of any sharding at all: an integer program over the evaluator's own prices, which
HiGHS solves.

No decisions and no groups: ops of each pattern take any way in which the mesh axes can split them, and any way in which
their partial results are scattered (see `integer_program`). Every plan is such an assignment, so no plan is faster than
the cheapest of them. What the bound does not know: device memory, and ops of one pattern that are split otherwise than
each other (those of mirrored layers).

Enters: a `Problem`. Leaves: seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf, perm
from typing import NamedTuple

from toast_cli.plan.problem import Problem
from toast_cli.search.integer_program import GAP, IntegerProgram
from toast_cli.search.objective import PRICE
from toast_cli.search.pair_prices import PairPrices
from toast_cli.search.ways import PatternWays

MOST_SPLITS = 20_000  # of one pattern, for which there is a bound


class Bound(NamedTuple):
    """What no sharding of a program's arrays can beat; 0 where the program and the mesh are too large to say.

    Attributes:
        seconds: of a step. charged: the same where each pair of a group and a mesh axis that splits it costs what a
            decision must gain: what no plan can beat as searches compare plans. `seconds` where nothing more is known.
    """

    seconds: float = 0.0
    charged: float = 0.0


def bound(
    problem: Problem,
    seconds: float,
    ended: Callable[[], bool] = lambda: False,
    asked: Callable[[], bool] = lambda: False,
    possible: float = inf,
) -> Bound:
    """What no sharding of the program's arrays can beat.

    Args:
        seconds: of wall time for the solver, at most. ended: whether time is up before it starts. asked: whether the
            user wants it to end: then there is no bound. possible: seconds that some plan takes, with the price of its
            decisions. The bound is no larger than that, and the closer it is the sooner it is found: ways that no
            faster sharding has are left out.
    """
    axes = sum(size > 1 for size in problem.mesh.sizes)
    if any((len(p.form.sizes) + 1) ** axes * perm(axes) > MOST_SPLITS for p in problem.patterns):
        return Bound()
    start = time.monotonic()

    def left() -> float:
        return seconds - (time.monotonic() - start)

    ways = PatternWays(problem)
    prices = PairPrices(ways)
    least = 0.0
    if possible < inf:
        least = prices.leave_out(possible * (1.0 + GAP), lambda: ended() or left() < seconds / 2)
        if least >= possible:
            return Bound(possible, possible)
    program = IntegerProgram(ways, prices)
    if not program.state(ended):
        return Bound()
    least = min(possible, max(least, program.solve(max(1.0, left()), asked).bound))
    pinned = any(any((*pattern.operand_pins, *pattern.result_pins)) for pattern in problem.patterns)
    if possible == inf or least * (1.0 + GAP) >= possible or least <= 0.0 or pinned or left() < 0.0:
        return Bound(least, least)
    program.take_decisions(PRICE * least)
    return Bound(least, max(least, min(possible, program.solve(max(1.0, left()), asked).bound)))
