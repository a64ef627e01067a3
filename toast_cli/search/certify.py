"""A certificate for a plan that any search has found: how much faster another could be, at most.

Enters: the search's result. Leaves: the same with a proven lower bound, or the better plan that was met on the way.
"""

from __future__ import annotations

import time
from dataclasses import replace

from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.search.exact import Proof
from toast_cli.search.interrupts import interruptible
from toast_cli.search.model import Budget, Incumbent, OutOfBudget, SearchResult
from toast_cli.search.run import Confirmed

SECONDS = 20.0


def certify(evaluator: Evaluator, result: SearchResult, seconds: float = SECONDS) -> SearchResult:
    """Branch and bound from `result` on, for so long at most; Ctrl-C ends it with what has been proven. Bounds step time."""
    start = time.monotonic()
    with interruptible() as stop:
        incumbent = Incumbent(
            evaluator.problem, Confirmed(evaluator), Budget(seconds=seconds, asked=lambda: stop.asked)
        )
        proof = Proof(incumbent)
        try:
            incumbent.look(result.plan)
            proof.run()
        except OutOfBudget:
            pass
        found = incumbent.result("")
    return replace(
        result if found.plan == result.plan else found,
        evaluations=result.evaluations + found.evaluations,
        best_found_at=result.best_found_at + (found.best_found_at if found.plan != result.plan else 0),
        seconds=result.seconds + time.monotonic() - start,
        stopped=result.stopped,
        proven=proof.complete,
        lower_bound=proof.lower_bound,
    )
