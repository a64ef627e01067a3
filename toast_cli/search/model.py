"""What goes in and out of a search, and how plans are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import nsmallest
from math import inf

import numpy as np

from toast_cli.cost.model import Cost
from toast_cli.plan.decisions import Decision, Plan
from toast_cli.plan.problem import Problem
from toast_cli.search.edits import suited
from toast_cli.search.objective import Objective, Rank

Evaluate = Callable[[Plan], Cost]
# best step seconds so far (inf: nothing fits yet), evaluations, elapsed seconds, fraction of the budget used
SearchProgress = Callable[[float, int, float, float], None]


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop. evaluations: plans to evaluate at most; seconds: wall time at most; None for no bound. asked:
    whether the user wants it to end. keep: how many of the plans looked at the result holds, the best ones.
    """

    evaluations: int | None = None
    seconds: float | None = None
    asked: Callable[[], bool] = lambda: False
    keep: int = 0


@dataclass(frozen=True, slots=True)
class SearchResult:
    """plan: the best found; fits: whether it stays within memory and keeps the goal's bounds (if not, the plan
    that exceeds them least).

    evaluations: different plans looked at. best_found_at: the evaluation that found the plan. proven: nothing can be
    better. stopped: "budget", "iterations", "plateau", "exhausted" or "interrupted". lower_bound: seconds, 0 where none
    was sought. trail: the evaluation that found each best plan so far, and its cost. seen: the best plans looked at, as
    many as were to be kept. fastest: what the search found, with its cost, where another plan was preferred (see
    `tactics.preferred`). known_as: the strategy that was preferred, if it is one.
    """

    plan: Plan
    cost: Cost
    fits: bool
    evaluations: int
    best_found_at: int
    seconds: float
    stopped: str
    proven: bool = False
    lower_bound: float = 0.0
    trail: tuple[tuple[int, Cost], ...] = ()
    seen: tuple[Plan, ...] = ()
    fastest: tuple[Plan, Cost] | None = None
    known_as: str = ""


# problem, evaluate, budget, random numbers, whom to tell, plans to start from
Search = Callable[
    [Problem, Evaluate, Budget, np.random.Generator, "SearchProgress | None", Sequence[Plan]], SearchResult
]


class OutOfBudget(Exception):  # noqa: N818 - not an error: it ends a search from within
    """Raised by `Incumbent.look` when the budget is spent; carries why."""


class Incumbent:
    """Evaluates plans once each, keeps the best, and ends the search when the budget is spent.

    Infeasible plans lose against feasible ones; among infeasible ones less excess wins, so a search that cannot fit
    anything returns the plan of least memory. What is better otherwise, the goal says (see `objective`).
    """

    def __init__(
        self,
        problem: Problem,
        evaluate: Evaluate,
        budget: Budget,
        progress: SearchProgress | None = None,
        starts: Sequence[Plan] = (),
    ) -> None:
        self.problem = problem
        self.fixed: Plan = problem.fixed
        self.starts = tuple(dict.fromkeys(suited(problem, plan) for plan in starts))
        self._canonical = problem.canonical
        self._evaluate = evaluate
        self._budget = budget
        self._progress = progress
        self._start = time.monotonic()
        self.seen: dict[Plan, Cost] = {}
        self.best_found_at = 0
        self.reference = evaluate(self.fixed)
        self.objective = Objective(problem, self.reference)
        self._best_rank = self.rank(self.fixed, self.reference)
        self.best: Plan = self.fixed
        self.best_cost = self.reference
        self.seen[self.fixed] = self.reference
        self._trail = [(0, self.reference)]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def used(self) -> float:
        """Fraction of the budget spent, 0 to 1."""
        parts = [0.0]
        if self._budget.evaluations:
            parts.append(len(self.seen) / self._budget.evaluations)
        if self._budget.seconds:
            parts.append(self.seconds / self._budget.seconds)
        return min(1.0, max(parts))

    def look(self, plan: Plan) -> Cost:
        """Cost of a plan in canonical order; raises OutOfBudget instead of evaluating beyond the budget."""
        cost = self.seen.get(plan)
        if cost is None:
            count = len(self.seen)
            if self._budget.evaluations is not None and count >= self._budget.evaluations:
                raise OutOfBudget("iterations")
            self.check()
            cost = self.seen[plan] = self._evaluate(plan)
            rank = self.rank(plan, cost)
            if rank < self._best_rank:
                self._best_rank, self.best, self.best_cost, self.best_found_at = rank, plan, cost, count
                self._trail.append((count, cost))
            if self._progress and count % 32 == 0:
                self.report()
        return cost

    def allow(self, evaluations: int | None, seconds: float | None) -> None:
        """Makes the budget so many evaluations and seconds from now on; None for no bound."""
        self._budget = replace(
            self._budget,
            evaluations=None if evaluations is None else len(self.seen) + evaluations,
            seconds=None if seconds is None else self.seconds + seconds,
        )

    def check(self) -> None:
        """Raises OutOfBudget when time is up or the user wants it to end."""
        if self._budget.asked():
            raise OutOfBudget("interrupted")
        if self._budget.seconds is not None and self.seconds >= self._budget.seconds:
            raise OutOfBudget("budget")

    @property
    def seconds_left(self) -> float | None:
        """Of the budget; None where it has no end."""
        return None if self._budget.seconds is None else max(0.0, self._budget.seconds - self.seconds)

    def is_over(self) -> bool:
        """Whether time is up or the user wants it to end."""
        return self._budget.asked() or self.seconds_left == 0.0

    def extend(self, plan: Plan, move: tuple[Decision, ...]) -> Plan:
        """The plan with the move's decisions appended, in canonical order."""
        return self._canonical((*plan, *move))

    def fits(self, cost: Cost) -> bool:
        """Whether device memory and the goal's bounds are kept."""
        return self.objective.met(cost)

    def rank(self, plan: Plan, cost: Cost) -> Rank:
        """Smaller is better."""
        return self.objective.rank(plan, cost)

    def reward(self, plan: Plan, cost: Cost) -> float:
        """Larger is better."""
        return self.objective.reward(plan, cost)

    def worth(self, plan: Plan) -> float:
        """The reward of a plan in canonical order; raises OutOfBudget as `look` does."""
        return self.reward(plan, self.look(plan))

    def report(self) -> None:
        if self._progress:
            best = self.best_cost.step_seconds if self.fits(self.best_cost) else inf
            self._progress(best, len(self.seen), self.seconds, self.used)

    def _simplify(self) -> None:
        """Drops decisions that change nothing, as far as the budget allows."""
        improved = True
        while improved:
            before = self.best
            for k in range(len(self.fixed), len(before)):
                self.look(self._canonical((*before[:k], *before[k + 1 :])))
                if self.best != before:
                    break
            improved = self.best != before

    def _kept(self) -> tuple[Plan, ...]:
        ranked = nsmallest(self._budget.keep, self.seen, key=lambda plan: self.rank(plan, self.seen[plan]))
        return tuple(ranked)

    def result(self, stopped: str, *, proven: bool = False, lower_bound: float = 0.0) -> SearchResult:
        self.report()
        with suppress(OutOfBudget, KeyboardInterrupt):
            self._simplify()
        return SearchResult(
            self.best,
            self.best_cost,
            self.fits(self.best_cost),
            len(self.seen),
            self.best_found_at,
            self.seconds,
            stopped,
            proven,
            lower_bound,
            tuple(self._trail),
            self._kept(),
        )
