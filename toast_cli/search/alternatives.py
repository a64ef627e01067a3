"""Selects the best plans of a search that differ in what the devices do.

The difference of two plans compares the work of one step: its kernels (an op, and the mesh axes that split it) and its
collectives (kind, axes, array, bytes). It is the share of the slower step that is spent on kernels and collectives that
only one of the plans has. Plans that are written differently but do the same work differ by 0. So do plans that only
exchange mesh axes of equal size, if that leaves the step time equal, and plans that only reorder the axes that split a
dimension. A plan is returned if it differs from every plan before it by at least `DIFFERENT`, or if its peak memory
differs by that fraction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby, islice, permutations, product
from typing import TypeVar

from toast_cli.hardware import Mesh
from toast_cli.plan.decisions import Plan
from toast_cli.plan.saved import unmirrored
from toast_cli.price.evaluator import Evaluator
from toast_cli.search.incumbent import Objective, SearchResult

DIFFERENT = 0.1
KEPT = 2000  # number of a search's best plans to compare
_SWAPS = 24  # maximum number of axis permutations to try
_EQUAL = 1e-9  # relative difference below which steps are equal

Of = TypeVar("Of", bound=Hashable)
SecondsSpent = dict[Hashable, float]  # what -> seconds of a step


def best_plans(evaluator: Evaluator, result: SearchResult, count: int) -> list[Plan]:
    """The best `count` plans of a search that differ, or fewer, the best first."""
    return [result.plan, *different_plans(evaluator, [result.plan], result.seen, count - 1)]


def different_plans(evaluator: Evaluator, others: Sequence[Plan], seen: Iterable[Plan], count: int) -> list[Plan]:
    """The best `count` plans of `seen` (or fewer) that differ from `others` and from each other.

    Args:
        seen: plans for this mesh, in any order. They may be plans of the problem with mirrored layers, though `others`
            decide those layers separately.
    """
    if count < 1:
        return []
    problem = evaluator.problem
    objective = Objective(problem, evaluator.cost(problem.fixed))
    if problem.mirrored is not None:  # to one that decides some layers separately
        parts = problem.mirrored[1]
        seen = [problem.canonical(unmirrored(plan, parts)) for plan in seen]
    plans = dict.fromkeys(seen)
    costs = {plan: evaluator.cost(plan) for plan in plans}
    ranked = sorted(costs, key=lambda plan: objective.rank(plan, costs[plan]))
    swaps = axis_swaps(problem.mesh)
    kept, different = [_PlanWork(evaluator, plan) for plan in others], list[Plan]()
    for plan in ranked:
        if len(different) == count:
            break
        variants = [_PlanWork(evaluator, other) for other in _exchanged(evaluator, plan, swaps)]
        if any(not _differ(variant, other) for variant in variants for other in kept):
            continue
        kept.append(variants[0])
        different.append(simplest(evaluator, plan))
    exact = {plan: evaluator.exact_cost(plan) for plan in different}
    return sorted(different, key=lambda plan: objective.rank(plan, exact[plan]))


def name_of(place: int) -> str:
    """Names of a search's best plans by their rank: "search", "search 2", ..."""
    return "search" if place == 0 else f"search {place + 1}"


def spent(evaluator: Evaluator, plan: Plan) -> SecondsSpent:
    """Seconds that a step spends on each kernel, by op and how it is split, and on each collective."""
    problem, seconds = evaluator.problem, defaultdict[Hashable, float](float)
    for kernel in evaluator.kernels(plan):
        split = problem.choice(problem.op_pattern[kernel.op], plan)[0]
        seconds["kernel", kernel.op, tuple(tuple(sorted(axes)) for axes in split)] += kernel.seconds
    for use in evaluator.collectives(plan):
        seconds[use.kind, tuple(sorted(use.axes)), use.op, use.value, use.bytes, use.group] += use.seconds
    return seconds


def difference(work: Mapping[Of, float], other_work: Mapping[Of, float]) -> float:
    """Share, 0 to 1, of the slower step that is spent on work that only one of the two plans has."""
    most = max(sum(work.values()), sum(other_work.values()))
    if not most:
        return 0.0
    unshared = sum(max(work.get(what, 0.0), other_work.get(what, 0.0)) for what in work.keys() ^ other_work.keys())
    return min(1.0, unshared / most)


def simplest(evaluator: Evaluator, plan: Plan) -> Plan:
    """The plan without decisions that change nothing in it."""
    problem = evaluator.problem
    meant = evaluator.parts(plan)
    place = len(problem.fixed)
    while place < len(plan):
        shorter = problem.canonical((*plan[:place], *plan[place + 1 :]))
        if evaluator.parts(shorter) == meant:
            plan = shorter
        else:
            place += 1
    return plan


def axis_swaps(mesh: Mesh) -> list[tuple[int, ...]]:
    """[permutations][axes] number of the axis that replaces each axis: permutations of axes of equal size. The first is
    the identity."""
    order = sorted(range(len(mesh.sizes)), key=lambda number: mesh.sizes[number])
    alike = [tuple(numbers) for _, numbers in groupby(order, key=lambda number: mesh.sizes[number])]
    swaps = []
    for choice in islice(product(*map(permutations, alike)), _SWAPS):
        place = dict(zip(order, chain(*choice), strict=True))
        swaps.append(tuple(place[number] for number in range(len(order))))
    return swaps


class _PlanWork:
    """A plan's cost and the work of its step, which is computed on first use because it is expensive."""

    def __init__(self, evaluator: Evaluator, plan: Plan) -> None:
        self._evaluator, self._plan = evaluator, plan
        self.cost = evaluator.cost(plan)
        self.parts = evaluator.parts(plan)

    @cached_property
    def spent(self) -> SecondsSpent:
        return spent(self._evaluator, self._plan)


def _differ(first: _PlanWork, second: _PlanWork) -> bool:
    """True if two plans do different work. Ops with the same sharding in both cost the same, so the other ops are an
    upper bound of the difference."""
    least, most = sorted((first.cost.peak_bytes, second.cost.peak_bytes))
    if most - least >= DIFFERENT * most > 0.0:
        return True
    if difference(first.parts, second.parts) < DIFFERENT:
        return False
    return difference(first.spent, second.spent) >= DIFFERENT


def _exchanged(evaluator: Evaluator, plan: Plan, swaps: list[tuple[int, ...]]) -> Iterator[Plan]:
    """The plan, and its copies with permuted mesh axes that leave the step time unchanged."""
    problem, seconds = evaluator.problem, evaluator.cost(plan, 0.0).most_seconds
    fixed = problem.fixed
    yield plan
    for swap in swaps[1:]:
        other = problem.canonical((*fixed, *(d._replace(axis=swap[d.axis]) for d in plan[len(fixed) :])))
        if other != plan and abs(evaluator.cost(other, 0.0).most_seconds - seconds) <= _EQUAL * seconds:
            yield other
