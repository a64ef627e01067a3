"""Coarse ways to see a mesh of many axes: several of them are decided about together, as if they were one."""

from __future__ import annotations

from collections import defaultdict
from math import prod

from toast_cli.plan.problem import Problem

Grain = tuple[tuple[int, ...], ...]  # mesh axes decided about together


def middle_grain(problem: Problem) -> Grain | None:
    """A mesh of four and more axes as it is searched first: those that run along the same links together, else in two
    parts that are as equal as can be. None for other meshes."""
    found, sizes = grains(problem), problem.mesh.sizes
    if sum(size > 1 for size in sizes) < 4:
        return None
    along = _along_links(problem)
    return along or min(
        found, key=lambda grain: abs(prod(sizes[a] for a in grain[0]) - prod(sizes[a] for a in grain[1]))
    )


def grains(problem: Problem) -> list[Grain]:
    """Coarse ways to see a mesh of three and more axes: as one of two, split at each place in the order of its axes;
    and with those as one that run along the same links."""
    axes = [axis for axis, size in enumerate(problem.mesh.sizes) if size > 1]
    if len(axes) < 3:
        return []
    rest = tuple((axis,) for axis, size in enumerate(problem.mesh.sizes) if size == 1)
    found = [(tuple(axes[:k]), tuple(axes[k:]), *rest) for k in range(1, len(axes))]
    along = _along_links(problem)
    return found if along is None or along in found else [*found, along]


def _along_links(problem: Problem) -> Grain | None:
    """Axes that share dimensions of the torus together; None where that joins none or all of them."""
    parts: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, axis in enumerate(problem.mesh.axes):
        parts[tuple(sorted(link.dimension or axis.name for link in axis.links))].append(number)
    found = tuple(tuple(part) for part in parts.values())
    return found if 1 < len(found) < len(problem.mesh.axes) else None
