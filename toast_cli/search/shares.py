"""How a search by trees shares its budget between the trees and the lines of climbing behind them (see `polish`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from toast_cli.plan.problem import Problem

# Trees look at so many plans for each decision there is to choose from, and at this part of all, at least and at most.
TREES_PER_CHOICE, LEAST_TREES, MOST_TREES = 30, 0.2, 0.3
AGAIN = 0.238  # of the rest: each of two lines behind the first, which has what is left
LEAST_LINES, LEAST_AGAIN = 100, 2500  # evaluations of all below which there are no lines, or only the first
MANY_AXES, MANY_AXES_TREES = 3, 0.8  # trees look at coarse grains of the mesh, too
# A search that may grow does so in steps of this part of the budget, up to so many times the budget, and beyond where
# its best plan was found behind so much of what it has looked at by then.
MORE, GROWN, LATE = 0.2, 1.5, 0.75


class Shares(NamedTuple):
    """Parts of a budget. again: of each of two further lines, 0 where there are none."""

    trees: float = 1.0
    first: float = 0.0
    again: float = 0.0


@dataclass(frozen=True)
class Growth:
    """How many plans a search may look at beyond its budget where edits have made what the trees found better.

    Attributes:
        trees: evaluations of the trees. total: of the whole budget; 0 for a search that does not grow.
    """

    trees: int = 0
    total: int = 0

    def of_first_line(self, looked: int, found: int) -> int:
        """Evaluations of a step more of the first line, 0 for none, after lines have looked at so many plans, the best
        of which was found behind so many of them."""
        before, most = self.trees + looked, GROWN * self.total
        late = LATE * before < self.trees + found < most
        return int(MORE * self.total) if found > 1 and (before < most or late) else 0  # the first is what is edited

    def of_further_lines(self, looked: int, found: int) -> int:
        """Evaluations that lines behind the first may have together besides their shares."""
        return max(0, int(GROWN * self.total) - self.trees - looked) if found > 1 else 0


NO_GROWTH = Growth()


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
