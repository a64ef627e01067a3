"""Compiles the best plans that the search found, and takes the one that the compiler reports as best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType

from toast_cli.ask_xla.compile import target_of
from toast_cli.ask_xla.confirm import (
    Compiler,
    Confirmation,
    Confirmer,
    PlanToCompile,
    Tell,
    compiled_cost,
    joined,
)
from toast_cli.candidates.variants import Variant
from toast_cli.frontend import Source
from toast_cli.hardware import Mesh, Spec, load_spec
from toast_cli.plan.decisions import Plan
from toast_cli.plan.lower import lower
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.memory_fit import surely_fitting_bytes
from toast_cli.request import Request
from toast_cli.search.alternatives import different_plans, name_of, simplest
from toast_cli.search.incumbent import SearchResult
from toast_cli.tactics import strategies
from toast_cli.tactics.strategies import EVERY, baselines, priced_strategies

CompilerOf = Callable[[Mesh], Compiler]


def judged(
    variant: Variant,
    plans: Sequence[Plan],
    others: Sequence[Variant],
    compiler_of: CompilerOf,
    request: Request,
    tell: Tell | None,
) -> tuple[Variant, Confirmation]:
    """The variant with the plan that the compiler finds best, and its answers; unchanged if it accepts none.

    `--confirm 1` compiles the best of `plans`, and plans that need less memory. With a larger number all `plans`, known
    strategies, and the best plan of each other variant are compiled. A plan that the user has fixed is compiled as it
    is.
    """
    is_free = request.strategy is None and (request.plan is None or request.complete)
    chooses = request.confirm > 1
    reference = variant.evaluator.cost(())
    answers: list[Confirmation] = []
    rewards: list[float] = []
    variants = (variant, *others) if chooses else (variant,)
    for v in variants:
        evaluator = v.evaluator
        if v is not variant:
            listed = candidates(evaluator, [v.result.plan])
        elif not chooses:
            listed = candidates(evaluator, [plans[0], *(safer_plans(evaluator, v.result) if is_free else ())])
        else:
            best_plans = plans[: request.confirm]
            listed = candidates(evaluator, best_plans, known_strategies(evaluator, best_plans))
        spent = sum(answer.seconds for answer in answers)
        seconds = inf if request.confirm_seconds is None else max(0.0, request.confirm_seconds - spent)
        compilation = confirmer(v.source, evaluator, compiler_of(evaluator.problem.mesh), seconds, tell, defers=chooses)
        answer = compilation.confirm(listed)
        answers.append(answer)
        row = answer.row
        rewards.append(-inf if row is None else v.reward(row.candidate.plan, compiled_cost(row), reference))
    winner = rewards.index(max(rewards))
    names = ["rewritten" if v.source.program.parted else "as written" for v in variants]
    best, answer = variants[winner], answers[winner]
    if answer.taken is not None:
        plan = answer.taken.plan
        best = replace(best, result=replace(best.result, plan=plan, cost=best.evaluator.exact_cost(plan)))
    return best, joined(answers, names, winner)


def compiler_for(spec: Spec, name: str | None) -> CompilerOf:
    """The compiler for a mesh: the chip's own, or "cpu" for XLA's partitioner alone. Raises as `target_of` does."""
    target = target_of(spec, name, "--confirm-with")
    return lambda mesh: Compiler(mesh, target)


def compile_plans(
    source: Source,
    evaluator: Evaluator,
    plans: Sequence[Plan],
    named: Mapping[str, Plan],
    request: Request,
    tell: Tell | None = None,
) -> Confirmation:
    """Compiles plans and named strategies. It neither searches nor chooses."""
    compiler = compiler_for(load_spec(request.mesh), request.confirm_with)(evaluator.problem.mesh)
    compilation = confirmer(source, evaluator, compiler, request.confirm_seconds or inf, tell)
    return compilation.confirm(candidates(evaluator, plans, named))


# ---------------------------------------------------------------- candidates
# Selects the plans to compile: the best that a search found, and the known strategies.

# A strategy is not compiled if its predicted peak exceeds the memory by more than the model's error.
_SURELY_TOO_LARGE = 1.5


def candidates(
    evaluator: Evaluator, plans: Sequence[Plan], named: Mapping[str, Plan] = MappingProxyType({})
) -> list[PlanToCompile]:
    """The plans, the best first, then every one of the strategies (`named`) that may fit."""
    limit = evaluator.problem.mesh.limit_bytes
    listed = [PlanToCompile(name_of(place), plan, evaluator.exact_cost(plan)) for place, plan in enumerate(plans)]
    for name, plan in named.items():
        cost = evaluator.exact_cost(plan)
        if cost.peak_bytes <= _SURELY_TOO_LARGE * limit:
            listed.append(PlanToCompile(name, plan, cost))
    return listed


def safer_plans(evaluator: Evaluator, result: SearchResult) -> list[Plan]:
    """Plans to compile that need less memory than the chosen one: the fastest that fits despite the prediction's error,
    and the one with the lowest peak."""
    problem = evaluator.problem
    plans = dict.fromkeys((*result.seen, *strategies(problem).values()))
    costs = {plan: evaluator.exact_cost(plan) for plan in plans}
    sure = surely_fitting_bytes(problem.program, problem.mesh)
    smaller = [plan for plan, cost in costs.items() if cost.peak_bytes < result.cost.peak_bytes]
    safe = [plan for plan in smaller if costs[plan].peak_bytes <= sure]
    fastest = sorted(safe, key=lambda plan: costs[plan].step_seconds)[:1]
    return list(dict.fromkeys([*fastest, *sorted(smaller, key=lambda plan: costs[plan].peak_bytes)[:1]]))


def known_strategies(evaluator: Evaluator, plans: Sequence[Plan]) -> dict[str, Plan]:
    """Strategies by name: those that a report compares with, and the best other strategies and products of two that
    differ in meaning from these and from the plans found, as many as there are plans found."""
    problem = evaluator.problem
    usual = {name: s.plan for name, s in priced_strategies(evaluator, baselines(problem))[0].items()}
    others = {name: s.plan for name, s in priced_strategies(evaluator, EVERY)[0].items()}
    names = {simplest(evaluator, plan): name for name, plan in others.items()}
    further = different_plans(evaluator, [*plans, *usual.values()], names, len(plans))
    return {**usual, **{names[plan]: plan for plan in further}}


def confirmer(
    source: Source,
    evaluator: Evaluator,
    compiler: Compiler,
    seconds: float = inf,
    tell: Tell | None = None,
    defers: bool = True,
) -> Confirmer:
    """A `Confirmer` for a program's plans. defers: whether plans that are clearly slower wait; none does for XLA's
    partitioner alone, which takes seconds."""
    from toast_cli.emit import write  # heavy, and most runs confirm nothing

    def emit(plan: Plan) -> bytes:
        return write(source, lower(evaluator.problem, plan), "bytecode", "minimal").content

    return Confirmer(evaluator, emit, compiler, defers and compiler.knows_memory, seconds, tell)
