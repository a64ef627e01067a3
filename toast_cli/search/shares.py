"""How a search by trees shares its budget between the trees and the lines of climbing behind them (see `polish`)."""

from __future__ import annotations

from typing import NamedTuple

from toast_cli.plan.problem import Problem

# Trees look at so many plans for each decision there is to choose from, and at this part of all, at least and at most.
TREES_PER_CHOICE, LEAST_TREES, MOST_TREES = 30, 0.2, 0.3
AGAIN = 0.238  # of the rest: each of two lines behind the first, which has what is left
LEAST_LINES, LEAST_AGAIN = 100, 2500  # evaluations of all below which there are no lines, or only the first
MANY_AXES, MANY_AXES_TREES = 3, 0.8  # trees look at coarse grains of the mesh, too


class Shares(NamedTuple):
    """Parts of a budget. again: of each of two further lines, 0 where there are none."""

    trees: float = 1.0
    first: float = 0.0
    again: float = 0.0


def shares_of(problem: Problem, evaluations: int | None) -> Shares:
    """How a budget of so many evaluations is shared; None where none are counted."""
    if not problem.decisions.choices or (evaluations is not None and evaluations < LEAST_LINES):
        return Shares()
    if sum(size > 1 for size in problem.mesh.sizes) >= MANY_AXES:
        return Shares(MANY_AXES_TREES, 1.0 - MANY_AXES_TREES)
    wanted = MOST_TREES if evaluations is None else TREES_PER_CHOICE * len(problem.decisions.choices) / evaluations
    trees = min(MOST_TREES, max(LEAST_TREES, wanted))
    if evaluations is not None and evaluations < LEAST_AGAIN:
        return Shares(trees, 1.0 - trees)
    return Shares(trees, (1.0 - 2.0 * AGAIN) * (1.0 - trees), AGAIN * (1.0 - trees))


def with_trees(problem: Problem, lines: int) -> int:
    """Evaluations of a whole search whose lines of climbing have so many."""
    if sum(size > 1 for size in problem.mesh.sizes) >= MANY_AXES:
        return lines
    wanted = TREES_PER_CHOICE * len(problem.decisions.choices)
    trees = min(max(wanted, LEAST_TREES / (1.0 - LEAST_TREES) * lines), MOST_TREES / (1.0 - MOST_TREES) * lines)
    return lines + round(trees)
