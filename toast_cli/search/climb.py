"""Hill climbing: edits a plan until no edit makes it better.

Edits are tried in the order of what they promise, which is what they gained when they were last tried, on whatever plan
that was: the gain of an edit changes little while other parts of the plan change, so most of what helps is found in the
first sweep. The same idea makes greedy algorithms lazy (Minoux 1978). Where no edit helps, climbs from the neighbours
find what takes two edits or more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import nsmallest
from math import inf

from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.search.edits import Edit, results
from toast_cli.search.moves import Moves
from toast_cli.search.objective import PRICE
from toast_cli.search.wide_edits import about_axes

Reward = Callable[[Plan], float]
Promise = dict[Edit, float]

LEAST_GAIN = 1e-9
NEIGHBOURS = 60  # climbed from around a plan that no edit makes better
NEIGHBOURS_PATIENCE = 10  # edits in a row that may fail there


def climb(
    moves: Moves, reward: Reward, plan: Plan, promise: Promise, patience: float = inf, *, hands_over: bool = True
) -> Plan:
    """The best plan reached from `plan`.

    Args:
        moves: which edits there are. reward: of a plan in canonical order; larger is better. It may raise to end
            everything.
        promise: what each edit gained when last tried; brought up to date.
        patience: how many edits in a row may fail before a sweep ends.
        hands_over: whether to try what hands ops over to other groups, too, where edits may fail without end.
    """
    kinds = [(moves.small_edits, patience), (moves.exchanges, patience)]
    if moves.local:
        kinds = [(moves.local_edits, patience), (moves.small_edits, patience), (moves.exchanges, NEIGHBOURS_PATIENCE)]
        if patience == inf:
            kinds.insert(1, (moves.local_additions, patience))
    elif patience == inf:
        kinds.append((moves.varied_additions, patience))
        if hands_over:
            kinds.append((moves.handed_over, patience))  # many, of which few help
    now = reward(plan)
    improved = True
    while improved:
        for edits, most in kinds:
            plan, now, improved = _sweep(moves.problem, reward, plan, now, edits(plan), promise, most)
            if improved:
                break
    return plan


def climb_around(moves: Moves, reward: Reward, plan: Plan, promise: Promise | None = None) -> Plan:
    """The best plan reached from `plan` with every edit, and from its neighbours where no edit helps. promise: as
    `climb` has it; None where nothing has been tried.
    """
    promise = {} if promise is None else promise
    hands_over = True  # what hands ops over is much to try, so first and last only
    while True:
        plan = climb(moves, reward, plan, promise, hands_over=hands_over)
        beyond = _climb_beside(moves, reward, plan, promise, hands_over=hands_over)
        if beyond == plan and hands_over:
            return plan
        plan, hands_over = beyond, beyond == plan


def _climb_beside(moves: Moves, reward: Reward, plan: Plan, promise: Promise, *, hands_over: bool) -> Plan:
    """Climbs from neighbours of a plan that no edit makes better, until that leads to a better plan: first from those
    in which all that is decided about an axis has changed, then from the best.

    Args:
        promise: what each edit gains on `plan`. hands_over: as `climb` has it.
    """
    now, problem, length = reward(plan), moves.problem, len(plan)
    wide = {to for edit in about_axes(moves, plan) for to in results(problem, plan, edit)}
    back: dict[Plan, Edit] = {}
    for edit, to in _neighbours(moves, reward, plan, hands_over=hands_over):
        back.setdefault(to, Edit(edit.into, edit.out))
    worth = {to: reward(to) for to in back}

    def differs(to: Plan) -> bool:
        """Whether it is more than another way to say the same."""
        return to != plan and abs(worth[to] - now + PRICE * (len(to) - length)) > LEAST_GAIN

    order = nsmallest(NEIGHBOURS, filter(differs, worth), key=lambda to: (to not in wide, -worth[to], repr(to)))
    for neighbour in order:
        reached = climb(moves, reward, neighbour, {**promise, back[neighbour]: -inf}, NEIGHBOURS_PATIENCE)
        if reward(reached) > now + LEAST_GAIN:
            return reached
    return plan


def _neighbours(moves: Moves, reward: Reward, plan: Plan, *, hands_over: bool) -> Iterator[tuple[Edit, Plan]]:
    """Plans one edit away, and those with a decision more that does not hold everywhere or takes another side."""
    problem = moves.problem
    everything = [*moves.small_edits(plan), *moves.exchanges(plan), *(moves.handed_over(plan) if hands_over else ())]
    restricts = moves.local_edits if moves.local else moves.variations
    for edit in moves.local_edits(plan) if moves.local else everything:
        for to in results(problem, plan, edit):
            yield edit, to
    for unit in moves.after(plan):
        longer = max(results(problem, plan, Edit((), unit)), key=reward, default=plan)
        for edit in restricts(longer):
            if edit.out == unit:
                for to in results(problem, longer, edit):
                    yield Edit((), edit.into), to


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
