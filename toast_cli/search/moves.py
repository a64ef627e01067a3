"""Moves between plans: which decisions may follow a plan, and the plans one edit away from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from toast_cli.plan.decisions import Decision, Plan, Shard
from toast_cli.plan.problem import Problem

Move = tuple[Decision, ...]  # decisions taken together, in order


class Edit(NamedTuple):
    """A change to a plan: decisions taken out, decisions put in (anywhere). Both the same: they move."""

    out: Move
    into: Move


def next_decisions(problem: Problem, plan: Plan) -> list[Decision]:
    """Decisions that may be appended: each group takes each axis once; `Replicate` needs something split over its axis."""
    taken = {(d.group, d.axis) for d in plan if isinstance(d, Shard)}
    axes = {axis for _, axis in taken}
    return [
        d for d in problem.choices
        if ((d.group, d.axis) not in taken if isinstance(d, Shard) else d.axis in axes and d not in plan)
    ]  # fmt: skip


def next_moves(problem: Problem, plan: Plan) -> list[Move]:
    """Single decisions, and those that only pay together: a group over all axes, a family or all weights over one axis."""
    singles = next_decisions(problem, plan)
    allowed = {d for d in singles if isinstance(d, Shard)}
    return [*((d,) for d in singles), *(move for move in problem.macros if allowed.issuperset(move))]


def suited(problem: Problem, plan: Plan) -> Plan:
    """What every plan starts with, then of `plan` all that may follow it; in canonical order."""
    allowed, found = set(problem.choices), list(problem.fixed)
    taken = {d[:2] for d in found if isinstance(d, Shard)}
    for decision in plan:
        if decision in allowed and (
            decision[:2] not in taken if isinstance(decision, Shard) else decision not in found
        ):
            found.append(decision)
            taken.add(decision[:2])
    return problem.canonical(tuple(found))


def small_edits(problem: Problem, plan: Plan) -> list[Edit]:
    """Everything that takes out, moves or adds; decisions every plan starts with stay."""
    free = plan[len(problem.fixed) :]
    return [
        *(Edit((d,), ()) for d in free),
        *(Edit((d,), (d,)) for d in free if isinstance(d, Shard)),
        *(Edit((), move) for move in next_moves(problem, plan)),
    ]


def exchanges(problem: Problem, plan: Plan) -> list[Edit]:
    """Everything that puts one decision in place of another of its kind."""
    free = plan[len(problem.fixed) :]
    return [Edit((d,), (e,)) for d in free for e in problem.choices if e not in plan and type(d) is type(e)]


def results(problem: Problem, plan: Plan, edit: Edit) -> Iterator[Plan]:
    """The plans an edit can lead to, in canonical order, each once: what it puts in may stand at any place that makes a
    difference. None where the edit does not suit the plan."""
    fixed = len(problem.fixed)
    free = list(plan[fixed:])
    if any(d not in free for d in edit.out):
        return
    free = [d for d in free if d not in edit.out]
    taken = {d[:2] for d in free if isinstance(d, Shard)}
    if any(d[:2] in taken if isinstance(d, Shard) else d in free for d in edit.into):
        return
    if not edit.into:
        yield problem.canonical((*problem.fixed, *free))
        return
    seen = {plan}
    for place in _places(problem, free, edit.into):
        result = problem.canonical((*problem.fixed, *free[:place], *edit.into, *free[place:]))
        if result not in seen:
            seen.add(result)
            yield result


def _places(problem: Problem, free: list[Decision], move: Move) -> Iterator[int]:
    """Where to insert a move: at the front, and behind each decision that one of it does not commute with."""
    shards = [d for d in move if isinstance(d, Shard)]
    yield 0
    for place, before in enumerate(free, 1):
        if isinstance(before, Shard) and any(not problem.commute(d, before) for d in shards):
            yield place
