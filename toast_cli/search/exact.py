"""Branch and bound: the best plan, proven, where the space of decisions is small enough to finish.

States are plans in canonical order; appending only adds decisions of lower priority, so an axis an op has spent stays spent.
The bound of a state therefore takes every op's compute at what it is, divided by all axes the op has not spent yet, and half
of every all-reduce it already owes (a later decision can at best turn it into a reduce-scatter); nothing for reshards, which
later decisions may remove. Admissible by construction; states whose bound is not below the best plan are cut.
"""

from __future__ import annotations

import numpy as np

from toast_cli.plan.problem import Problem
from toast_cli.search.bound import LowerBound
from toast_cli.search.model import Budget, Evaluate, Incumbent, OutOfBudget, SearchProgress, SearchResult
from toast_cli.search.moves import next_decisions


def exact(
    problem: Problem,
    evaluate: Evaluate,
    budget: Budget,
    rng: np.random.Generator,
    progress: SearchProgress | None = None,
) -> SearchResult:
    """Depth-first branch and bound, most promising child first."""
    incumbent = Incumbent(problem, evaluate, budget, progress)
    bound = LowerBound(problem)
    stopped = "exhausted"
    lowest = bound(problem.fixed)
    visited = {problem.fixed}
    stack = [problem.fixed]
    try:
        while stack:
            plan = stack.pop()
            cut = incumbent.objective.fastest and incumbent.fits(incumbent.best_cost)
            if cut and bound(plan) >= incumbent.best_cost.step_seconds:
                continue
            children = []
            for decision in next_decisions(problem, plan):
                child = incumbent.extend(plan, (decision,))
                if child in visited:
                    continue
                visited.add(child)
                cost = incumbent.look(child)
                if bound.moved(plan, child):
                    children.append((incumbent.reward(child, cost), repr(child), child))
            stack.extend(child for _, _, child in sorted(children))
    except OutOfBudget as why:
        stopped = str(why)
    except KeyboardInterrupt:
        stopped = "interrupted"
    proven = stopped == "exhausted"
    reached = incumbent.best_cost.step_seconds if proven else min(lowest, incumbent.best_cost.step_seconds)
    return incumbent.result(stopped, proven=proven, lower_bound=reached)
