"""Edits of plans: decisions removed and inserted, and the plans that result."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from toast_cli.plan.decisions import Decision, Plan, Shard
from toast_cli.plan.problem import Problem

DecisionSequence = tuple[Decision, ...]  # decisions taken together, in order


class Edit(NamedTuple):
    """A change to a plan: decisions removed, decisions inserted (anywhere). If both are equal, they move."""

    out: DecisionSequence
    into: DecisionSequence


def subject(decision: Shard) -> tuple[int, int, int]:
    """Group, axis and part of the program: a plan decides about each once. The same group may take the same axis in
    several parts of the program, at different priorities."""
    return decision.group, decision.axis, decision.only


def suited(problem: Problem, plan: Plan) -> Plan:
    """The problem's fixed decisions, then all decisions of `plan` that may follow them; in canonical order."""
    found = list(problem.fixed)
    taken = {subject(d) for d in found if isinstance(d, Shard)}
    for decision in plan:
        if problem.decisions.offers(decision) and (
            subject(decision) not in taken if isinstance(decision, Shard) else decision not in found
        ):
            found.append(decision)
            if isinstance(decision, Shard):
                taken.add(subject(decision))
    return problem.canonical(tuple(found))


def results(problem: Problem, plan: Plan, edit: Edit) -> Iterator[Plan]:
    """The plans an edit can lead to, in canonical order, each once. A decision that replaces one about the same group
    and axis keeps its position; all others are inserted together at each position that makes a difference. None where
    the edit does not apply to the plan."""
    free = list(plan[len(problem.fixed) :])
    if any(d not in free for d in edit.out):
        return
    instead: dict[Decision, Decision] = {}
    if edit.out != edit.into:
        pairs = zip(edit.out, edit.into, strict=False)
        instead = dict(takewhile(lambda pair: pair[0][:2] == pair[1][:2], pairs))
    moved = edit.into[len(instead) :]
    free = [instead.get(d, d) for d in free if d in instead or d not in edit.out]
    taken = [subject(d) if isinstance(d, Shard) else d for d in (*free, *moved)]
    if len(set(taken)) < len(taken):
        return
    seen = {plan}
    for place in _places(problem, free, moved) if moved else [0]:
        result = problem.canonical((*problem.fixed, *free[:place], *moved, *free[place:]))
        if result not in seen:
            seen.add(result)
            yield result


def _places(problem: Problem, free: list[Decision], move: DecisionSequence) -> Iterator[int]:
    """Positions to insert a move: the front, and after each decision that does not commute with one of it."""
    shards = [d for d in move if isinstance(d, Shard)]
    yield 0
    for place, before in enumerate(free, 1):
        if isinstance(before, Shard) and any(not problem.commute(d, before) for d in shards):
            yield place
