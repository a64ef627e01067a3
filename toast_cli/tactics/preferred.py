"""Prefers a known strategy over one that is predicted to be only slightly faster.

In: an `Evaluator` and a `SearchResult`. Out: the result with the preferred plan. The prediction error exceeds a
gain of `MARGIN`, while a known strategy is well tested in compilers and easy to check. So the fastest strategy within
the margin is taken. If there is none, decisions that together gain less than `SMALL_GAIN` are dropped.
"""

from __future__ import annotations

from dataclasses import replace

from toast_cli.compiler.memory_fit import surely_fitting_bytes
from toast_cli.cost.model import Cost
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.plan.decisions import Plan
from toast_cli.search.incumbent import SearchResult
from toast_cli.search.objective import Objective
from toast_cli.tactics.strategies import priced_strategies

# Tolerated slowdown of a step, as a fraction: for a known strategy, and for the found plan with fewer decisions.
MARGIN, SMALL_GAIN = 0.02, 0.005


def preferred(evaluator: Evaluator, result: SearchResult) -> SearchResult:
    """The result with the known strategy, or the shorter plan, that is nearly as fast; `fastest` then holds the plan of
    the search."""
    if not result.fits:
        return result
    tolerance = _Tolerance(evaluator, result)
    fixed, offers = evaluator.problem.fixed, evaluator.problem.decisions.offers
    known = [
        one
        for one in priced_strategies(evaluator)[0].values()
        if one.plan[: len(fixed)] == fixed  # and what it adds takes none of these back
        and all(map(offers, one.plan[len(fixed) :]))
        and tolerance.allows(one.cost, MARGIN)
    ]
    if known:
        best = min(known, key=lambda one: one.cost.step_seconds)
        plan, name = best.plan, best.label
    else:
        plan, name = shortened(evaluator, result.plan, tolerance), ""
    cost = evaluator.exact_cost(plan, learn=False)
    if plan == result.plan or not tolerance.allows(cost, MARGIN):
        return result
    return replace(result, plan=plan, cost=cost, known_as=name, fastest=(result.plan, result.cost))


class _Tolerance:
    """Accepts plans that keep the goal's bounds, need no more memory than the found plan (or surely fit), and are
    slower by no more than a fraction."""

    def __init__(self, evaluator: Evaluator, result: SearchResult) -> None:
        self._found = result.cost
        self._objective = Objective(evaluator.problem, evaluator.cost(evaluator.problem.fixed))
        problem = evaluator.problem
        self._allowed_bytes = max(result.cost.peak_bytes, surely_fitting_bytes(problem.program, problem.mesh))

    def allows(self, cost: Cost, fraction: float) -> bool:
        fast = cost.step_seconds <= (1 + fraction) * self._found.step_seconds
        return fast and cost.peak_bytes <= self._allowed_bytes and self._objective.met(cost)


def shortened(evaluator: Evaluator, plan: Plan, tolerance: _Tolerance) -> Plan:
    """The plan without decisions that gain little; drops those that gain least first."""
    first = len(evaluator.problem.fixed)
    while True:
        without = [evaluator.problem.canonical((*plan[:k], *plan[k + 1 :])) for k in range(first, len(plan))]
        costs = [(evaluator.cost(one), one) for one in without if len(one) < len(plan)]
        fitting = [(cost.step_seconds, one) for cost, one in costs if tolerance.allows(cost, SMALL_GAIN)]
        if not fitting:
            return plan
        plan = min(fitting, key=lambda it: it[0])[1]
