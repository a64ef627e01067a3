"""Greedy search: the plain search that keeps MCTS honest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.search.model import Budget, Evaluate, Incumbent, OutOfBudget, SearchProgress, SearchResult
from toast_cli.search.moves import Moves


def greedy(
    problem: Problem,
    evaluate: Evaluate,
    budget: Budget,
    rng: np.random.Generator,
    progress: SearchProgress | None = None,
    starts: Sequence[Plan] = (),
) -> SearchResult:
    """Appends the decision that helps most until none has helped for two rounds."""
    incumbent = Incumbent(problem, evaluate, budget, progress)
    plan, moves = problem.fixed, Moves(problem)
    stopped, idle = "plateau", 0
    try:
        while idle < 2:
            before = incumbent.best
            children = {incumbent.extend(plan, move) for move in moves.after(plan)}
            fresh = sorted((child for child in children if child not in incumbent.seen), key=repr)
            if not fresh:
                break
            plan = min(fresh, key=lambda child: (-incumbent.reward(child, incumbent.look(child)), repr(child)))
            idle = 0 if incumbent.best != before else idle + 1
    except OutOfBudget as why:
        stopped = str(why)
    except KeyboardInterrupt:
        stopped = "interrupted"
    return incumbent.result(stopped)
