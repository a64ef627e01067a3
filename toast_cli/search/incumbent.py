"""The incumbent of a search: evaluates each plan once, keeps the best, and ends the search when its budget is spent.

In: an `Evaluator`, a `Budget` and plans to start from. Out: a `SearchResult`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import nsmallest
from math import inf, log

from toast_cli.cost.model import Cost
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.plan.decisions import Plan
from toast_cli.plan.goal import STEP_TIME
from toast_cli.search.edits import DecisionSequence, suited
from toast_cli.search.objective import Objective

# best step seconds so far (inf: nothing fits yet), evaluations, elapsed seconds, fraction of the budget used
SearchProgress = Callable[[float, int, float, float], None]


# A search ends when this fraction of the evaluated plans, and at least this many, came after the best one.
FLAT, LEAST_FLAT = 0.5, 3000
# A search that may give up does so after this many plans, if the best exceeds the bounds by more than this factor.
PATIENCE, HOPELESS = 600, 1.5


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop. evaluations: plans to evaluate at most; seconds: wall time at most; None for no bound. asked:
    whether the user wants it to end. keep: number of best plans in the result. gives_up: whether to end early where
    hardly any plan will fit (see `PATIENCE`). tree: whether a search tree comes before local search.
    """

    evaluations: int | None = None
    seconds: float | None = None
    asked: Callable[[], bool] = lambda: False
    keep: int = 0
    gives_up: bool = False
    tree: bool = True


@dataclass(frozen=True, slots=True)
class SearchResult:
    """plan: the best found; fits: whether it stays within memory and keeps the goal's bounds (if not, the plan
    that exceeds them least).

    evaluations: distinct plans evaluated. best_found_at: the evaluation that found the plan. stopped: "budget",
    "iterations", "plateau", "interrupted" or "hopeless". trail: (evaluation, cost) of each successive best plan. seen:
    the best plans evaluated, `Budget.keep` of them. fastest: the plan that the search found, with its cost, if another
    plan was preferred (see `tactics.preferred`). known_as: the strategy that was preferred, if it is one.
    """

    plan: Plan
    cost: Cost
    fits: bool
    evaluations: int
    best_found_at: int
    seconds: float
    stopped: str
    trail: tuple[tuple[int, Cost], ...] = ()
    seen: tuple[Plan, ...] = ()
    fastest: tuple[Plan, Cost] | None = None
    known_as: str = ""


class OutOfBudget(Exception):  # noqa: N818 - not an error: it ends a search from within
    """Raised by `Incumbent.look` when the budget is spent; carries why."""


class Incumbent:
    """Evaluates plans once each, keeps the best, and ends the search when the budget is spent.

    Infeasible plans lose against feasible ones; among infeasible ones less excess wins, so a search that cannot fit
    anything returns the plan of least memory. Otherwise the goal decides (see `objective`).

    Quick costs evaluate memory at selected moments only. So a plan that would be the best gets its exact cost, and if
    that exceeds a bound after all, the moment of its peak joins the selected ones.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        budget: Budget,
        starts: Sequence[Plan] = (),
        progress: SearchProgress | None = None,
    ) -> None:
        """Evaluates the plan with the fixed decisions only, whatever the budget.

        Args:
            starts: plans to try first, such as known strategies; decisions that do not suit the problem are dropped.
        """
        evaluator.unlearn()  # the result must not depend on earlier searches
        self.evaluator, self.problem = evaluator, evaluator.problem
        self.starts = tuple(dict.fromkeys(suited(self.problem, plan) for plan in starts))
        self._budget, self._progress = budget, progress
        self._start = time.monotonic()
        self.best: Plan = self.problem.fixed
        self.reference = evaluator.cost(self.best)
        self.objective = Objective(self.problem, self.reference)
        self.best_cost = self._exact(self.best, self.reference)
        self._best_rank = self.objective.rank(self.best, self.best_cost)
        self.seen: dict[Plan, Cost] = {self.best: self.best_cost}
        self.best_found_at = 0
        self._trail = [(0, self.best_cost)]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def grows_tree(self) -> bool:
        """Whether a search tree comes before local search."""
        return self._budget.tree

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
            if self._budget.gives_up and count == PATIENCE and self.objective.excess(self.best_cost) > log(HOPELESS):
                raise OutOfBudget("hopeless")
            self.check()
            cost = self.evaluator.cost(plan, self._below())
            rank = self.objective.rank(plan, cost)
            if rank < self._best_rank:
                cost = self._exact(plan, cost)
                rank = self.objective.rank(plan, cost)
            self.seen[plan] = cost
            if rank < self._best_rank:
                self._best_rank, self.best, self.best_cost, self.best_found_at = rank, plan, cost, count
                self._trail.append((count, cost))
            if self._progress and count % 32 == 0:
                self.report()
        return cost

    def _below(self) -> float:
        """Seconds of a step above which no plan can be the best; 0 where step time does not decide."""
        if self.fits(self.best_cost):
            return self.objective.step_seconds(self.best_cost) if self.objective.fastest else inf
        return inf if any(bound.figure == STEP_TIME for bound in self.problem.goal.bounds) else 0.0

    def _exact(self, plan: Plan, cost: Cost) -> Cost:
        """The exact cost of a plan, unless its quick cost exceeds the bounds already."""
        if not self.objective.met(cost):
            return cost
        exact = self.evaluator.exact_cost(plan, learn=False)
        if not self.objective.met(exact) or self.objective.step_seconds(exact) > self.objective.step_seconds(cost):
            self.evaluator.exact_cost(plan)  # learns the moment
        return exact

    def check(self) -> None:
        """Raises OutOfBudget when time is up or the user wants it to end."""
        if self._budget.asked():
            raise OutOfBudget("interrupted")
        if self._budget.seconds is not None and self.seconds >= self._budget.seconds:
            raise OutOfBudget("budget")

    def is_flat(self, begun: int) -> bool:
        """Whether the search has reached a plateau (see `FLAT`). begun: evaluations before those that count."""
        return len(self.seen) - max(begun, self.best_found_at) > max(LEAST_FLAT, FLAT * len(self.seen))

    def extend(self, plan: Plan, move: DecisionSequence) -> Plan:
        """The plan with the move's decisions appended, in canonical order."""
        return self.problem.canonical((*plan, *move))

    def fits(self, cost: Cost) -> bool:
        """Whether the cost is within device memory and the goal's bounds."""
        return self.objective.met(cost)

    def worth(self, plan: Plan) -> float:
        """The reward of a plan in canonical order; raises OutOfBudget as `look` does."""
        return self.objective.reward(plan, self.look(plan))

    def report(self) -> None:
        if self._progress:
            best = self.best_cost.step_seconds if self.fits(self.best_cost) else inf
            self._progress(best, len(self.seen), self.seconds, self.used)

    def _simplify(self) -> None:
        """Drops decisions that change nothing, as far as the budget allows."""
        improved = True
        while improved:
            before = self.best
            for k in range(len(self.problem.fixed), len(before)):
                self.look(self.problem.canonical((*before[:k], *before[k + 1 :])))
                if self.best != before:
                    break
            improved = self.best != before

    def _kept(self) -> tuple[Plan, ...]:
        ranked = nsmallest(self._budget.keep, self.seen, key=lambda plan: self.objective.rank(plan, self.seen[plan]))
        return tuple(ranked)

    def result(self, stopped: str) -> SearchResult:
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
            tuple(self._trail),
            self._kept(),
        )
