"""Assigns mesh axes, and their order, to the tactics of a strategy whose name does not state them.

In: a `Problem` and requests. Out: every distinct assignment of axes, and the plan of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from toast_cli.cost.model import Cost
from toast_cli.errors import UsageError
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.hardware.model import Axis, Mesh
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.mirrors import taken_apart
from toast_cli.plan.problem import Problem
from toast_cli.tactics.placing import Placed, TacticRequest, compose, fastest_first, needs_axes, place

# A strategy with all its axes, as `--strategy` takes it (`fsdp:gpu,node`; empty: as without axes) -> plan.
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
    """The plans of a strategy, each once: first that on all axes as tactics take them in the mesh's order.

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
            plan = compose(problem, placed)
        except UsageError as error:
            why = why or error
            continue
        narrow = _narrowed(problem, placed, plan)
        named = {_text(problem, placed) if number else "": plan}
        if narrow != placed:
            named[_text(problem, narrow)] = compose(problem, narrow)
        for text, each in named.items():
            plan = problem.canonical(each)
            if plan not in found.values():
                found[text] = plan
    if not found and why is not None:
        raise why
    return found


def assignments(problem: Problem, requests: Sequence[TacticRequest]) -> Iterator[Placed]:
    """Every way to distribute the mesh's axes over the tactics that have none: all axes, at least one for each tactic.

    A tactic takes its axes the fastest first, then in the user's order or the largest first. Equal axes are permuted
    only if the program or the user names axes.
    """
    mesh, names = problem.mesh, problem.mesh.names
    taken = {name for request in requests for name in request.axes or ()}
    free = [a for a, axis in enumerate(mesh.axes) if axis.size > 1 and axis.name not in taken]
    own = needs_axes(requests)
    if len(own) > len(free):
        yield place(requests, mesh)
        return
    seen: set[object] = set()
    for fastest, owners in product((True, False), product(own, repeat=len(free)) if own else [()]):
        if set(owners) != set(own):
            continue
        shares: dict[int, tuple[int, ...]] = {}
        for k, request in enumerate(requests):
            if request.axes is not None:
                shares[k] = tuple(map(names.index, request.axes))
            elif k in own:
                share = (a for a, owner in zip(free, owners, strict=True) if owner == k)
                shares[k] = tuple(sorted(share, key=lambda a: 0 if fastest else -mesh.sizes[a]))
            if fastest and k in shares:
                shares[k] = fastest_first(mesh, shares[k])
        key = tuple(
            tuple(names[a] if problem.names_axes else _kind(mesh.axes[a]) for a in share) for share in shares.values()
        )
        if key not in seen:
            seen.add(key)
            yield place(requests, mesh, shares)


def _narrowed(problem: Problem, placed: Placed, plan: Plan) -> Placed:
    """The tactics that split the batch, on those of the axes left to them that split it in this plan: FSDP then keeps
    weights whole over an axis for which the batch is too small."""
    groups = problem.dimensions.groups
    filled = {d.axis for d in plan if isinstance(d, Shard) and groups[d.group].role == "batch"}
    return tuple(
        (request, tuple(a for a in axes if a in filled) if request.axes is None and filled & {*axes} else axes)
        for request, axes in placed
    )


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
