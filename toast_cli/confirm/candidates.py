"""Selects the plans to compile: the best that a search found, and the known strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from toast_cli.alternatives import different_plans, name_of, simplest
from toast_cli.compiler.memory_fit import surely_fitting_bytes
from toast_cli.confirm.model import Candidate
from toast_cli.cost.corrections import Corrections
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.plan.decisions import Plan
from toast_cli.search.incumbent import SearchResult
from toast_cli.search.run import Settings, run_search
from toast_cli.tactics import strategies
from toast_cli.tactics.strategies import EVERY, baselines, priced_strategies

# A strategy is not compiled if its predicted peak exceeds the memory by more than the model's error.
_SURELY_TOO_LARGE = 1.5


def candidates(
    evaluator: Evaluator, found: Sequence[Plan], named: Mapping[str, Plan] = MappingProxyType({})
) -> list[Candidate]:
    """The plans found, the best first, then every one of the strategies (`named`) that may fit."""
    limit = evaluator.problem.mesh.limit_bytes
    listed = [
        Candidate(name_of(place), plan, evaluator.exact_cost(plan, learn=False)) for place, plan in enumerate(found)
    ]
    for name, plan in named.items():
        cost = evaluator.exact_cost(plan, learn=False)
        if cost.peak_bytes <= _SURELY_TOO_LARGE * limit:
            listed.append(Candidate(name, plan, cost))
    return listed


def safer_plans(evaluator: Evaluator, result: SearchResult) -> list[Plan]:
    """Plans to compile that need less memory than the chosen one: the fastest that fits despite the prediction's error,
    and the one with the lowest peak."""
    problem = evaluator.problem
    plans = dict.fromkeys((*result.seen, *strategies(problem).values()))
    known = {plan: evaluator.exact_cost(plan, learn=False) for plan in plans}
    sure = surely_fitting_bytes(problem.program, problem.mesh)
    smaller = [plan for plan, cost in known.items() if cost.peak_bytes < result.cost.peak_bytes]
    safe = [plan for plan in smaller if known[plan].peak_bytes <= sure]
    fastest = sorted(safe, key=lambda plan: known[plan].step_seconds)[:1]
    return list(dict.fromkeys([*fastest, *sorted(smaller, key=lambda plan: known[plan].peak_bytes)[:1]]))


def known_strategies(evaluator: Evaluator, found: Sequence[Plan]) -> dict[str, Plan]:
    """Strategies by name: those that a report compares with, and the best other strategies and products of two that
    differ in meaning from these and from the plans found, as many as there are plans found."""
    problem = evaluator.problem
    usual = {name: one.plan for name, one in priced_strategies(evaluator, baselines(problem))[0].items()}
    others = {name: one.plan for name, one in priced_strategies(evaluator, EVERY)[0].items()}
    names = {simplest(evaluator, plan): name for name, plan in others.items()}
    further = different_plans(evaluator, [*found, *usual.values()], names, len(found))
    return {**usual, **{names[plan]: plan for plan in further}}


def search_corrected(
    evaluator: Evaluator, seed: int, iterations: int | None, starts: Sequence[Plan]
) -> Callable[[Corrections], list[Plan]]:
    """A function that searches again with a corrected model, from the same seed and the plans known so far."""

    def again(corrections: Corrections) -> list[Plan]:
        problem = evaluator.problem
        corrected = Evaluator(problem, strategies(problem).values(), evaluator, corrections)
        return [run_search(corrected, Settings(seed=seed, evaluations=iterations), list(starts)).plan]

    return again
