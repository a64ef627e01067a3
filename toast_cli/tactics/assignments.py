"""Assigns mesh axes, and their order, to the tactics of a strategy whose name does not state them.

In: a `Problem` and requests. Out: every distinct assignment of axes, and the plan of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from toast_cli.cost.model import Cost
from toast_cli.errors import UsageError
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.hardware.model import Axis, Mesh
from toast_cli.plan.decisions import Plan
from toast_cli.plan.mirrors import taken_apart
from toast_cli.plan.problem import Problem
from toast_cli.tactics.placing import Placed, TacticRequest, compose, needs_axes, place

# A strategy with all its axes, as `--strategy` takes it (`fsdp:gpu,node`; empty: they are in the mesh's order) -> plan.
PlansByAxes = dict[str, Plan]


@dataclass(frozen=True)
class PricedStrategy:
    """A strategy on its best axes: plans that fit in memory come first, then the fastest wins.

    Attributes:
        axes: see `PlansByAxes`.
        mesh: the mesh of the plan.
    """

    name: str
    axes: str
    plan: Plan
    cost: Cost
    mesh: Mesh

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.axes or self.name

    @property
    def fits(self) -> bool:
        return self.cost.peak_bytes <= self.mesh.limit_bytes

    @property
    def rank(self) -> tuple[bool, float]:
        """Smaller is better."""
        return not self.fits, self.cost.step_seconds


def best_assignment(evaluator: Evaluator, name: str, plans: PlansByAxes) -> PricedStrategy:
    """The best of a strategy's plans, at least one; of equal ones, the first."""
    found = [
        PricedStrategy(name, axes, plan, evaluator.exact_cost(plan, learn=False), evaluator.problem.mesh)
        for axes, plan in plans.items()
    ]
    return min(found, key=lambda one: one.rank)


def best_plan(problem: Problem, found: PlansByAxes, like: Evaluator | None = None) -> Plan:
    """The best of a strategy's plans. like: see `Evaluator`."""
    if len(found) == 1:
        return next(iter(found.values()))
    return best_assignment(Evaluator(problem, (), like), "", found).plan


def plans_by_axes(problem: Problem, requests: Sequence[TacticRequest]) -> PlansByAxes:
    """The plans of a strategy, each once: first with the axes in the mesh's order, then with other assignments.

    Raises UsageError where it applies to no axes, with the reason for the first assignment.
    """
    if problem.mirrored is not None:  # strategies do not depend on un-mirrored groups
        alike, parts = problem.mirrored
        return {
            text: problem.canonical(taken_apart(plan, parts)) for text, plan in plans_by_axes(alike, requests).items()
        }
    found: PlansByAxes = {}
    why: UsageError | None = None
    for number, placed in enumerate(assignments(problem, requests)):
        try:
            plan = problem.canonical(compose(problem, placed))
        except UsageError as error:
            why = why or error
            continue
        if plan not in found.values():
            found[_text(problem, placed) if number else ""] = plan
    if not found and why is not None:
        raise why
    return found


def assignments(problem: Problem, requests: Sequence[TacticRequest]) -> Iterator[Placed]:
    """Every way to distribute the mesh's axes over the tactics that have none: all axes, at least one for each tactic.
    The axes of a tactic are in mesh order, fastest first or largest first. Equal axes are permuted only if the program
    or the user names axes.
    """
    axes, names = problem.mesh.axes, problem.mesh.names
    taken = {name for request in requests for name in request.axes or ()}
    free = [k for k, axis in enumerate(axes) if axis.size > 1 and axis.name not in taken]
    own = needs_axes(requests)
    if not own or len(own) > len(free):
        yield place(requests, names)
        return
    seen: set[object] = set()
    for order in _orders(free, axes):
        for owners in product(own, repeat=len(order)):
            if set(owners) != set(own):
                continue
            shares = {k: tuple(a for a, owner in zip(order, owners, strict=True) if owner == k) for k in own}
            key = tuple(
                tuple(names[a] if problem.names_axes else _kind(axes[a]) for a in share) for share in shares.values()
            )
            if key not in seen:
                seen.add(key)
                yield place(requests, names, shares)


def _orders(free: list[int], axes: Sequence[Axis]) -> list[list[int]]:
    """The orders to try. The first axis communicates most, and is the first to split a dimension that not all axes
    divide."""

    def fastest_first(a: int) -> tuple[float, int]:
        slowest_link = min((link.bytes_per_second for link in axes[a].links), default=inf)
        return -slowest_link, -axes[a].size

    return [free, sorted(free, key=fastest_first), sorted(free, key=lambda a: -axes[a].size)]


def _kind(axis: Axis) -> object:
    """A key that is equal for interchangeable axes."""
    return axis.size, tuple((k.kind, k.size, k.bytes_per_second, k.latency_seconds, k.stride) for k in axis.links)


def _text(problem: Problem, placed: Placed) -> str:
    """The assignment as text, such as `fsdp:gpu,node + expert`; a companion takes the axes of the tactic before it."""
    parts: list[str] = []
    before: tuple[int, ...] | None = None
    for request, axes in placed:
        over = ",".join(problem.mesh.names[a] for a in axes)
        parts.append(request.text if request.axes is not None or axes == before else f"{request.text}:{over}")
        before = axes
    return " + ".join(parts)
