"""Compiles the best plans that the search found, and takes the one that the compiler reports as best.

In: a `Variant` with its plans, the function that makes the compiler for a mesh, and the `Request`. Out: the
`Variant` with the plan to take, and a `Confirmation`: the compiler's figures for each plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

from toast_cli.confirm.candidates import candidates, known_strategies, safer_plans, search_corrected
from toast_cli.confirm.compilers import Compiler
from toast_cli.confirm.model import Confirmation
from toast_cli.confirm.run import Limits, Tell, compiled_cost, joined
from toast_cli.confirm.search import compiler_for, confirmer
from toast_cli.errors import ToastError
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.frontend import Source
from toast_cli.hardware import Mesh, Spec, load_spec
from toast_cli.plan.decisions import Plan
from toast_cli.request import Ask, Request
from toast_cli.variants import Variant

CompilerOf = Callable[[Mesh], Compiler]


def compiler_to_ask(spec: Spec, request: Request) -> CompilerOf | None:
    """The chip's compiler, or None if it must not be asked or is not installed. Raises `ToastError` if the user
    requires it (`Ask.always`) and it is not installed."""
    if request.ask == Ask.never:
        return None
    try:
        return compiler_for(spec, None)
    except ToastError:
        if request.ask == Ask.always:
            raise
        return None


def is_asked(request: Request, variant: Variant) -> bool:
    """True if the compiler must check a plan's memory because the predicted peak is too close to the limit."""
    hopeless = variant.result.cost.peak_bytes > 2 * variant.evaluator.problem.mesh.limit_bytes
    return request.ask == Ask.always or not (variant.surely_fits or hopeless)


def choose_by_memory(
    variant: Variant, compiler_of: CompilerOf, request: Request, tell: Tell | None
) -> tuple[Variant, Confirmation]:
    """Compiles the plan to learn its peak memory; if it does not fit, compiles plans that need less. Keeps the plan if
    none of them fits."""
    evaluator, result = variant.evaluator, variant.result
    plans = [result.plan, *(safer_plans(evaluator, result) if _is_free(request) else ())]
    compiler, limits = compiler_of(evaluator.problem.mesh), Limits(request.confirm_seconds)
    asked = confirmer(variant.source, evaluator, compiler, limits, tell, screened=False)
    answer = asked.confirm(candidates(evaluator, plans))
    return _with_plan(variant, answer), answer


def choose_by_compiler(
    variant: Variant,
    found: Sequence[Plan],
    others: Sequence[Variant],
    compiler_of: CompilerOf,
    request: Request,
    tell: Tell | None,
) -> tuple[Variant, Confirmation]:
    """Compiles the best plans `found` of a variant and the best plan of each other variant. Returns the variant with
    the best compiled plan. A plan that the user has fixed is compiled as it is."""
    reference = variant.evaluator.cost(())
    answers: list[Confirmation] = []
    rewards: list[float] = []
    for one in (variant, *others):
        evaluator, again = one.evaluator, None
        if one is variant:
            listed = candidates(evaluator, found, known_strategies(evaluator, found))
            if _is_free(request):
                starts = [candidate.plan for candidate in listed]
                again = search_corrected(evaluator, request.seed, request.iterations, starts)
        else:
            listed = candidates(evaluator, [one.result.plan])
        spent = sum(answer.seconds for answer in answers)
        limits = Limits(None if request.confirm_seconds is None else max(0.0, request.confirm_seconds - spent))
        asked = confirmer(one.source, evaluator, compiler_of(evaluator.problem.mesh), limits, tell)
        answer = asked.confirm(listed, again)
        answers.append(answer)
        row = answer.row
        rewards.append(-inf if row is None else one.reward(row.candidate.plan, compiled_cost(row), reference))
    taken = rewards.index(max(rewards))
    names = ["rewritten" if one.source.program.parted else "as written" for one in (variant, *others)]
    return _with_plan((variant, *others)[taken], answers[taken]), joined(answers, names, taken)


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
    asked = confirmer(source, evaluator, compiler, Limits(request.confirm_seconds), tell)
    return asked.confirm(candidates(evaluator, plans, named))


def _is_free(request: Request) -> bool:
    """True if the user fixes neither the plan nor the strategy."""
    return request.strategy is None and (request.plan is None or request.complete)


def _with_plan(variant: Variant, answer: Confirmation) -> Variant:
    """The variant with the best plan by the compiler's figures; unchanged if the compiler accepts none."""
    if answer.taken is None:
        return variant
    plan = answer.taken.plan
    return replace(variant, result=replace(variant.result, plan=plan, cost=variant.evaluator.exact_cost(plan)))
