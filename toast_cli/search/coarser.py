"""A mesh of three and more axes as one of two, and plans for either said of the other.

Whatever can be decided about an axis can be decided about each of its pieces, so a mesh never does worse than one that
joins some of its axes; but a search among more decisions finds less of the best. So the joined mesh is searched by
itself, in its smaller space, and what is found there is where the search on the real one starts.

Enters: a `Problem`. Leaves: the same problem on each joined mesh, and translations of plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product
from math import prod

from toast_cli.hardware.model import Axis, Link, Mesh
from toast_cli.plan.axis_assignment import AxisAssigners
from toast_cli.plan.decisions import Decision, Plan
from toast_cli.plan.problem import Problem
from toast_cli.search.grains import Grain, grains


@dataclass(frozen=True)
class Coarser:
    """A problem on a mesh that joins axes. parts: [axes of it] the axes of the fine mesh that each one joins."""

    problem: Problem
    parts: Grain

    def coarsened(self, plan: Plan) -> Plan:
        """What a plan for the fine mesh says about all axes of a part alike."""
        said = Counter[Decision]()
        part_of = {axis: number for number, axes in enumerate(self.parts) for axis in axes}
        found: list[Decision] = []
        for decision in plan:
            alike = decision._replace(axis=part_of[decision.axis])
            said[alike] += 1
            if said[alike] == len(self.parts[alike.axis]):
                found.append(alike)
        return self.problem.canonical(tuple(found))

    def refined(self, plan: Plan) -> Iterator[Plan]:
        """What means the same on the fine mesh, not in canonical order: each decision about every axis of its part in
        turn. One plan for each order of these, which says what lies inside what."""
        for orders in product(*(permutations(axes) for axes in self.parts)):
            yield tuple(d._replace(axis=axis) for d in plan for axis in orders[d.axis])


def coarser(problem: Problem) -> list[Coarser]:
    """The problem on each mesh of two axes that joins neighbours among its own, or those along the same links. None
    where its mesh has no more than two, or where something is said of its own axes: pins, goals, decisions to begin
    with, regions that are manual."""
    if problem.names_axes:
        return []
    found = []
    for grain in grains(problem):
        parts = tuple(sorted(grain, key=min))
        axes = tuple(_joined(problem.mesh, part) for part in parts)
        mesh = replace(problem.mesh, axes=axes)
        found.append(Coarser(replace(problem, mesh=mesh, axis_assigners=AxisAssigners()), parts))
    return found


def _joined(mesh: Mesh, part: tuple[int, ...]) -> Axis:
    axes = [mesh.axes[number] for number in part]
    if len(axes) == 1:
        return axes[0]
    links: list[Link] = []
    for link in (link for axis in reversed(axes) for link in axis.links):
        at = next((k for k, other in enumerate(links) if _goes_on(other, link)), None)
        if at is None:
            links.append(link)
        else:
            inner = links[at]
            links[at] = replace(inner, size=inner.size * link.size, kind=link.kind)
    return Axis("+".join(axis.name for axis in axes), prod(axis.size for axis in axes), tuple(links))


def _goes_on(inner: Link, outer: Link) -> bool:
    """Whether two pieces of one dimension are one piece together."""
    return bool(inner.dimension) and inner.dimension == outer.dimension and outer.stride == inner.stride * inner.size
