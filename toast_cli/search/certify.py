"""How much faster any sharding could be than a plan that some search has found, at most; and what is found on the way.

Enters: the search's result. Leaves: the same with a proven lower bound, or a better plan with one.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf

from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.plan.problem import Problem
from toast_cli.search.exact import is_proven, sought
from toast_cli.search.interrupts import interruptible
from toast_cli.search.model import SearchResult
from toast_cli.search.objective import PRICE
from toast_cli.search.overrides import doing, finely, may_do_otherwise
from toast_cli.search.selection import Bound, bound

SECONDS = 30.0


def certify(evaluator: Evaluator, result: SearchResult, seconds: float = SECONDS) -> SearchResult:
    """The result with what can be proven of it in so many seconds of wall time. Bounds step time."""
    start = time.monotonic()
    least, _ = _bound(evaluator.problem, result, seconds)
    return _with(evaluator, replace(result, seconds=result.seconds + time.monotonic() - start), least)


def proved(evaluator: Evaluator, result: SearchResult, seconds: float) -> tuple[Evaluator, SearchResult]:
    """The same, with the ops of small programs told apart; or the plan by which some of them do otherwise, where the
    solver finds that to be better."""
    if not may_do_otherwise(evaluator.problem, result):
        return evaluator, certify(evaluator, result, seconds)
    start, fine = time.monotonic(), finely(evaluator.problem)
    least, asked = _bound(fine, result, seconds)
    stopped = "interrupted" if asked else result.stopped
    result = replace(result, seconds=result.seconds + time.monotonic() - start, stopped=stopped)
    if least.seconds <= 0.0:  # the user did not want to wait, or it is too large
        return evaluator, result
    if least.picked:
        evaluator, result = doing(evaluator, result, fine, least.picked, PRICE)
    return evaluator, _with(evaluator, result, least)


def _bound(problem: Problem, result: SearchResult, seconds: float) -> tuple[Bound, bool]:
    """The bound, and whether the user did not want to wait for it."""
    with interruptible() as stop:
        known = sought(result.plan, result.cost) if result.fits else (inf, inf)
        return bound(problem, seconds, lambda: stop.asked, lambda: stop.asked, *known, result.plan), stop.asked


def _with(evaluator: Evaluator, result: SearchResult, least: Bound) -> SearchResult:
    return replace(result, lower_bound=least.seconds, proven=is_proven(evaluator.problem, result, least))
