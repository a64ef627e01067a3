"""Greedy and beam search: the plain searches that keep MCTS honest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.search.model import Budget, Evaluate, Incumbent, OutOfBudget, SearchProgress, SearchResult
from toast_cli.search.moves import Moves

BEAM_WIDTH = 8


def greedy(
    problem: Problem,
    evaluate: Evaluate,
    budget: Budget,
    rng: np.random.Generator,
    progress: SearchProgress | None = None,
    starts: Sequence[Plan] = (),
) -> SearchResult:
    """Appends the decision that helps most until none has helped for two rounds."""
    return _beam(problem, evaluate, budget, progress, 1)


def beam(
    problem: Problem,
    evaluate: Evaluate,
    budget: Budget,
    rng: np.random.Generator,
    progress: SearchProgress | None = None,
    starts: Sequence[Plan] = (),
) -> SearchResult:
    """Keeps the `BEAM_WIDTH` best plans of each length."""
    return _beam(problem, evaluate, budget, progress, BEAM_WIDTH)


def _beam(
    problem: Problem, evaluate: Evaluate, budget: Budget, progress: SearchProgress | None, width: int
) -> SearchResult:
    incumbent = Incumbent(problem, evaluate, budget, progress)
    frontier, moves = [problem.fixed], Moves(problem)
    stopped, idle = "plateau", 0
    try:
        while frontier and idle < 2:
            before = incumbent.best
            children = {incumbent.extend(plan, move) for plan in frontier for move in moves.after(plan)}
            fresh = [plan for plan in children if plan not in incumbent.seen]
            fresh.sort(key=repr)
            scored = [(-incumbent.reward(plan, incumbent.look(plan)), repr(plan), plan) for plan in fresh]
            frontier = [plan for _, _, plan in sorted(scored)[:width]]
            idle = 0 if incumbent.best != before else idle + 1
    except OutOfBudget as why:
        stopped = str(why)
    except KeyboardInterrupt:
        stopped = "interrupted"
    return incumbent.result(stopped)
