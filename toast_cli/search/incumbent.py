"""The incumbent of a search: evaluates each plan once, keeps the best, and ends the search when its budget is spent;
and the objective by which all plans are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import total_ordering
from heapq import nsmallest
from math import inf, log
from operator import attrgetter

from toast_cli.plan.decisions import PEAK_MEMORY, STEP_TIME, Bound, Figure, Plan
from toast_cli.plan.problem import Problem
from toast_cli.price.cost import Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.memory_fit import RISK, surely_fitting_bytes
from toast_cli.search.moves import DecisionSequence, suited

# best step seconds so far (inf: nothing fits yet), evaluations, elapsed seconds, fraction of the budget used
SearchProgress = Callable[[float, int, float, float], None]


# A search is on a plateau when the last plans, so many, improve the best one by less than a fraction.
PLATEAU, LONG_PLATEAU, GAIN = 500, 3000, 0.01
# A search that may give up does so after this many plans, if the best exceeds the bounds by more than this factor.
PATIENCE, HOPELESS = 600, 1.5


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop. evaluations: plans to evaluate at most; seconds: wall time at most; None for no bound. asked:
    whether the user wants it to end. keep: number of best plans in the result. gives_up: whether to end early where
    hardly any plan will fit (see `PATIENCE`).
    """

    evaluations: int | None = None
    seconds: float | None = None
    asked: Callable[[], bool] = lambda: False
    keep: int = 0
    gives_up: bool = False


@dataclass(frozen=True, slots=True)
class SearchResult:
    """plan: the best found; fits: whether it stays within memory and keeps the goal's bounds (if not, the plan
    that exceeds them least).

    evaluations: distinct plans evaluated. best_found_at: the evaluation that found the plan. stopped: "budget",
    "iterations", "plateau", "interrupted" or "hopeless". seen: the best plans evaluated, `Budget.keep` of them.
    fastest: the plan that the search found, on which problem and at what cost, if another plan was preferred (see
    `tactics.strategies`).
    strategy: the known strategy that was preferred, if it is one.
    """

    plan: Plan
    cost: Cost
    fits: bool
    evaluations: int
    best_found_at: int
    seconds: float
    stopped: str
    seen: tuple[Plan, ...] = ()
    fastest: tuple[Problem, Plan, Cost] | None = None
    strategy: str = ""


class OutOfBudget(Exception):  # noqa: N818 - not an error: it ends a search from within
    """Raised by `Incumbent.look` when the budget is spent; carries why."""


class Incumbent:
    """Evaluates plans once each, keeps the best, and ends the search when the budget is spent.

    Infeasible plans lose against feasible ones; among infeasible ones less excess wins, so a search that cannot fit
    anything returns the plan of least memory. Otherwise the goal decides (see `Objective`).

    Quick costs evaluate memory at selected moments only. So a plan that would be the best gets its exact cost, and if
    that exceeds a bound after all, the moment of its peak joins the selected ones.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        budget: Budget,
        starts: Sequence[Plan] = (),
        progress: SearchProgress | None = None,
    ) -> None:
        """Evaluates the plan with the fixed decisions only, whatever the budget.

        Args:
            starts: plans to try first, such as known strategies; decisions that do not suit the problem are dropped.
        """
        evaluator.unlearn()  # the result must not depend on earlier searches
        self.evaluator, self.problem = evaluator, evaluator.problem
        self.starts = tuple(dict.fromkeys(suited(self.problem, plan) for plan in starts))
        self._budget, self._progress = budget, progress
        self._start = time.monotonic()
        self.best: Plan = self.problem.fixed
        self.reference = evaluator.cost(self.best)
        self.objective = Objective(self.problem, self.reference)
        self.best_cost = self._exact(self.best, self.reference)
        self._best_rank = self.objective.rank(self.best, self.best_cost)
        self.seen: dict[Plan, Cost] = {self.best: self.best_cost}
        self.best_found_at = 0
        self._trail = [(0, self.best_cost)]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def allows(self, evaluations: int) -> bool:
        """Whether the budget allows more than so many evaluations."""
        return self._budget.evaluations is None or self._budget.evaluations > evaluations

    @property
    def used(self) -> float:
        """Fraction of the budget spent, 0 to 1."""
        parts = [0.0]
        if self._budget.evaluations:
            parts.append(len(self.seen) / self._budget.evaluations)
        if self._budget.seconds:
            parts.append(self.seconds / self._budget.seconds)
        return min(1.0, max(parts))

    def look(self, plan: Plan) -> Cost:
        """Cost of a plan in canonical order; raises OutOfBudget instead of evaluating beyond the budget."""
        cost = self.seen.get(plan)
        if cost is None:
            count = len(self.seen)
            if self._budget.evaluations is not None and count >= self._budget.evaluations:
                raise OutOfBudget("iterations")
            if self._budget.gives_up and count == PATIENCE and self.objective.excess(self.best_cost) > log(HOPELESS):
                raise OutOfBudget("hopeless")
            if self._budget.asked():
                raise OutOfBudget("interrupted")
            if self._budget.seconds is not None and self.seconds >= self._budget.seconds:
                raise OutOfBudget("budget")
            cost = self.evaluator.cost(plan, self._below())
            rank = self.objective.rank(plan, cost)
            if rank < self._best_rank:
                cost = self._exact(plan, cost)
                rank = self.objective.rank(plan, cost)
            self.seen[plan] = cost
            if rank < self._best_rank:
                self._best_rank, self.best, self.best_cost, self.best_found_at = rank, plan, cost, count
                self._trail.append((count, cost))
            if self._progress and count % 32 == 0:
                self.report()
        return cost

    def _below(self) -> float:
        """Seconds of a step above which no plan can be the best; 0 where step time does not decide."""
        if self.objective.met(self.best_cost):
            return self.objective.step_seconds(self.best_cost) if self.objective.fastest else inf
        return inf if any(bound.figure == STEP_TIME for bound in self.problem.goal.bounds) else 0.0

    def _exact(self, plan: Plan, cost: Cost) -> Cost:
        """The exact cost of a plan, unless its quick cost exceeds the bounds already."""
        if not self.objective.met(cost):
            return cost
        exact = self.evaluator.exact_cost(plan)
        if not self.objective.met(exact) or self.objective.step_seconds(exact) > self.objective.step_seconds(cost):
            self.evaluator.learn(plan)
        return exact

    def is_flat(self, begun: int, last: int) -> bool:
        """Whether the `last` evaluations improved the best plan by less than `GAIN`. begun: evaluations before those
        that count."""
        before = len(self.seen) - last
        if before < begun:
            return False
        earlier_cost = [cost for count, cost in self._trail if count <= before][-1]
        best, earlier = (self.objective.reward((), cost) for cost in (self.best_cost, earlier_cost))
        return best - earlier < GAIN

    def extend(self, plan: Plan, move: DecisionSequence) -> Plan:
        """The plan with the move's decisions appended, in canonical order."""
        return self.problem.canonical((*plan, *move))

    def worth(self, plan: Plan) -> float:
        """The reward of a plan in canonical order; raises OutOfBudget as `look` does."""
        return self.objective.reward(plan, self.look(plan))

    def report(self) -> None:
        if self._progress:
            best = self.best_cost.step_seconds if self.objective.met(self.best_cost) else inf
            self._progress(best, len(self.seen), self.seconds, self.used)

    def _simplify(self) -> None:
        """Drops decisions that change nothing, as far as the budget allows."""
        improved = True
        while improved:
            before = self.best
            for k in range(len(self.problem.fixed), len(before)):
                self.look(self.problem.canonical((*before[:k], *before[k + 1 :])))
                if self.best != before:
                    break
            improved = self.best != before

    def result(self, stopped: str) -> SearchResult:
        self.report()
        with suppress(OutOfBudget, KeyboardInterrupt):
            self._simplify()
        kept = nsmallest(self._budget.keep, self.seen, key=lambda plan: self.objective.rank(plan, self.seen[plan]))
        return SearchResult(
            self.best,
            self.best_cost,
            self.objective.met(self.best_cost),
            len(self.seen),
            self.best_found_at,
            self.seconds,
            stopped,
            tuple(kept),
        )


# ---------------------------------------------------------------- the objective
# The objective: ranks plans, and gives them rewards, by the goal of a problem. All searches compare plans by it.

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
        """Whether the cost is within device memory and the goal's bounds."""
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
