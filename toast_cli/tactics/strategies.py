"""Expert strategies: tactics put together over all mesh axes, as people write them by hand.

Enters: a `Problem`. Leaves: plans by name; any name is what `--strategy` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from toast_cli.errors import UsageError
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.plan.decisions import Plan
from toast_cli.plan.problem import Problem
from toast_cli.tactics.assignments import Expert, Ways, best_way, ways
from toast_cli.tactics.model import data_group, weight_groups
from toast_cli.tactics.wishes import parse_wishes

_T = TypeVar("_T", Plan, Expert)

# Those a report compares a plan with. What only suits some programs is left out where it does not.
BASELINES = ("data-parallel", "fsdp", "megatron", "fsdp+expert", "data-parallel x megatron", "fsdp x megatron")
_WITHOUT_BATCH = ("context", "edge", *BASELINES)
# All that `toast compare` tries.
STRATEGIES = (
    "data-parallel", "zero2", "fsdp", "megatron", "megatron+sequence", "context", "expert", "edge", "spatial",
    "data-parallel+expert", "fsdp+expert", "data-parallel x megatron", "zero2 x megatron", "fsdp x megatron",
    "fsdp x megatron+sequence", "fsdp x context", "fsdp+expert x megatron", "edge x megatron",
)  # fmt: skip
# Pairs of tactics that an expert puts on two parts of a mesh.
PAIRS = tuple(
    f"{one} x {other}"
    for one in ("data-parallel", "fsdp", "context", "spatial")
    for other in ("megatron", "context", "spatial")
    if one != other and (one, other) != ("spatial", "context")
)
# All that a search starts from.
EVERY = tuple(dict.fromkeys((*STRATEGIES, *PAIRS)))


def strategies(problem: Problem) -> dict[str, Plan]:
    """The baselines that make sense here with the axes in the mesh's order, name -> plan."""
    return applicable(problem, baselines(problem))[0]


def baselines(problem: Problem) -> tuple[str, ...]:
    """Names of the strategies to compare plans with."""
    has_batch = any(group.role == "batch" for group in problem.dimensions.groups)
    return BASELINES if has_batch else _WITHOUT_BATCH


def applicable(problem: Problem, names: tuple[str, ...] = STRATEGIES) -> tuple[dict[str, Plan], dict[str, str]]:
    """(name -> plan of the strategies that apply with the axes in the mesh's order, each plan once; name -> why not of
    the others)."""
    return _each_once(problem, names, lambda _, ways: next(iter(ways.values())), lambda plan: plan)


def experts(evaluator: Evaluator, names: tuple[str, ...] = STRATEGIES) -> tuple[dict[str, Expert], dict[str, str]]:
    """The same with the axes that suit each strategy best."""
    return _each_once(
        evaluator.problem, names, lambda name, ways: best_way(evaluator, name, ways), lambda expert: expert.plan
    )


def better(one: Mapping[str, Expert], other: Mapping[str, Expert]) -> dict[str, Expert]:
    """Of two meshes' strategies by name: each where it is better; on the first where it is as good there."""
    return {
        name: min((of[name] for of in (one, other) if name in of), key=lambda it: it.rank) for name in {**one, **other}
    }


def expert(evaluator: Evaluator, name: str) -> Expert:
    """One strategy with the axes that suit it best. Raises UsageError where it does not apply."""
    return best_way(evaluator, name, ways_of(evaluator.problem, name))


def strategy(problem: Problem, name: str) -> Plan:
    """The plan of one strategy, with the axes in the mesh's order where the name has none.

    Raises UsageError where it does not apply, or the mesh has too few axes.
    """
    return next(iter(ways_of(problem, name).values()))


def ways_of(problem: Problem, name: str) -> Ways:
    """The plans of one strategy, see `ways`."""
    if all(size == 1 for size in problem.mesh.sizes):
        raise UsageError("the mesh has one device", where="--strategy")
    return ways(problem, parse_wishes(strategy=name).wishes)


def starting_plans(problem: Problem) -> list[Plan]:
    """What a search may start from: every way of every strategy and product of two that applies."""
    found: list[Plan] = []
    for name in EVERY if problem.decisions.choices else ():
        with suppress(UsageError):
            found += ways_of(problem, name).values()
    return list(dict.fromkeys(found))


def _each_once(
    problem: Problem, names: tuple[str, ...], choose: Callable[[str, Ways], _T], plan_of: Callable[[_T], Plan]
) -> tuple[dict[str, _T], dict[str, str]]:
    """(what is chosen of each strategy's ways where it applies and is not the same as one before; why not of the
    others)."""
    found: dict[str, _T] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            chosen = choose(name, ways_of(problem, name))
        except UsageError as error:
            reasons[name] = error.what
            continue
        plan = plan_of(chosen)
        same = next((other for other, known in found.items() if plan_of(known) == plan), None)
        if same is not None:
            reasons[name] = f"here the same as {same}"
        elif plan:
            found[name] = chosen
    return found, reasons


__all__ = [
    "BASELINES",
    "EVERY",
    "PAIRS",
    "STRATEGIES",
    "applicable",
    "baselines",
    "better",
    "data_group",
    "expert",
    "experts",
    "starting_plans",
    "strategies",
    "strategy",
    "ways_of",
    "weight_groups",
]
