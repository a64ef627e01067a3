"""Runs one named search on one problem: default budgets, seeds, and independent roots side by side.

MCTS runs as `ROOTS` independent trees whose seeds derive from the one given; the best plan of all wins. The trees are the
same however many processes they run in, so the plan does not depend on `jobs`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from toast_cli.cost.evaluator import Evaluator
from toast_cli.search import SEARCHES
from toast_cli.search.model import Budget, SearchProgress, SearchResult
from toast_cli.search.objective import Objective

ROOTS = 2
ROUNDS = 3
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
    """Best plan that search `name` finds, with its exact cost.

    Searches look at memory at some moments only. Where the plan found does not fit after all, the moment of its peak is looked at from
    then on and the search runs again, `ROUNDS` times at most.

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
    spent = 0
    for _ in range(ROUNDS):
        best = _search_roots(evaluator, name, np.random.SeedSequence(seed).spawn(roots), budget, jobs, progress)
        cost = evaluator.exact_cost(best.plan)
        fits = Objective(evaluator.problem, cost).met(cost)
        spent += best.evaluations
        if fits or not best.fits or best.stopped == "interrupted":
            break
    return replace(best, cost=cost, fits=fits, evaluations=spent)


def _search_roots(
    evaluator: Evaluator,
    name: str,
    seeds: list[np.random.SeedSequence],
    budget: Budget,
    jobs: int,
    progress: SearchProgress | None,
) -> SearchResult:
    """The best of one search per seed."""
    roots = len(seeds)

    def one(root: int) -> SearchResult:
        rng = np.random.default_rng(seeds[root])
        report = (lambda b, n, s, f: progress(b, n, s, (root + f) / roots)) if progress else None
        return SEARCHES[name](evaluator.problem, evaluator.cost, budget, rng, report)

    if jobs > 1 and roots > 1:
        results = _in_processes(one, roots)
    else:
        results = []
        for root in range(roots):
            results.append(one(root))
            if results[-1].stopped == "interrupted":
                break
    return _best(evaluator, results)


def _in_processes(one: Callable[[int], SearchResult], roots: int) -> list[SearchResult]:
    """Each root in a forked process. An interrupt reaches them all, and each then returns its best so far."""
    context = multiprocessing.get_context("fork")  # `one` is a closure: it can be inherited, not pickled
    started = []
    for root in range(roots):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(one, root, sender))
        process.start()
        sender.close()
        started.append((process, receiver))
    results: list[SearchResult | None] = []
    try:
        try:
            _receive(started, results)
        except KeyboardInterrupt:
            for process, _ in started:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGINT)
            _receive(started, results)
    finally:
        for process, _ in started:
            process.terminate()
            process.join()
    found = [result for result in results if result is not None]
    if not found:
        raise KeyboardInterrupt
    return found


def _receive(started: list[tuple[Any, Any]], results: list[SearchResult | None]) -> None:
    """Adds the results that are still to come, in order of the roots."""
    for process, receiver in started[len(results) :]:
        try:
            results.append(receiver.recv())
        except EOFError:
            process.join()
            raise RuntimeError(f"a search process ended with exit code {process.exitcode}") from None


def _serve(one: Callable[[int], SearchResult], root: int, sender: Any) -> None:
    """The life of a forked process: one root, interrupted at most once."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, interrupt)
        sender.send(one(root))
    except KeyboardInterrupt:  # before there was any plan
        sender.send(None)


def _best(evaluator: Evaluator, results: list[SearchResult]) -> SearchResult:
    objective = Objective(evaluator.problem, evaluator.cost(evaluator.problem.fixed))
    best = min(results, key=lambda result: objective.rank(result.plan, result.cost))
    return replace(
        best, evaluations=sum(r.evaluations for r in results), seconds=sum(r.seconds for r in results),
        best_found_at=best.best_found_at + sum(r.evaluations for r in results[: results.index(best)]),
    )  # fmt: skip
