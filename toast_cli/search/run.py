"""Runs one named search on one problem: default budgets, seeds, and independent roots side by side.

MCTS runs as `ROOTS` independent trees whose seeds derive from the one given; the best plan of all wins. The trees are the
same however many processes they run in, so the plan does not depend on `jobs`.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import numpy as np

from toast_cli.cost.evaluator import Evaluator
from toast_cli.search import SEARCHES
from toast_cli.search.model import Budget, SearchProgress, SearchResult

ROOTS = 2
EVALUATIONS = 1500  # per root, unless the user says otherwise


def run_search(
    evaluator: Evaluator,
    name: str,
    seed: int,
    iterations: int | None,
    seconds: float | None,
    shares: int,
    jobs: int,
    progress: SearchProgress | None = None,
) -> SearchResult:
    """Best plan that search `name` finds.

    Args:
        iterations, seconds: budgets of the whole run (None: a default number of evaluations, no time limit).
        shares: over how many searches like this one (mesh shapes) the budget is spread.
        jobs: processes to use at most.
    """
    roots = ROOTS if name == "mcts" else 1
    total = iterations if iterations is not None else (None if seconds is not None else EVALUATIONS * roots)
    waves = -(-roots // max(1, jobs))
    budget = Budget(
        None if total is None else max(16, total // (roots * shares)),
        None if seconds is None else seconds / (shares * waves),
    )  # fmt: skip
    seeds = np.random.SeedSequence(seed).spawn(roots)

    def one(root: int) -> SearchResult:
        rng = np.random.default_rng(seeds[root])
        report = (lambda b, n, s, f: progress(b, n, s, (root + f) / roots)) if progress else None
        return SEARCHES[name](evaluator.problem, evaluator.cost, budget, rng, report)

    if jobs > 1 and roots > 1:
        results = _in_processes(one, roots, jobs)
    else:
        results = []
        for root in range(roots):
            results.append(one(root))
            if results[-1].stopped == "interrupted":
                break
    best = _best(results)
    cost = evaluator.exact_cost(best.plan)  # searches look at memory at some moments only
    return replace(best, cost=cost, fits=cost.peak_bytes <= evaluator.problem.mesh.limit_bytes)


_TASK = None  # what forked workers run; set just before they are forked


def _in_processes(one, roots: int, jobs: int) -> list[SearchResult]:  # type: ignore[no-untyped-def]
    global _TASK  # noqa: PLW0603 - a closure cannot be pickled, a forked child inherits it
    _TASK = one
    try:
        with multiprocessing.get_context("fork").Pool(min(jobs, roots)) as pool:
            return pool.map(_run_task, range(roots))
    finally:
        _TASK = None


def _run_task(root: int) -> SearchResult:
    assert _TASK is not None
    return _TASK(root)


def _best(results: list[SearchResult]) -> SearchResult:
    def key(result: SearchResult) -> tuple[bool, float, int, str]:
        first = result.cost.step_seconds if result.fits else result.cost.peak_bytes
        return (not result.fits, float(f"{first:.9g}"), len(result.plan), repr(result.plan))

    best = min(results, key=key)
    return replace(
        best, evaluations=sum(r.evaluations for r in results), seconds=sum(r.seconds for r in results),
        best_found_at=best.best_found_at + sum(r.evaluations for r in results[: results.index(best)]),
    )  # fmt: skip
