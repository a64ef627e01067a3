"""The shape of the mesh as part of the search, where the user leaves it open.

Half of the budget is spread evenly over all shapes, the other half goes to the best few of them: one round of
successive halving (Jamieson, Talwalkar 2016). Enters: how to make an evaluator for a mesh. Leaves: the best plan, and
the evaluator it belongs to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf

from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.hardware import Mesh
from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.search.interrupts import interruptible
from toast_cli.search.model import SearchProgress, SearchResult
from toast_cli.search.objective import Objective, Rank
from toast_cli.search.run import EVALUATIONS, run_search

FINALISTS = 2

_Finalist = tuple[Rank, Evaluator, SearchResult]


def search_shapes(
    evaluator_of: Callable[[Mesh], Evaluator],
    meshes: list[Mesh],
    name: str,
    seed: int,
    iterations: int | None,
    seconds: float | None,
    jobs: int,
    progress: SearchProgress | None = None,
    starts_of: Callable[[Problem], Iterable[Plan]] = lambda _: (),
    keep: int = 0,
) -> tuple[Evaluator, SearchResult]:
    """The best plan over all meshes; its evaluations and its seconds are those of the whole search.

    Fewer iterations than meshes: so many of the meshes are looked at. Ctrl-C ends everything with the best so far.

    Args:
        meshes: at least one. starts_of: a problem -> plans worth a look. Others as for `run_search`; plans are kept of
            the mesh chosen.
    """
    start = time.monotonic()
    spent, best_seconds = 0, inf

    def run(evaluator: Evaluator, share: float, begins: float, limit: int | None) -> SearchResult:
        """One search with `share` of the whole budget, or `limit` evaluations; `begins`: the fraction of all that is
        done.
        """
        nonlocal spent, best_seconds
        before, leader = spent, best_seconds

        def report(best: float, evaluations: int, _: float, used: float) -> None:
            if progress is not None:
                elapsed = time.monotonic() - start
                progress(min(best, leader), before + evaluations, elapsed, begins + share * used)

        time_limit = None if seconds is None else seconds * share
        starts = tuple(starts_of(evaluator.problem))
        result = run_search(evaluator, name, seed, limit, time_limit, jobs, report, starts, keep)
        spent += result.evaluations
        best_seconds = min(best_seconds, result.cost.step_seconds if result.fits else inf)
        return result

    with interruptible():
        if len(meshes) == 1:
            evaluator = evaluator_of(meshes[0])
            return evaluator, run(evaluator, 1.0, 0.0, iterations)
        total = iterations if iterations is not None else (2 * EVALUATIONS if seconds is None else None)
        finalists: list[_Finalist] = []
        ended = ""
        for number, mesh in enumerate(meshes):
            limit = None if total is None else total // 2 // len(meshes) + (number < total // 2 % len(meshes))
            if limit == 0 and finalists:
                break
            evaluator = evaluator_of(mesh)
            result = run(
                evaluator, 0.5 / len(meshes), 0.5 * number / len(meshes), None if limit is None else max(1, limit)
            )
            finalists.append((_rank(evaluator, result), evaluator, result))
            finalists = sorted(finalists, key=lambda entry: entry[0])[:FINALISTS]
            ended = result.stopped
            if ended == "interrupted":
                break
        best = finalists[0]
        for number, (_, evaluator, before) in enumerate(finalists):
            left = None if total is None else (total - spent) // (len(finalists) - number)
            if ended == "interrupted" or left == 0:
                break
            share = 0.5 / len(finalists)
            result = run(evaluator, share, 0.5 + share * number, left)
            result = replace(result, seen=tuple(dict.fromkeys((*result.seen, *before.seen))))
            best = min(best, (_rank(evaluator, result), evaluator, result), key=lambda entry: entry[0])
            ended = result.stopped
    _, evaluator, result = best
    stopped = ended if ended == "interrupted" else result.stopped
    return evaluator, replace(result, evaluations=spent, seconds=time.monotonic() - start, stopped=stopped)


def _rank(evaluator: Evaluator, result: SearchResult) -> Rank:
    return Objective(evaluator.problem, evaluator.cost(evaluator.problem.fixed)).rank(result.plan, result.cost)
