"""The objective: ranks plans, and gives them rewards, by the goal of a problem. All searches compare plans by it.

In: a `Problem` (its goal, its device memory) and the cost of the plan with the fixed decisions only. Out:
comparisons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import total_ordering
from math import inf, log
from operator import attrgetter

from toast_cli.compiler.memory_fit import RISK, surely_fitting_bytes
from toast_cli.cost.model import Cost
from toast_cli.plan.decisions import Plan
from toast_cli.plan.goal import PEAK_MEMORY, STEP_TIME, Bound, Figure
from toast_cli.plan.problem import Problem

# Least gain of one more decision, as a fraction: a plan of three decisions that is as fast as one of thirteen within a
# fraction of a percent is the better one to read, to write down and to keep.
PRICE = 0.0005
# Plans closer than this fraction in one figure are equal in it, and the next figure decides.
SAME = 0.005
# How much less the next figure weighs in a reward.
_WEIGHT = 0.01
# Seconds, as a fraction of the reference's step, that are added before a logarithm: a plan may have no communication.
_NEGLIGIBLE = 1e-4
_ATTRIBUTES = {  # of a `Cost`, by figure
    "step_time": "step_seconds",
    "compute": "compute_seconds",
    "communication": "communication_seconds",
    "peak_memory": "peak_bytes",
    "argument_memory": "argument_bytes",
}


@total_ordering
@dataclass(frozen=True, slots=True)
class InWords:
    """Orders plans by their `repr`, to break ties. The `repr` is computed only when a comparison gets that far."""

    plan: Plan

    def __lt__(self, other: InWords) -> bool:
        return repr(self.plan) < repr(other.plan)


CostFigure = Callable[[Cost], float]
Rank = tuple[float | int | InWords, ...]


class Objective:
    """Device memory and the goal's bounds come first, then the figures to minimise; step time breaks ties. The step of
    a plan that may not fit counts as longer by `RISK`. fastest: whether step time is the only figure to minimise.
    """

    def __init__(self, problem: Problem, reference: Cost, *, compiled: bool = False) -> None:
        """compiled: peaks are those of a compiler, so that what is within the limit surely fits."""
        goal, names, mesh = problem.goal, problem.mesh.names, problem.mesh
        self._sure_bytes = mesh.limit_bytes if compiled else surely_fitting_bytes(problem.program, mesh)
        minimised = goal.minimise if STEP_TIME in goal.minimise else (*goal.minimise, STEP_TIME)
        self._minimised = [
            _Minimised.of(self.step_seconds if figure == STEP_TIME else reader(figure, names), figure, reference)
            for figure in minimised
        ]
        bounds = (Bound(PEAK_MEMORY, float(problem.mesh.limit_bytes)), *goal.bounds)
        self._bounds = [(reader(bound.figure, names), bound.limit) for bound in bounds]
        self.fastest = minimised == (STEP_TIME,)

    def step_seconds(self, cost: Cost) -> float:
        """Seconds of a step, longer by `RISK` where the plan may not fit."""
        return cost.step_seconds * (1.0 + RISK) if cost.peak_bytes > self._sure_bytes else cost.step_seconds

    def met(self, cost: Cost) -> bool:
        """Whether all bounds hold."""
        return all(read(cost) <= limit for read, limit in self._bounds)

    def excess(self, cost: Cost) -> float:
        """Sum of the logarithms of the factors by which bounds are exceeded; 0 where all hold."""
        return sum([_over(read(cost), limit) for read, limit in self._bounds])

    def rank(self, plan: Plan, cost: Cost) -> Rank:
        """Rank of a plan, smaller is better; each decision costs `PRICE`, and ties go to a fixed order."""
        excess, length = self.excess(cost), len(plan)
        if excess > 0.0:
            return (1, _rounded(excess + PRICE * length), length, InWords(plan))
        *first, last = self._minimised
        classes = [round(log(figure.read(cost) + figure.least) / SAME) for figure in first]
        return (0, *classes, _rounded(last.read(cost) * (1.0 + PRICE * length)), length, InWords(plan))

    def reward(self, plan: Plan, cost: Cost) -> float:
        """Logarithm of the improvement over the reference, minus the price of decisions and a penalty for excess."""
        gain, weight = -PRICE * len(plan), 1.0
        for figure in self._minimised:
            gain += weight * (figure.reference - log(figure.read(cost) + figure.least))
            weight *= _WEIGHT
        excess = self.excess(cost)
        return gain if excess <= 0.0 else gain - 1.0 - 4.0 * excess


@dataclass(frozen=True, slots=True)
class _Minimised:
    """A figure to minimise. least: added before taking the logarithm; reference: logarithm of the figure of the
    reference plan.
    """

    read: CostFigure
    least: float
    reference: float

    @classmethod
    def of(cls, read: CostFigure, figure: Figure, reference: Cost) -> _Minimised:
        least = max(reference.step_seconds * _NEGLIGIBLE if figure.is_time else 1.0, 1e-12)
        return cls(read, least, log(read(reference) + least))


def reader(figure: Figure, names: tuple[str, ...]) -> CostFigure:
    """A function that reads one figure of a cost, in seconds or bytes; names: [axes] of the mesh.

    Communication over an axis that the mesh lacks is 0.
    """
    if figure.axis:
        place = names.index(figure.axis) if figure.axis in names else None
        return lambda cost: 0.0 if place is None else cost.axis_seconds[place]
    return attrgetter(_ATTRIBUTES[figure.name])


def _over(value: float, limit: float) -> float:
    if value <= limit:
        return 0.0
    return log(value / limit) if limit > 0.0 else 1.0 + log(1.0 + value)


def _rounded(figure: float) -> float:
    return float(f"{figure:.9g}") if figure < inf else inf
