"""One named search on one problem: independent roots side by side, and edits of what they find.

MCTS runs as `ROOTS` independent trees whose seeds derive from the one given; lines of climbing from the best plan of
each follow, and from elsewhere, so that what a seed finds is the best far and wide (see `polish`, `shares`). The trees
are the same however many processes they run in, so the plan does not depend on `jobs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from toast_cli.cost.model import Cost
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.plan.decisions import Plan
from toast_cli.request import SearchName
from toast_cli.search import SEARCHES
from toast_cli.search.edits import suited
from toast_cli.search.interrupts import Stop, interruptible
from toast_cli.search.model import Budget, SearchProgress, SearchResult
from toast_cli.search.objective import Objective, Rank
from toast_cli.search.polish import polish
from toast_cli.search.roots import in_processes, one_by_one
from toast_cli.search.shares import NO_GROWTH, Growth, Shares, shares_of

ROOTS = 2


def search_mesh(
    evaluator: Evaluator,
    name: str,
    seed: int,
    iterations: int | None,
    seconds: float | None,
    jobs: int,
    progress: SearchProgress | None,
    starts: Sequence[Plan],
    keep: int = 0,
    *,
    grows: bool = False,
) -> SearchResult:
    """Best plan that search `name` finds, with its exact cost. The first Ctrl-C ends it with the best plan so far.

    Args:
        iterations, seconds: budgets of all roots together; None for no bound.
        jobs: processes to use at most. starts: plans worth a look; what does not suit the problem is left out of them.
        keep: how many of the plans that each root has looked at the result holds. grows: whether it may look at more
            plans than that as long as it is still finding better ones.
    """
    start = time.monotonic()

    def elapsed() -> float:
        return time.monotonic() - start

    total, problem = iterations, evaluator.problem
    roots = min(ROOTS if name == SearchName.mcts else 1, total or ROOTS)
    waves = -(-roots // max(1, jobs))
    shares = shares_of(problem, total) if name == SearchName.mcts else Shares()
    for_roots = None if total is None else round(shares.trees * total)
    budgets = [
        Budget(
            None if for_roots is None else for_roots // roots + (root < for_roots % roots),
            None if seconds is None else seconds * shares.trees / waves,
            keep=keep,
        )
        for root in range(roots)
    ]
    seeds = np.random.SeedSequence(seed).spawn(roots)

    with interruptible() as stop:

        def one(root: int, stop: Stop, tell: SearchProgress | None) -> SearchResult:
            rng = np.random.default_rng(seeds[root])
            budget = replace(budgets[root], asked=lambda: stop.asked)
            return SEARCHES[name](problem, Confirmed(evaluator), budget, rng, tell, starts if root == 0 else ())

        run_all = in_processes if jobs > 1 and roots > 1 else one_by_one
        results = run_all(one, roots, stop, progress and _scaled(progress, shares.trees))
        best = _best(evaluator, results)
        ends = list(dict.fromkeys(result.plan for result in sorted(results, key=lambda it: it.plan != best.plan)))
        if shares.first and best.stopped != "interrupted":
            again = _middling_first(evaluator, starts) if shares.again else []
            further = shares.again * (1 + len(again[:1]))
            left = Budget(
                None if total is None else max(0, int((1.0 - further) * total) - best.evaluations),
                None if seconds is None else max(0.0, (1.0 - further) * seconds - elapsed()),
                lambda: stop.asked,
                keep,
            )
            each = Budget(
                None if total is None else int(shares.again * total),
                None if seconds is None else shares.again * seconds,
            )
            growth = Growth(best.evaluations, total) if grows and total else NO_GROWTH
            whole = Budget(total and total - best.evaluations, seconds and seconds - elapsed())
            told = progress and _going_on(progress, best, shares.trees, whole, elapsed)
            lines = polish(
                problem, Confirmed(evaluator), left, ends, told, growth,
                again=again, of_each=each if further else None, seconds=evaluator.seconds_between,
            )  # fmt: skip
            best = _after(evaluator, best, lines)
        cost = evaluator.exact_cost(best.plan)
    fits = Objective(problem, cost).met(cost)
    result = replace(best, cost=cost, fits=fits)
    if not fits:
        # Searches compare such plans by quick costs, which look at memory at some moments only, so an expert's may
        # exceed the bounds by less.
        result = with_best_of(evaluator, result, [suited(problem, plan) for plan in starts])
    return replace(result, seconds=elapsed())


def _scaled(progress: SearchProgress, share: float) -> SearchProgress:
    """Whom trees tell, which have this share of the budget."""
    return lambda best, evaluations, elapsed, used: progress(best, evaluations, elapsed, share * used)


def _going_on(
    progress: SearchProgress, searched: SearchResult, share: float, left: Budget, elapsed: Callable[[], float]
) -> SearchProgress:
    """Whom lines of climbing tell, which go on with what trees have found and done, with all that is left."""
    found, before = searched.cost.step_seconds if searched.fits else inf, elapsed()

    def tell(best: float, evaluations: int, *_: float) -> None:
        parts = [
            evaluations / left.evaluations if left.evaluations else 0.0,
            (elapsed() - before) / left.seconds if left.seconds else 0.0,
        ]
        used = share + (1.0 - share) * min(1.0, max(parts))
        progress(min(best, found), searched.evaluations + evaluations, elapsed(), used)

    return tell


def _middling_first(evaluator: Evaluator, plans: Sequence[Plan]) -> list[Plan]:
    """These plans as they compare, but the one in the middle first: it is unlike the best, which trees begin with."""
    problem = evaluator.problem
    evaluator.unlearn()  # it must not depend on where roots have run
    objective = Objective(problem, evaluator.cost(problem.fixed))
    different = dict.fromkeys(suited(problem, plan) for plan in plans)
    ranked = sorted(different, key=lambda plan: objective.rank(plan, evaluator.cost(plan)))
    middle = len(ranked) // 2
    return [*ranked[middle:][:1], *ranked[:middle], *ranked[middle + 1 :]]


def with_best_of(evaluator: Evaluator, result: SearchResult, plans: Sequence[Plan]) -> SearchResult:
    """The result with the best of its plan and of these in canonical order, by exact costs."""
    objective = Objective(evaluator.problem, evaluator.cost(evaluator.problem.fixed))
    costs = {result.plan: result.cost}
    for plan in plans:
        costs.setdefault(plan, evaluator.exact_cost(plan, learn=False))
    best = min(costs, key=lambda plan: objective.rank(plan, costs[plan]))
    return replace(result, plan=best, cost=costs[best], fits=objective.met(costs[best]))


class Confirmed:
    """Costs of plans for one search. Memory is looked at everywhere where a plan would be the best so far.

    Quick costs look at memory at some moments only, so a plan may exceed the bounds that seems to keep them; the moment
    at which it does is looked at from then on.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        evaluator.unlearn()  # what another root has learnt must not change what this one finds
        self._evaluator = evaluator
        self._objective: Objective | None = None
        self._best: Rank | None = None

    def __call__(self, plan: Plan) -> Cost:
        cost = self._evaluator.cost(plan)
        if self._objective is None:
            self._objective = Objective(self._evaluator.problem, cost)
        if not self._objective.met(cost):
            return cost
        rank = self._objective.rank(plan, cost)
        if self._best is not None and rank >= self._best:
            return cost
        cost = self._evaluator.exact_cost(plan, learn=False)
        if self._objective.met(cost):
            self._best = min(self._objective.rank(plan, cost), self._best or rank)
        else:
            self._evaluator.exact_cost(plan)
        return cost


def _after(evaluator: Evaluator, searched: SearchResult, polished: SearchResult) -> SearchResult:
    """The better of what the roots found and what edits of that lead to."""
    best = _best(evaluator, [searched, polished])
    stopped = "interrupted" if polished.stopped == "interrupted" else searched.stopped
    # A trail begins with the plan that decides nothing, here followed by the one that was edited.
    later = [(searched.evaluations + number, cost) for number, cost in polished.trail[2:]]
    trail = searched.trail if best.plan == searched.plan else (*searched.trail, *later)
    return replace(best, stopped=stopped, trail=trail)


def _best(evaluator: Evaluator, results: list[SearchResult]) -> SearchResult:
    objective = Objective(evaluator.problem, evaluator.cost(evaluator.problem.fixed))
    best = min(results, key=lambda result: objective.rank(result.plan, result.cost))
    return replace(
        best, evaluations=sum(r.evaluations for r in results),
        stopped="interrupted" if any(r.stopped == "interrupted" for r in results) else best.stopped,
        seen=tuple(dict.fromkeys(plan for result in results for plan in result.seen)),
        best_found_at=best.best_found_at + sum(r.evaluations for r in results[: results.index(best)]),
    )  # fmt: skip
