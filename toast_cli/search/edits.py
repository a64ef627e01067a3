"""Edits of plans: decisions taken out and put in, and the plans that come of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from toast_cli.plan.decisions import Decision, Plan, Shard
from toast_cli.plan.problem import Problem

Move = tuple[Decision, ...]  # decisions taken together, in order
Shards = tuple[Shard, ...]  # a move of nothing else


class Edit(NamedTuple):
    """A change to a plan: decisions taken out, decisions put in (anywhere). Both the same: they move."""

    out: Move
    into: Move


def like(to: Decision, unit: Move) -> Move:
    """The same decision about all axes of a unit."""
    return tuple(to._replace(axis=d.axis) for d in unit)


def suited(problem: Problem, plan: Plan) -> Plan:
    """What every plan starts with, then of `plan` all that may follow it; in canonical order."""
    found = list(problem.fixed)
    taken = {d[:2] for d in found if isinstance(d, Shard)}
    for decision in plan:
        if problem.decisions.offers(decision) and (
            decision[:2] not in taken if isinstance(decision, Shard) else decision not in found
        ):
            found.append(decision)
            if isinstance(decision, Shard):
                taken.add(decision[:2])
    return problem.canonical(tuple(found))


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
    if edit.out != edit.into and [d[:2] for d in edit.out] == [
        d[:2] for d in edit.into
    ]:  # one becomes another: it stays where it is
        instead = dict(zip(edit.out, edit.into, strict=True))
        yield problem.canonical(tuple(instead.get(d, d) for d in plan))
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
