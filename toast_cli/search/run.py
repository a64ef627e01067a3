"""Runs one named search on one problem, with default budgets.

A mesh of three and more axes is searched as each of two that it could be seen as before (see `coarser`), and what is
found there is where the search of the mesh itself starts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.plan.decisions import Plan
from toast_cli.plan.loop_reads import LOOP_READS
from toast_cli.plan.problem import Problem
from toast_cli.request import SearchName
from toast_cli.search.coarser import coarser
from toast_cli.search.edits import suited
from toast_cli.search.interrupts import interruptible
from toast_cli.search.mesh_search import search_mesh, with_best_of
from toast_cli.search.model import SearchProgress, SearchResult
from toast_cli.search.shares import with_trees

# Evaluations of lines of climbing, unless the user says otherwise: so many, for each mesh axis and for each decision
# there is to choose from, but no more than the most; of small programs some times as many as the least, as they take
# little more time. Those of trees come on top.
EVALUATIONS, PER_AXIS, PER_CHOICE, MOST_EVALUATIONS = 3780, 1890, 75, 15_100
SMALL = ((2000, 3), (8000, 2))  # fewer ops than, how many times as many
FEW_PATTERNS, FEW_PATTERNS_TIMES = 400, 2  # the same where fewer unlike ops are than that, however many ops there are
LOOPS_READ = 1.1  # times as many where gathers can stand before loops: one more decision about each axis
# Where a decision reaches into very many patterns an evaluation takes long: evaluations times patterns reached, and the
# fewest all the same.
MOST_REACHED, FEWEST_EVALUATIONS = 1_150_000, 2300
EXACT_SECONDS = 60.0  # of the search that proves its result
# Of the user's budget: what is for searches of meshes that join axes, if each has so many evaluations then. Where the
# user sets none each of them gets what it would get if it were the user's mesh.
COARSER_SHARE, LEAST_COARSER = 0.5, 200


def run_search(
    evaluator: Evaluator,
    name: str,
    seed: int = 0,
    iterations: int | None = None,
    seconds: float | None = None,
    jobs: int = 1,
    progress: SearchProgress | None = None,
    starts: Sequence[Plan] = (),
    keep: int = 0,
) -> SearchResult:
    """Best plan that search `name` finds, with its exact cost; `seconds` of it are wall time.

    The first Ctrl-C ends it with the best plan so far.

    Args:
        iterations, seconds: budgets of all roots together (None: a default number of evaluations, no time limit).
        jobs: processes to use at most.
        starts: plans worth a look, such as experts'; what does not suit the problem is left out of them.
        keep: how many of the plans that each root has looked at the result holds.
    """
    problem, start = evaluator.problem, time.monotonic()
    by_default = iterations is None and seconds is None and name != SearchName.exact
    if by_default:
        iterations = default_evaluations(problem)
    elif iterations is None and seconds is None:
        seconds = EXACT_SECONDS
    meshes = coarser(problem) if name == SearchName.mcts else []
    if not meshes or (iterations is not None and iterations * COARSER_SHARE < LEAST_COARSER * len(meshes)):
        return search_mesh(evaluator, name, seed, iterations, seconds, jobs, progress, starts, keep, grows=by_default)
    share, told = COARSER_SHARE / len(meshes), _Told(progress, start)
    found, spent = list[Plan](), 0
    with interruptible() as stop:
        for mesh in meshes:
            if stop.asked:
                break
            limit = None if iterations is None else int(iterations * share)
            result = search_mesh(
                evaluator.of(mesh.problem),
                name,
                seed,
                default_evaluations(mesh.problem) if by_default else limit,
                None if seconds is None else seconds * share,
                jobs,
                told.next(share, spent),
                [mesh.coarsened(plan) for plan in starts],
            )
            spent += result.evaluations
            found += [suited(problem, plan) for plan in mesh.refined(result.plan)]
        result = search_mesh(
            evaluator,
            name,
            seed,
            iterations if iterations is None or by_default else iterations - spent,
            None if seconds is None else max(0.0, seconds - (time.monotonic() - start)),
            jobs,
            told.next(1.0 - COARSER_SHARE, spent),
            (*found, *starts),
            keep,
            grows=by_default,
        )
    if result.stopped == "interrupted":  # perhaps before it looked at any of them
        result = with_best_of(evaluator, result, found)
    return replace(
        result,
        evaluations=spent + result.evaluations,
        best_found_at=spent + result.best_found_at,
        seconds=time.monotonic() - start,
        trail=tuple((number + spent if number else 0, cost) for number, cost in result.trail),
    )


class _Told:
    """Whom to tell of searches that follow one another as if they were one."""

    def __init__(self, progress: SearchProgress | None, start: float) -> None:
        self._progress, self._start = progress, start
        self._begins = self._ends = 0.0
        self._before = 0

    def next(self, share: float, before: int) -> SearchProgress | None:
        """Whom the next one is to tell, which has this share of the whole; so many evaluations are behind it."""
        self._begins, self._ends = self._ends, self._ends + share
        self._before = before
        return None if self._progress is None else self._tell

    def _tell(self, best: float, evaluations: int, _: float, used: float) -> None:
        if self._progress is not None:
            elapsed = time.monotonic() - self._start
            self._progress(best, self._before + evaluations, elapsed, self._begins + (self._ends - self._begins) * used)


def default_evaluations(problem: Problem) -> int:
    """How many plans a search looks at where the user does not say."""
    axes = sum(size > 1 for size in problem.mesh.sizes)
    wanted = min(MOST_EVALUATIONS, max(EVALUATIONS, PER_AXIS * axes, PER_CHOICE * len(problem.decisions.choices)))
    wanted = max(wanted, *(times * EVALUATIONS for ops, times in SMALL if len(problem.program.ops) < ops), 0)
    wanted *= FEW_PATTERNS_TIMES if len(problem.patterns) < FEW_PATTERNS else 1
    wanted = min(wanted, max(FEWEST_EVALUATIONS, int(MOST_REACHED / max(1.0, problem.reach))))
    return with_trees(problem, int(LOOPS_READ * wanted) if LOOP_READS in problem.roles else wanted)
