"""What follows a search: layers decided apart, and ops that do otherwise than decisions say, where that pays.

Enters: what a search of the problem with every layer decided alike has found. Leaves: the plan to take, with the
problem it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence

from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.plan.decisions import Plan
from toast_cli.program.caches import has_caches
from toast_cli.request import SearchName
from toast_cli.search.certify import proved
from toast_cli.search.exact import SOLVER_SECONDS
from toast_cli.search.model import Budget, SearchResult
from toast_cli.search.objective import PRICE
from toast_cli.search.overrides import overridden
from toast_cli.search.unmirror import UNMIRROR_SHARE, unmirrored

# Of a budget of wall time: what is kept for this.
SECONDS_SHARE = 0.3
# With fewer evaluations or seconds left no op does otherwise: it takes a solver to find out which had better.
LEAST_EVALUATIONS, LEAST_SECONDS = 200, 3.0
EVALUATIONS = 300  # for layers apart, where the user does not say


def searched_first(iterations: int | None, seconds: float | None) -> tuple[int | None, float | None]:
    """What of the user's budget is for the search itself."""
    return (
        None if iterations is None else max(1, round(iterations * (1.0 - UNMIRROR_SHARE))),
        None if seconds is None else seconds * (1.0 - SECONDS_SHARE),
    )


def finished(
    evaluator: Evaluator,
    result: SearchResult,
    name: str,
    starts: Sequence[Plan],
    iterations: int | None = None,
    seconds: float | None = None,
) -> tuple[Evaluator, SearchResult]:
    """`result` or something better; its evaluations and seconds come on top of those of `result`.

    Args:
        name: of the search. starts: other plans worth a look. iterations, seconds: the user's budget, which `result`
            has spent a part of.
    """
    if result.stopped == "interrupted" or name not in (SearchName.mcts, SearchName.exact):
        return evaluator, result
    if name == SearchName.mcts:
        evaluator, result = unmirrored(evaluator, result, rest_of_budget(result, iterations, seconds))
    left = rest_of_budget(result, iterations, seconds)
    if result.proven or result.stopped == "interrupted":
        return evaluator, result
    if left.evaluations is not None and left.evaluations < LEAST_EVALUATIONS and iterations is not None:
        return evaluator, result
    if left.seconds is not None and left.seconds < LEAST_SECONDS:
        return evaluator, result
    if name == SearchName.mcts and has_caches(evaluator.problem.program):
        return evaluator, result  # compiled steps of loops that decode with overrides took up to 36 % longer
    if name == SearchName.mcts:
        return overridden(evaluator, result, starts, seconds=left.seconds)
    evaluator, found = proved(evaluator, result, SOLVER_SECONDS if left.seconds is None else left.seconds)
    left = rest_of_budget(found, iterations, seconds)
    if found.stopped == "interrupted" or found.proven or found.plan != result.plan:
        return evaluator, found
    if left.seconds is not None and left.seconds < LEAST_SECONDS:
        return evaluator, found
    return overridden(evaluator, found, starts, PRICE, left.seconds, 0.0)  # the solver may not have got that far


def rest_of_budget(result: SearchResult, iterations: int | None, seconds: float | None) -> Budget:
    """What is left of the user's budget after a search."""
    if iterations is None and seconds is None:
        return Budget(EVALUATIONS)
    return Budget(
        None if iterations is None else iterations - result.evaluations - 1,  # one for what comes out
        None if seconds is None else seconds - result.seconds,
    )
