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
from toast_cli.search.mcts import BRIEF, mcts

PLANS: dict[str, int] = {Effort.medium: BRIEF, Effort.high: 10_000}  # evaluated, at most


@dataclass(frozen=True)
class Settings:
    """How to search.

    Attributes:
        evaluations: plans to evaluate, at most; seconds: of wall time. If both are None, `effort` decides. keep: number
            of best plans in the result. gives_up: as in `Budget`.
    """

    seed: int = 0
    evaluations: int | None = None
    seconds: float | None = None
    effort: str = Effort.medium
    keep: int = 0
    gives_up: bool = False

    def budget(self) -> Budget:
        bounded = self.evaluations is not None or self.seconds is not None
        evaluations = self.evaluations if bounded else PLANS[self.effort]
        return Budget(evaluations, self.seconds, keep=self.keep, gives_up=self.gives_up)

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
    best, cost = evaluator.best((result.plan, *incumbent.starts), incumbent.objective.rank)
    return replace(result, plan=best, cost=cost, fits=incumbent.fits(cost))


def search_shapes(
    evaluator_of: Callable[[Mesh], Evaluator],
    meshes: Sequence[Mesh],
    settings: Settings,
    starts_of: Callable[[Problem], Iterable[Plan]] = lambda _: (),
    progress: SearchProgress | None = None,
) -> tuple[Evaluator, SearchResult]:
    """The best plan over all meshes, with its evaluator; evaluations and seconds are those of the whole search.

    Half of the budget is spread evenly over all shapes, the other half goes to the best one. With fewer evaluations
    than shapes, only that many shapes are tried.
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
            found = sorted([*found, (_rank(evaluator, result), number, evaluator, result)])[:1]
            if result.stopped == "interrupted":
                break
        stopped, (_, number, evaluator, before) = result.stopped, found[0]
        if stopped != "interrupted" and not runs.is_spent():
            result = runs.run(evaluator, 0.5, before)
            stopped, result = result.stopped, replace(result, seen=tuple(dict.fromkeys((*result.seen, *before.seen))))
            found.append((_rank(evaluator, result), number, evaluator, result))
    result = min(found, key=lambda entry: entry[:2])[3]
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

    def run(self, evaluator: Evaluator, share: float, before: SearchResult | None = None) -> SearchResult:
        """One search with this share of the budget. before: the same search with less, which it repeats and goes on."""
        begun, evaluations, seconds, leader = self._share, self.evaluations, self.seconds, self._best

        def tell(best: float, looked: int, elapsed: float, used: float) -> None:
            if self._progress is not None:
                self._progress(min(best, leader), evaluations + looked, seconds + elapsed, begun + share * used)

        starts = tuple(self._starts_of(evaluator.problem))
        settings, known = self._settings.part(share), before.evaluations if before else 0
        if settings.evaluations is not None:
            settings = replace(settings, evaluations=settings.evaluations + known)
        result = run_search(evaluator, settings, starts, tell)
        self.evaluations += result.evaluations - known
        self.seconds += result.seconds
        self._share += share
        self._best = min(self._best, result.cost.step_seconds if result.fits else inf)
        return result


def _rank(evaluator: Evaluator, result: SearchResult) -> Rank:
    return Objective(evaluator.problem, evaluator.cost(evaluator.problem.fixed)).rank(result.plan, result.cost)
