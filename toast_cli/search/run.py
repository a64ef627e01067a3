"""Runs the search on one problem, or on several candidates: readings of a program, mesh shapes that are left open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from toast_cli.base.children import interruptible
from toast_cli.base.errors import InputError, ToastError, UsageError
from toast_cli.hardware import Mesh
from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.plan.saved import carried_over, saved_plan
from toast_cli.price.evaluator import Evaluator
from toast_cli.request import Effort
from toast_cli.search.incumbent import Budget, Incumbent, SearchProgress, SearchResult
from toast_cli.search.mcts import BRIEF, mcts

PLANS: dict[str, int] = {Effort.medium: BRIEF, Effort.high: 10_000}  # evaluated, at most
# Share of the budget for a first look at one of several candidates, and for the first looks at all of them, at most.
GLANCE, GLANCES = 0.1, 0.5


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
    result = replace(result, cost=cost, fits=incumbent.objective.met(cost))
    if result.fits and all(plan in incumbent.seen for plan in incumbent.starts):
        return result
    # Plans that exceed the bounds are compared by quick costs, and a search that ends early has not seen all starts.
    best, cost = evaluator.best((result.plan, *incumbent.starts), incumbent.objective.rank)
    return replace(result, plan=best, cost=cost, fits=incumbent.objective.met(cost))


@dataclass(frozen=True)
class Candidate:
    """A reading of the program (as written, or rewritten), by its number, on a mesh. may_lead: whether this reading may
    have a better plan than the best one of another."""

    reading: int
    mesh: Mesh
    may_lead: Callable[[Searched], bool] = field(default=lambda _: True, compare=False)


@dataclass(frozen=True)
class Searched:
    """A candidate with the best plan found for it. starts: the plans that its search began with."""

    candidate: Candidate
    evaluator: Evaluator
    result: SearchResult
    starts: tuple[Plan, ...]


def search_candidates(
    evaluator_of: Callable[[Candidate], Evaluator],
    candidates: Sequence[Candidate],
    settings: Settings,
    worth: Callable[[Searched], tuple[float, ...]],
    starts_of: Callable[[Problem], Iterable[Plan]] = lambda _: (),
    progress: SearchProgress | None = None,
) -> list[Searched]:
    """All candidates tried, the best first; evaluations and seconds are those of the whole search.

    Each candidate gets an equal, small share of the budget and begins with the best plan of those before it. The rest
    of the budget goes to the best one. A further reading of the program is tried on the best mesh, and on the others if
    it is the best there. With fewer evaluations than candidates, only that many are tried.

    Args:
        evaluator_of: raises UsageError or InputError for a candidate that does not admit what the user asks for. If
            none does, the first error is raised.
        worth: larger is better.
    """
    runs = _Runs(settings, progress)
    candidates = candidates[: settings.budget().evaluations]
    share = 1.0 if len(candidates) == 1 else min(GLANCE, GLANCES / len(candidates))
    best: list[Searched] = []
    why: ToastError | None = None
    with interruptible():
        while candidates:
            reading, mesh = candidates[0].reading, best[0].candidate.mesh if best else None
            if best and best[0].candidate.reading != reading and not candidates[0].may_lead(best[0]):
                break
            on_best_mesh = [c for c in candidates if c.reading == reading and c.mesh == mesh]
            candidate = (on_best_mesh or candidates)[0]
            candidates = [c for c in candidates if c is not candidate]
            try:
                evaluator = evaluator_of(candidate)
            except (UsageError, InputError) as error:
                why = why or error
                continue
            leading = [saved_plan(leader.evaluator.problem, leader.result.plan) for leader in best[:1]]
            carried = [carried_over(evaluator.problem, plan)[0] for plan in leading]
            starts = (*carried, *starts_of(evaluator.problem))
            searched = Searched(candidate, evaluator, runs.run(evaluator, starts, share), starts)
            best = sorted([*best, searched], key=worth, reverse=True)
            if searched.result.stopped == "interrupted":
                break
            if best[0].candidate.reading != reading:
                candidates = [c for c in candidates if c.reading != reading]
        if why is not None and not best:
            raise why
        stopped = searched.result.stopped
        total = settings.budget().evaluations
        if stopped != "interrupted" and runs.share < 1.0 and (total is None or runs.evaluations < total):
            leader = best[0]
            result = runs.run(leader.evaluator, leader.starts, 1.0 - runs.share, leader.result)
            stopped = result.stopped
            seen = tuple(dict.fromkeys((*result.seen, *leader.result.seen)))
            searched = max(replace(leader, result=replace(result, seen=seen)), leader, key=worth)
            best = sorted([searched, *best[1:]], key=worth, reverse=True)
    return [
        replace(each, result=replace(each.result, evaluations=runs.evaluations, seconds=runs.seconds, stopped=stopped))
        for each in best
    ]


class _Runs:
    """Searches that share one budget, and how much of it they have used."""

    def __init__(self, settings: Settings, progress: SearchProgress | None) -> None:
        self._settings, self._progress = settings, progress
        self.evaluations, self.seconds, self.share, self._best = 0, 0.0, 0.0, inf

    def run(
        self, evaluator: Evaluator, starts: Sequence[Plan], share: float, before: SearchResult | None = None
    ) -> SearchResult:
        """One search with this share of the budget. before: the same search with less, which it repeats and goes on."""
        begun, evaluations, seconds, leader = self.share, self.evaluations, self.seconds, self._best

        def tell(best: float, looked: int, elapsed: float, used: float) -> None:
            if self._progress is not None:
                self._progress(min(best, leader), evaluations + looked, seconds + elapsed, begun + share * used)

        settings, repeated = self._settings.part(share), before.evaluations if before else 0
        total = self._settings.budget().evaluations
        if settings.evaluations is not None and total is not None:
            left = min(settings.evaluations, total - self.evaluations)
            settings = replace(settings, evaluations=left + repeated)
        result = run_search(evaluator, settings, starts, tell)
        self.evaluations += result.evaluations - repeated
        self.seconds += result.seconds
        self.share += share
        self._best = min(self._best, result.cost.step_seconds if result.fits else inf)
        return result
