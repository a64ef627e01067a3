"""Known strategies: the combinations of tactics over all mesh axes that people use (FSDP, Megatron, …), and the
preference for one over a plan that is predicted to be only slightly faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import isclose
from typing import TypeVar

from toast_cli.base.errors import UsageError
from toast_cli.plan.decision_space import decision_space
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.problem import Problem
from toast_cli.price.cost import Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.memory_fit import surely_fitting_bytes
from toast_cli.program.model import once
from toast_cli.search.incumbent import Objective, SearchResult
from toast_cli.tactics.requests import PlansByAxes, PricedStrategy, best_assignment, parse_tactics, plans_by_axes

_T = TypeVar("_T", Plan, PricedStrategy)
# What a search found for a program on one mesh, priced.
PricedResult = tuple[Evaluator, SearchResult]

# Strategies that a report compares a plan with, as far as they apply.
BASELINES = ("data-parallel", "fsdp", "megatron", "fsdp+expert", "data-parallel x megatron", "fsdp x megatron")
_WITHOUT_BATCH = ("context", "edge", *BASELINES)
# Strategies that `toast compare` tries.
STRATEGIES = (
    "data-parallel", "zero2", "fsdp", "megatron", "megatron+sequence", "context", "expert", "edge", "spatial",
    "data-parallel+expert", "fsdp+expert", "data-parallel x megatron", "zero2 x megatron", "fsdp x megatron",
    "fsdp x megatron+sequence", "fsdp x context", "fsdp+expert x megatron", "edge x megatron",
)  # fmt: skip
# Pairs of tactics on two parts of a mesh.
PAIRS = tuple(
    f"{first} x {second}"
    for first in ("data-parallel", "fsdp", "context", "spatial")
    for second in ("megatron", "context", "spatial")
    if first != second and (first, second) != ("spatial", "context")
)
# Strategies that a search starts from.
EVERY = tuple(dict.fromkeys((*STRATEGIES, *PAIRS)))


def strategies(problem: Problem) -> dict[str, Plan]:
    """Name -> plan of the baselines that apply, on all axes."""
    return applicable(problem, baselines(problem))[0]


def baselines(problem: Problem) -> tuple[str, ...]:
    """Names of the strategies to compare plans with."""
    has_batch = any(group.role == "batch" for group in problem.dimensions.groups)
    return BASELINES if has_batch else _WITHOUT_BATCH


def applicable(problem: Problem, names: tuple[str, ...] = STRATEGIES) -> tuple[dict[str, Plan], dict[str, str]]:
    """(name -> plan of the strategies that apply, on all axes, each plan once; name -> reason for the others)."""
    return _each_once(problem, names, lambda _, plans: next(iter(plans.values())), lambda plan: plan)


def priced_strategies(
    evaluator: Evaluator, names: tuple[str, ...] = STRATEGIES
) -> tuple[dict[str, PricedStrategy], dict[str, str]]:
    """The same with the best axes for each strategy."""
    return _each_once(
        evaluator.problem,
        names,
        lambda name, plans: best_assignment(evaluator, name, plans),
        lambda priced: priced.plan,
    )


def better(first: Mapping[str, PricedStrategy], second: Mapping[str, PricedStrategy]) -> dict[str, PricedStrategy]:
    """Each strategy on the better one of two meshes; on the first if equal."""
    return {**first, **{n: priced for n, priced in second.items() if n not in first or priced.rank < first[n].rank}}


def priced_strategy(evaluator: Evaluator, name: str) -> PricedStrategy:
    """One strategy with its best axes. Raises UsageError where it does not apply."""
    return best_assignment(evaluator, name, plans_of_strategy(evaluator.problem, name))


def strategy(problem: Problem, name: str) -> Plan:
    """The plan of one strategy on all axes, the first of its assignments where the name has none.

    Raises UsageError where it does not apply, or the mesh has too few axes.
    """
    return next(iter(plans_of_strategy(problem, name).values()))


def plans_of_strategy(problem: Problem, name: str) -> PlansByAxes:
    """The plans of one strategy, see `plans_by_axes`. Memoised."""
    plans = _plans_of_strategy(problem, name)
    if isinstance(plans, UsageError):
        raise plans.with_traceback(None)  # the same one each time
    return plans


@once
def _plans_of_strategy(problem: Problem, name: str) -> PlansByAxes | UsageError:
    if all(size == 1 for size in problem.mesh.sizes):
        return UsageError("the mesh has one device", where="--strategy")
    try:
        return plans_by_axes(problem, parse_tactics(strategy=name).requests)
    except UsageError as error:
        return error


def starting_plans(problem: Problem) -> list[Plan]:
    """The starting plans of a search: every assignment of axes of every strategy and pair of `EVERY` that applies."""
    plans: list[Plan] = []
    for name in EVERY if decision_space(problem).choices else ():
        with suppress(UsageError):
            plans += plans_of_strategy(problem, name).values()
    return list(dict.fromkeys(plans))


def _each_once(
    problem: Problem, names: tuple[str, ...], choose: Callable[[str, PlansByAxes], _T], plan_of: Callable[[_T], Plan]
) -> tuple[dict[str, _T], dict[str, str]]:
    """(name -> choice among a strategy's plans, if it applies and differs from earlier ones; name -> reason for the
    others)."""
    choices: dict[str, _T] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            chosen = choose(name, plans_of_strategy(problem, name))
        except UsageError as error:
            reasons[name] = error.what
            continue
        plan = plan_of(chosen)
        same = next((other for other, choice in choices.items() if plan_of(choice) == plan), None)
        if same is not None:
            reasons[name] = f"here the same as {same}"
        elif plan:
            choices[name] = chosen
    return choices, reasons


# ---------------------------------------------------------------- preference for a known strategy
# Prefers a known strategy, or a plan of fewer decisions, over a plan that is predicted to be only slightly faster.
#
# The prediction error exceeds these gains, while a known strategy is well tested in compilers, and a short plan is easy
# to check.

# Tolerated slowdown of a step, as a fraction.
MARGIN = 0.05
# A decision that changes step and peak memory by no more than this fraction has no effect.
NO_EFFECT = 0.001


def preferred(best: PricedResult, elsewhere: Iterable[PricedResult] = ()) -> PricedResult:
    """What the search found, with the known strategy, or the shorter plan, that is nearly as fast; `fastest` then holds
    the plan of the search. Decisions that change nothing are left out.

    Of several known strategies, one over the fewest axes; of these, the one of fewest decisions that no other one beats
    in step, also if nothing overlaps, and in memory. Where there is none, the plan of fewest decisions on any mesh
    shape.

    Args:
        elsewhere: the same program on other mesh shapes.
    """
    evaluator, result = best
    if not result.fits:
        return best
    meshes = [(searched, _Tolerance(searched[0])) for searched in (best, *elsewhere)]  # bounds on axes are a mesh's
    strategies = [
        (priced, searched)
        for searched, tolerance in meshes
        for priced in priced_strategies(searched[0])[0].values()
        if _adds_to(searched[0].problem, priced.plan) and tolerance.allows(priced.cost, result.cost)
    ]
    if strategies:
        simplest, (evaluator, chosen) = _simplest(strategies)
        plan, name = simplest.plan, simplest.label
    else:
        near = [entry for entry in meshes if entry[1].allows(entry[0][1].cost, result.cost)]
        shorter = [(shortened(s[0], s[1].plan, result.cost, tolerance), s) for s, tolerance in near]
        plan, (evaluator, chosen) = min(shorter, key=lambda entry: len(entry[0]), default=(result.plan, best))
        name = ""
    plan = without_idle(evaluator, plan)
    cost = evaluator.exact_cost(plan)
    if (chosen is result and plan == result.plan) or not _Tolerance(evaluator).allows(cost, result.cost):
        return best
    fastest = best[0].problem, result.plan, result.cost
    return evaluator, replace(chosen, plan=plan, cost=cost, strategy=name, fastest=fastest)


def _adds_to(problem: Problem, plan: Plan) -> bool:
    """Whether a plan begins with the problem's fixed decisions, and what it adds takes none of these back."""
    fixed = len(problem.fixed)
    return plan[:fixed] == problem.fixed and all(map(decision_space(problem).offers, plan[fixed:]))


def _simplest(strategies: list[tuple[PricedStrategy, PricedResult]]) -> tuple[PricedStrategy, PricedResult]:
    def axes(priced: PricedStrategy) -> int:
        return priced.name.count(" x ")

    def figures(cost: Cost) -> tuple[float, float, float]:
        return cost.step_seconds, cost.most_seconds, cost.peak_bytes

    def is_beaten(cost: Cost) -> bool:
        pairs = (zip(figures(priced.cost), figures(cost), strict=True) for priced, _ in plain)
        return any(all(better < (1 - NO_EFFECT) * own for better, own in each) for each in pairs)

    fewest = min(axes(priced) for priced, _ in strategies)
    plain = [entry for entry in strategies if axes(entry[0]) == fewest]
    unbeaten = [entry for entry in plain if not is_beaten(entry[0].cost)]
    return min(unbeaten, key=lambda entry: (len(entry[0].plan), entry[0].cost.step_seconds))


def with_batch_over_data(evaluator: Evaluator, result: SearchResult) -> SearchResult:
    """The plan found with two axes exchanged, so that the axis called data splits the batch, if nobody named axes, both
    are as large, and the plan is no worse."""
    problem, plan, mesh = evaluator.problem, result.plan, evaluator.problem.mesh
    groups = problem.dimensions.groups
    batch = next((d.axis for d in plan if isinstance(d, Shard) and groups[d.group].role == "batch"), None)
    if batch is None or problem.names_axes or result.strategy or "data" not in mesh.names:
        return result
    data = mesh.names.index("data")
    if mesh.sizes[batch] != mesh.sizes[data]:
        return result
    turned = {batch: data, data: batch}
    exchanged = problem.canonical(tuple(d._replace(axis=turned.get(d.axis, d.axis)) for d in plan))
    cost = evaluator.exact_cost(exchanged)
    same = cost.step_seconds <= (1 + NO_EFFECT) * result.cost.step_seconds
    return replace(result, plan=exchanged, cost=cost) if same and cost.peak_bytes <= result.cost.peak_bytes else result


class _Tolerance:
    """Accepts plans that are nearly as good as another one: they keep the goal's bounds, need no more memory or surely
    fit, and are slower by no more than a margin. The step of a plan that may not fit counts as longer (see
    `Objective`)."""

    def __init__(self, evaluator: Evaluator) -> None:
        problem = evaluator.problem
        self._objective = Objective(problem, evaluator.cost(problem.fixed))
        self._sure_bytes = surely_fitting_bytes(problem.program, problem.mesh)
        self.step_seconds = self._objective.step_seconds

    def allows(self, cost: Cost, other: Cost) -> bool:
        fast = self.step_seconds(cost) <= (1 + MARGIN) * self.step_seconds(other)
        return fast and cost.peak_bytes <= max(other.peak_bytes, self._sure_bytes) and self._objective.met(cost)


def shortened(evaluator: Evaluator, plan: Plan, fastest: Cost, tolerance: _Tolerance) -> Plan:
    """The plan, without decisions while it stays nearly as good as the fastest one; drops those that gain least
    first."""
    first = len(evaluator.problem.fixed)
    while True:
        without = [evaluator.problem.canonical((*plan[:k], *plan[k + 1 :])) for k in range(first, len(plan))]
        costs = [(evaluator.cost(shorter), shorter) for shorter in without if len(shorter) < len(plan)]
        near = [(cost.step_seconds, shorter) for cost, shorter in costs if tolerance.allows(cost, fastest)]
        if not near:
            return plan
        plan = min(near, key=lambda entry: entry[0])[1]


def without_idle(evaluator: Evaluator, plan: Plan) -> Plan:
    """The plan without decisions that have no effect on its cost, such as one that shards only small tables."""
    cost, place = evaluator.exact_cost(plan), len(evaluator.problem.fixed)
    while place < len(plan):
        shorter = evaluator.problem.canonical((*plan[:place], *plan[place + 1 :]))
        other = evaluator.exact_cost(shorter)
        same_step = isclose(other.step_seconds, cost.step_seconds, rel_tol=NO_EFFECT)
        if same_step and isclose(other.peak_bytes, cost.peak_bytes, rel_tol=NO_EFFECT) and len(shorter) < len(plan):
            plan = shorter
        else:
            place += 1
    return plan
