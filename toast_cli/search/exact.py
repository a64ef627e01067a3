"""A plan with a proof: tree search, then a lower bound on every sharding of the program's arrays, whether a plan says
it or not.

The bound (see `selection`) knows nothing of decisions, so what is proven does not depend on which of them are offered.
It is the bound of a relaxed problem, and mostly tight: where the search has found a plan within the price of its own
decisions of it, no plan is better. What takes a solver longer is for what follows a search (see `finish`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from toast_cli.cost.model import Cost
from toast_cli.plan.decisions import Plan, length_of
from toast_cli.plan.goal import FASTEST
from toast_cli.plan.problem import Problem
from toast_cli.search.climb import climb_around
from toast_cli.search.mcts import grow
from toast_cli.search.model import Budget, Evaluate, Incumbent, OutOfBudget, SearchProgress, SearchResult
from toast_cli.search.moves import Moves
from toast_cli.search.objective import PRICE
from toast_cli.search.selection import Bound, bound

EVALUATIONS = 6000  # of tree search, at most
SOLVER_SECONDS = 60.0  # where the user sets no time
QUICK_SHARE = 0.1  # of it: most proofs need no more, and what is better by single ops is looked for before the others


def exact(
    problem: Problem,
    evaluate: Evaluate,
    budget: Budget,
    rng: np.random.Generator,
    progress: SearchProgress | None = None,
    starts: Sequence[Plan] = (),
) -> SearchResult:
    """Tree search to its end, then the proof; see the module docstring."""
    incumbent = Incumbent(problem, evaluate, budget, progress, starts)
    stopped, least = "plateau", Bound()
    try:
        try:
            grow(incumbent, rng, EVALUATIONS)
            climb_around(Moves(problem), incumbent.worth, incumbent.best)
            climb_around(Moves(problem, local=True), incumbent.worth, incumbent.best)
        except OutOfBudget as why:
            stopped = str(why)
            if stopped != "iterations":
                raise
        left = incumbent.seconds_left
        seconds = QUICK_SHARE * (SOLVER_SECONDS if left is None else left)
        known = sought(incumbent.best, incumbent.best_cost) if incumbent.fits(incumbent.best_cost) else (inf, inf)
        least = bound(problem, seconds, incumbent.is_over, budget.asked, *known)
    except OutOfBudget as why:
        stopped = str(why)
    except KeyboardInterrupt:
        stopped = "interrupted"
    result = incumbent.result(stopped)
    return replace(result, lower_bound=least.seconds, proven=is_proven(problem, result, least))


def is_proven(problem: Problem, result: SearchResult, least: Bound) -> bool:
    """Whether no plan can be better than the result's, except by less than what decisions are charged."""
    if not result.fits or problem.goal.minimise != FASTEST.minimise or result.cost.step_seconds <= 0.0:
        return False
    return least.closed or least.seconds >= sought(result.plan, result.cost)[1]


def sought(plan: Plan, cost: Cost) -> tuple[float, float]:
    """(seconds of a step with what decisions must gain, what no plan may beat for this one to be the best)."""
    return priced(plan, cost), cost.step_seconds / (1.0 + PRICE * max(1.0, length_of(plan)))


def priced(plan: Plan, cost: Cost) -> float:
    """Seconds of a step with what each decision must gain, as searches compare plans."""
    return cost.step_seconds * (1.0 + PRICE * length_of(plan))
