"""How it is said that ops do otherwise: from what each pattern is to do, to places of overrides.

Enters: a problem told apart into parts, a plan, and an assignment. Leaves: places, connected ones together, and the
decisions that say them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from toast_cli.plan.axis_assignment import START, assigned_order, claim_of, final_claim
from toast_cli.plan.decisions import Override, Plan
from toast_cli.plan.iteration import Iteration, lay_out
from toast_cli.plan.problem import Problem
from toast_cli.program.disjoint_set import DisjointSets

Claims = dict[int, tuple[int, ...]]  # axis -> slots, as an `Override` has them


class Place(NamedTuple):
    """What ops of one pattern are to do otherwise. claims: axis -> slots, in the order in which axes split what several
    do."""

    pattern: int
    claims: Mapping[int, tuple[int, ...]]


def otherwise(problem: Problem, plan: Plan, picked: Sequence[Iteration]) -> list[Place]:
    """Where an assignment has something otherwise than the plan.

    Args:
        picked: [patterns] what each is to do.
    """
    axes = [axis for axis, size in enumerate(problem.mesh.sizes) if size > 1]
    found = []
    for number, to in enumerate(picked):
        said = (_claims(problem, plan, number, to, order) for order in permutations(axes))
        if claims := next((of for of in said if of is not None), None):
            found.append(Place(number, claims))
    return found


def connected(problem: Problem, places: Sequence[Place]) -> list[list[Place]]:
    """Places between which arrays travel, together."""
    program, pattern_of = problem.program, problem.op_pattern
    about = {place.pattern for place in places}
    together = DisjointSets[int]()
    for value, users in enumerate(program.users):
        made = pattern_of[program.producer[value]]
        for read in {pattern_of[op] for op, _ in users} & about if made in about else ():
            together.union(made, read)
    groups: dict[int, list[Place]] = defaultdict(list)
    for place in places:
        groups[together.find(place.pattern)].append(place)
    return list(groups.values())


def overrides(problem: Problem, places: Sequence[Place]) -> list[Override]:
    """Decisions that say these places, few: one for each axis where all name axes in one order."""
    claims_of: dict[int, Mapping[int, tuple[int, ...]]] = {}
    for place in places:
        claims_of.setdefault(problem.patterns[place.pattern].part, place.claims)
    left = {part: list(claims.items()) for part, claims in sorted(claims_of.items())}
    found = []
    while left:
        first = Counter(said[0][0] for said in left.values())
        behind = Counter(axis for said in left.values() for axis, _ in said[1:])
        axis = min(first, key=lambda a: (behind[a], -first[a], a))  # what the fewest name later, too
        said_now = {part: said.pop(0)[1] for part, said in left.items() if said[0][0] == axis}
        found.append(Override(axis, tuple(said_now.items())))
        left = {part: said for part, said in left.items() if said}
    return found


def _claims(problem: Problem, plan: Plan, number: int, to: Iteration, order: tuple[int, ...]) -> Claims | None:
    """What makes ops of a pattern do so, empty where the plan does; None where nothing can."""
    pattern, assigner = problem.patterns[number], problem.assigners[number]
    now = problem.iterate(number, plan)
    if _alike(now, to):
        return {}
    of_now, of_to = _slot_of(now), _slot_of(to)
    others = [claim_of(pattern, decision, problem.resolution_place) for decision in assigned_order(plan)]
    scattered = _scattered_on(pattern.form.results, to)
    for axes in ([axis for axis in order if of_now.get(axis) != of_to.get(axis)], order):
        claims = {
            axis: (of_to[axis], *scattered.get(axis, ())) if axis in of_to else () for axis in axes
        }  # fmt: skip
        state = START
        for claim in (*(final_claim(axis, slots) for axis, slots in claims.items()), *others):
            state = state if claim is None else assigner.after(state, claim)
        if _alike(lay_out(pattern, assigner.choices[assigner.choice(state)]), to):
            return claims
    return None


def _alike(one: Iteration, other: Iteration) -> bool:
    return one.slot_axes == other.slot_axes and one.shardings == other.shardings


def _slot_of(iteration: Iteration) -> dict[int, int]:
    """Axis -> the slot that it splits."""
    return {axis: slot for slot, axes in enumerate(iteration.slot_axes) for axis in axes}


def _scattered_on(results: Sequence[Sequence[Sequence[int]]], iteration: Iteration) -> dict[int, tuple[int, ...]]:
    """Axis -> slots on which results that are partial over it are scattered; of a dimension of several, any of them."""
    found: dict[int, tuple[int, ...]] = {}
    for dims, sharding, scattered in zip(results, iteration.shardings, iteration.scattered, strict=True):
        for slots, axes in zip(dims, sharding, strict=True):
            for axis in axes:
                if axis in scattered:
                    found[axis] = tuple(dict.fromkeys((*found.get(axis, ()), *slots)))
    return found
