"""Hill climbing: edits a plan until no edit makes it better.

Edits are tried in the order of what they promise, which is what they gained when they were last tried, on whatever plan
that was: the gain of an edit changes little while other parts of the plan change, so most of what helps is found in the
first sweep. The same idea makes greedy algorithms lazy (Minoux 1978).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.search.moves import Edit, Moves, results

Reward = Callable[[Plan], float]
Promise = dict[Edit, float]

LEAST_GAIN = 1e-9


def climb(moves: Moves, reward: Reward, plan: Plan, promise: Promise, patience: float = inf) -> Plan:
    """The best plan reached from `plan`.

    Args:
        moves: which edits there are. reward: of a plan in canonical order; larger is better. It may raise to end
            everything.
        promise: what each edit gained when last tried; brought up to date.
        patience: how many edits in a row may fail before a sweep ends.
    """
    kinds = [moves.small_edits, moves.exchanges]
    if patience == inf:
        kinds.append(moves.handed_over)  # many, of which few help
    now = reward(plan)
    improved = True
    while improved:
        for edits in kinds:
            plan, now, improved = _sweep(moves.problem, reward, plan, now, edits(plan), promise, patience)
            if improved:
                break
    return plan


def _sweep(
    problem: Problem, reward: Reward, plan: Plan, now: float, edits: list[Edit], promise: Promise, patience: float
) -> tuple[Plan, float, bool]:
    """Tries each edit at its best place and keeps what helps.

    Returns the plan, its reward and whether anything helped.
    """
    failed, improved = 0, False
    for edit in sorted(edits, key=lambda e: -promise.get(e, promise.get(Edit((), e.into), 0.0))):
        tried = [(reward(result), result) for result in results(problem, plan, edit)]
        if not tried:
            continue
        best, result = max(tried, key=lambda t: t[0])
        promise[edit] = best - now
        failed += 1
        if best > now + LEAST_GAIN:
            plan, now, failed, improved = result, best, 0, True
        if failed > patience:
            break
    return plan, now, improved
