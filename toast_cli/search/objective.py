"""Which of two plans is better: the goal of a problem as an order and as a reward. All searches compare plans here.

Enters: a `Problem` (its goal, its device memory) and the cost of the plan that decides nothing. Leaves: comparisons.
"""

from __future__ import annotations

from math import inf, log

from toast_cli.cost.model import Cost
from toast_cli.plan.decisions import Plan
from toast_cli.plan.goal import PEAK_MEMORY, STEP_TIME, Bound, Figure
from toast_cli.plan.problem import Problem

# What one more decision must gain, as a fraction: a plan of three decisions that is as fast as one of thirteen within a fraction
# of a percent is the better one to read, to write down and to keep.
PRICE = 0.0005
# Plans closer than this fraction in one figure are equal in it, and the next figure decides.
SAME = 0.005
# How much less the next figure weighs in a reward.
_WEIGHT = 0.01
# Seconds, as a fraction of the reference's step, below which times are much alike: a plan may have no communication at all.
_NEGLIGIBLE = 1e-4

Rank = tuple[float | int | str, ...]


class Objective:
    """Device memory and the goal's bounds come first, then what is to be minimised; step time settles what is left."""

    def __init__(self, problem: Problem, reference: Cost) -> None:
        goal = problem.goal
        self._names = problem.mesh.names
        self.minimised = goal.minimise if STEP_TIME in goal.minimise else (*goal.minimise, STEP_TIME)
        self.bounds = (Bound(PEAK_MEMORY, float(problem.mesh.limit_bytes)), *goal.bounds)
        self._least = {
            f: max(reference.step_seconds * _NEGLIGIBLE if f.is_time else 1.0, 1e-12) for f in self.minimised
        }
        self._logs = {f: log(self._value(f, reference) + self._least[f]) for f in self.minimised}

    @property
    def fastest(self) -> bool:
        """Whether a plan that keeps the bounds is the better the faster it is, and nothing else counts."""
        return self.minimised == (STEP_TIME,)

    def met(self, cost: Cost) -> bool:
        """Whether all bounds hold."""
        return all(self._value(bound.figure, cost) <= bound.limit for bound in self.bounds)

    def excess(self, cost: Cost) -> float:
        """How far the bounds are exceeded: the sum of the logarithms of by what factor; 0 where all hold."""
        return sum(_over(self._value(bound.figure, cost), bound.limit) for bound in self.bounds)

    def rank(self, plan: Plan, cost: Cost) -> Rank:
        """Smaller is better; a decision must pay for itself (`PRICE`), and ties go to a fixed order."""
        excess = self.excess(cost)
        if excess > 0.0:
            return (1, _rounded(excess + PRICE * len(plan)), len(plan), repr(plan))
        *first, last = self.minimised
        classes = [round(log(self._value(f, cost) + self._least[f]) / SAME) for f in first]
        return (0, *classes, _rounded(self._value(last, cost) * (1.0 + PRICE * len(plan))), len(plan), repr(plan))

    def reward(self, plan: Plan, cost: Cost) -> float:
        """Log of how much better than the reference, less the price, less a penalty that grows with the excess."""
        gain, weight = -PRICE * len(plan), 1.0
        for figure in self.minimised:
            gain += weight * (self._logs[figure] - log(self._value(figure, cost) + self._least[figure]))
            weight *= _WEIGHT
        excess = self.excess(cost)
        return gain if excess <= 0.0 else gain - 1.0 - 4.0 * excess

    def _value(self, figure: Figure, cost: Cost) -> float:
        return figure_value(figure, cost, self._names)


def figure_value(figure: Figure, cost: Cost, names: tuple[str, ...]) -> float:
    """Seconds or bytes of one figure; `names` [axes] of the mesh. Communication over an axis the mesh lacks is none."""
    match figure.name:
        case "step_time":
            return cost.step_seconds
        case "compute":
            return cost.compute_seconds
        case "communication" if figure.axis:
            return cost.axis_seconds[names.index(figure.axis)] if figure.axis in names else 0.0
        case "communication":
            return cost.communication_seconds
        case "peak_memory":
            return cost.peak_bytes
        case _:
            return cost.argument_bytes


def _over(value: float, limit: float) -> float:
    if value <= limit:
        return 0.0
    return log(value / limit) if limit > 0.0 else 1.0 + log(1.0 + value)


def _rounded(figure: float) -> float:
    return float(f"{figure:.9g}") if figure < inf else inf
