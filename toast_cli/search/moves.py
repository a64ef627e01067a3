"""Moves between plans: which decisions may follow a plan, and the plans one change away from it."""

from __future__ import annotations

from collections.abc import Iterator

from toast_cli.plan.decisions import Decision, Plan, Replicate, Shard
from toast_cli.plan.problem import Problem


def next_decisions(problem: Problem, plan: Plan) -> list[Decision]:
    """Decisions that may be appended: each group takes each axis once; `Replicate` needs something split over its axis."""
    taken = {(d.group, d.axis) for d in plan if isinstance(d, Shard)}
    axes = {axis for _, axis in taken}
    return [
        d for d in problem.choices
        if ((d.group, d.axis) not in taken if isinstance(d, Shard) else d.axis in axes and d not in plan)
    ]  # fmt: skip


Move = tuple[Decision, ...]  # decisions taken together, in order


def next_moves(problem: Problem, plan: Plan) -> list[Move]:
    """Single decisions, and those that only pay together: a group over all axes, a family or all weights over one axis."""
    singles = next_decisions(problem, plan)
    open_shards = [d for d in singles if isinstance(d, Shard)]
    allowed = set(open_shards)
    moves: list[Move] = [(d,) for d in singles]
    moves += [move for move in problem.macros if allowed.issuperset(move)]
    return moves


def neighbours(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Plans that differ by one decision removed, exchanged, moved or added, in canonical order; `problem.fixed` stays in front."""
    fixed = len(problem.fixed)
    free = plan[fixed:]
    for k in range(len(free)):
        yield problem.canonical((*problem.fixed, *free[:k], *free[k + 1 :]))
    for k in range(len(free)):
        rest = free[:k] + free[k + 1 :]
        for place in range(len(rest) + 1):
            if place != k:
                yield problem.canonical((*problem.fixed, *rest[:place], free[k], *rest[place:]))
    for decision in next_decisions(problem, plan):
        for place in range(len(free) + 1):
            if isinstance(decision, Shard) or place == len(free):
                yield problem.canonical((*problem.fixed, *free[:place], decision, *free[place:]))
    for k in range(len(free)):
        rest = free[:k] + free[k + 1 :]
        for decision in next_decisions(problem, (*problem.fixed, *rest)):
            if isinstance(decision, Shard) or isinstance(free[k], Replicate):
                yield problem.canonical((*problem.fixed, *rest[:k], decision, *rest[k:]))
