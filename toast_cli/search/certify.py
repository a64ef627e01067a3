"""A certificate for a plan that any search has found: how much faster any sharding could be, at most.

Enters: the search's result. Leaves: the same with a proven lower bound.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf

from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.search.exact import is_proven, priced
from toast_cli.search.interrupts import interruptible
from toast_cli.search.model import SearchResult
from toast_cli.search.selection import bound

SECONDS = 30.0


def certify(evaluator: Evaluator, result: SearchResult, seconds: float = SECONDS) -> SearchResult:
    """The result with what can be proven of it in so many seconds of wall time. Bounds step time."""
    start = time.monotonic()
    problem = evaluator.problem
    with interruptible() as stop:
        possible = priced(result.plan, result.cost) if result.fits else inf
        least = bound(problem, seconds, lambda: stop.asked, lambda: stop.asked, possible)
    return replace(
        result,
        seconds=result.seconds + time.monotonic() - start,
        lower_bound=least.seconds,
        proven=is_proven(problem, result, least),
    )
