"""Runs the search on one problem, or on each mesh shape if the user leaves the shape open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from toast_cli.base.children import interruptible
from toast_cli.hardware import Mesh
from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.request import Effort
from toast_cli.search.incumbent import Budget, Incumbent, Objective, Rank, SearchProgress, SearchResult
from toast_cli.search.mcts import mcts

PLANS: dict[str, int] = {Effort.low: 2000, Effort.medium: 10_000, Effort.high: 40_000}  # evaluated, at most
FINALISTS = 2  # mesh shapes that are searched to the end


@dataclass(frozen=True)
class Settings:
    """How to search.

    Attributes:
        evaluations: plans to evaluate, at most; seconds: of wall time. If both are None, `effort` decides. keep: number
            of best plans in the result. gives_up, tree: as in `Budget`.
    """

    seed: int = 0
    evaluations: int | None = None
    seconds: float | None = None
    effort: str = Effort.medium
    keep: int = 0
    gives_up: bool = False
    tree: bool = True

    def budget(self) -> Budget:
        if self.evaluations is not None or self.seconds is not None:
            return Budget(self.evaluations, self.seconds, keep=self.keep, gives_up=self.gives_up, tree=self.tree)
        return Budget(PLANS[self.effort], None, keep=self.keep, gives_up=self.gives_up)

    def part(self, share: float) -> Settings:
        """The same search with a fraction of the budget."""
        budget = self.budget()
        evaluations = None if budget.evaluations is None else max(1, int(share * budget.evaluations))
        return replace(self, evaluations=evaluations, seconds=budget.seconds and share * budget.seconds)


def run_search(
    evaluator: Evaluator,
    settings: Settings = Settings(),
    starts: Sequence[Plan] = (),
    progress: SearchProgress | None = None,
) -> SearchResult:
    """The best plan that a search finds, with its exact cost. The first Ctrl-C ends it with the best plan so far.

    Args:
        starts: plans to try first, such as known strategies; decisions that do not suit the problem are dropped.
    """
    with interruptible() as stop:
        budget = replace(settings.budget(), asked=lambda: stop.asked)
        incumbent = Incumbent(evaluator, budget, starts, progress)
        result = mcts(incumbent, np.random.default_rng(settings.seed))
    cost = evaluator.exact_cost(result.plan)
    result = replace(result, cost=cost, fits=incumbent.fits(cost))
    if result.fits and all(plan in incumbent.seen for plan in incumbent.starts):
        return result
    # Plans that exceed the bounds are compared by quick costs, and a search that ends early has not seen all starts.
    costs = {plan: evaluator.exact_cost(plan, learn=False) for plan in (result.plan, *incumbent.starts)}
    best = min(costs, key=lambda plan: incumbent.objective.rank(plan, costs[plan]))
    return replace(result, plan=best, cost=costs[best], fits=incumbent.fits(costs[best]))


def search_shapes(
    evaluator_of: Callable[[Mesh], Evaluator],
    meshes: Sequence[Mesh],
    settings: Settings,
    starts_of: Callable[[Problem], Iterable[Plan]] = lambda _: (),
    progress: SearchProgress | None = None,
) -> tuple[Evaluator, SearchResult]:
    """The best plan over all meshes, with its evaluator; evaluations and seconds are those of the whole search.

    Half of the budget is spread evenly over all shapes, the other half goes to the best few: one round of successive
    halving (Jamieson, Talwalkar 2016). With fewer evaluations than shapes, only that many shapes are tried.
    """
    runs = _Runs(settings, starts_of, progress)
    with interruptible():
        if len(meshes) == 1:
            evaluator = evaluator_of(meshes[0])
            return evaluator, runs.run(evaluator, 1.0)
        total = settings.budget().evaluations
        found: list[tuple[Rank, int, Evaluator, SearchResult]] = []
        for number, mesh in enumerate(meshes if total is None else meshes[: max(1, total)]):
            evaluator = evaluator_of(mesh)
            result = runs.run(evaluator, 0.5 / len(meshes))
            found = sorted([*found, (_rank(evaluator, result), number, evaluator, result)])[:FINALISTS]
            if result.stopped == "interrupted":
                break
        for _, number, evaluator, before in list(found):
            if before.stopped == "interrupted" or runs.is_spent():
                break
            result = runs.run(evaluator, 0.5 / FINALISTS)
            seen = tuple(dict.fromkeys((*result.seen, *before.seen)))
            found.append((_rank(evaluator, result), number, evaluator, replace(result, seen=seen)))
    _, _, evaluator, result = min(found, key=lambda entry: entry[:2])
    stopped = "interrupted" if found[-1][3].stopped == "interrupted" else result.stopped
    return evaluator, replace(result, evaluations=runs.evaluations, seconds=runs.seconds, stopped=stopped)


class _Runs:
    """Searches that share one budget, and how much of it they have used."""

    def __init__(
        self,
        settings: Settings,
        starts_of: Callable[[Problem], Iterable[Plan]],
        progress: SearchProgress | None,
    ) -> None:
        self._settings, self._starts_of, self._progress = settings, starts_of, progress
        self.evaluations, self.seconds, self._share, self._best = 0, 0.0, 0.0, inf

    def is_spent(self) -> bool:
        total = self._settings.budget().evaluations
        return total is not None and self.evaluations >= total

    def run(self, evaluator: Evaluator, share: float) -> SearchResult:
        """One search with this share of the budget."""
        begun, evaluations, seconds, leader = self._share, self.evaluations, self.seconds, self._best

        def tell(best: float, looked: int, elapsed: float, used: float) -> None:
            if self._progress is not None:
                self._progress(min(best, leader), evaluations + looked, seconds + elapsed, begun + share * used)

        starts = tuple(self._starts_of(evaluator.problem))
        result = run_search(evaluator, self._settings.part(share), starts, tell)
        self.evaluations += result.evaluations
        self.seconds += result.seconds
        self._share += share
        self._best = min(self._best, result.cost.step_seconds if result.fits else inf)
        return result


def _rank(evaluator: Evaluator, result: SearchResult) -> Rank:
    return Objective(evaluator.problem, evaluator.cost(evaluator.problem.fixed)).rank(result.plan, result.cost)
