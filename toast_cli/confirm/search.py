"""Confirms what a search has found: candidates, compiler and the corrected searches put together.

Enters: the program, the evaluator and the result of its search, and the specification. Leaves: a `Confirmation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from toast_cli.confirm.candidates import candidates, experts, search_corrected
from toast_cli.confirm.compilers import AheadOfTime, Compiler, Partitioner
from toast_cli.confirm.model import Confirmation
from toast_cli.confirm.run import NO_LIMITS, Limits, Tell, confirm
from toast_cli.errors import UsageError
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.frontend import Source
from toast_cli.hardware import Mesh, Spec
from toast_cli.plan.decisions import Plan
from toast_cli.plan.lower import lower
from toast_cli.verify.ahead import CompilationTarget, target_of

COMPILERS = ("tpu", "gpu", "cpu")


def confirm_found(
    source: Source,
    evaluator: Evaluator,
    found: Sequence[Plan],
    compiler: Compiler,
    *,
    named: Mapping[str, Plan] | None = None,
    seed: int = 0,
    iterations: int | None = None,
    search_again: bool = True,
    screened: bool = True,
    limits: Limits = NO_LIMITS,
    tell: Tell | None = None,
) -> Confirmation:
    """Has the plans found, and experts' strategies, compiled; searches again with a corrected model unless
    told not to.

    Args:
        named: strategies; None for those that a report compares with, and as many others as there are plans found.
        screened: whether XLA's partitioner is asked first.
    """
    from toast_cli.emit import write  # heavy, and most runs confirm nothing

    problem = evaluator.problem
    listed = candidates(evaluator, found, experts(evaluator, found) if named is None else named)

    def emit(plan: Plan) -> bytes:
        return write(source, lower(problem, plan), "bytecode", "minimal").content

    again = search_corrected(evaluator, seed, iterations, [one.plan for one in listed]) if search_again else None
    screen = (
        None
        if isinstance(compiler, Partitioner) or not screened
        else Partitioner(problem.mesh, partitioning_target(compiler))
    )
    return confirm(evaluator, listed, emit, compiler, screen, again, limits, tell)


def partitioning_target(compiler: Compiler) -> CompilationTarget | None:
    """Whose partitioner screens for a compiler: XLA:TPU's is its own, XLA:GPU's that of virtual CPU devices."""
    asked = compiler.target if isinstance(compiler, AheadOfTime) else None
    return asked if asked and asked.platform == "tpu" else None


def compiler_for(spec: Spec, name: str | None) -> Callable[[Mesh], Compiler]:
    """Makes the compiler to ask, once the mesh is known; the chip's own where `name` is None.

    Raises `MissingExtraError` where its package is not installed, `UsageError` where it makes no programs for this
    chip.
    """
    platform = spec.chip.platform if name is None else name
    if platform not in COMPILERS:
        raise UsageError(
            f"unknown compiler {platform!r}", where="--confirm-with", hint=f"choose from {', '.join(COMPILERS)}"
        )
    if platform == "cpu":
        return Partitioner
    if platform != spec.chip.platform:
        raise UsageError(
            f"the compiler for {platform} makes no programs for {spec.chip.name}",
            where="--confirm-with",
            hint=f"use --confirm-with {spec.chip.platform}, or cpu",
        )
    target = target_of(spec)
    return lambda mesh: AheadOfTime(mesh, target)
