"""Chooses the compiler for a program's plans and writes the plans for it.

In: the specification; the program and its evaluator. Out: a `Compiler`; a `Confirmer`.
"""

from __future__ import annotations

from collections.abc import Callable

from toast_cli.confirm.compilers import AheadOfTime, Compiler, Partitioner
from toast_cli.confirm.run import NO_LIMITS, Confirmer, Limits, Tell
from toast_cli.errors import UsageError
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.frontend import Source
from toast_cli.hardware import Mesh, Spec
from toast_cli.plan.decisions import Plan
from toast_cli.plan.lower import lower
from toast_cli.verify.ahead import CompilationTarget, target_of

COMPILERS = ("tpu", "gpu", "cpu")


def confirmer(
    source: Source,
    evaluator: Evaluator,
    compiler: Compiler,
    limits: Limits = NO_LIMITS,
    tell: Tell | None = None,
    screened: bool = True,
) -> Confirmer:
    """A `Confirmer` for a program's plans. screened: True to run XLA's partitioner first."""
    from toast_cli.emit import write  # heavy, and most runs confirm nothing

    problem = evaluator.problem

    def emit(plan: Plan) -> bytes:
        return write(source, lower(problem, plan), "bytecode", "minimal").content

    quick = screened and not isinstance(compiler, Partitioner)
    screen = Partitioner(problem.mesh, partitioning_target(compiler)) if quick else None
    return Confirmer(evaluator, emit, compiler, screen, limits, tell)


def partitioning_target(compiler: Compiler) -> CompilationTarget | None:
    """The target whose partitioner screens for a compiler: XLA:TPU's own, or None (virtual CPU devices) for XLA:GPU."""
    asked = compiler.target if isinstance(compiler, AheadOfTime) else None
    return asked if asked and asked.platform == "tpu" else None


def compiler_for(spec: Spec, name: str | None) -> Callable[[Mesh], Compiler]:
    """A function that makes the compiler for a mesh; the chip's own if `name` is None.

    Raises `MissingExtraError` if its package is not installed, `UsageError` if it cannot compile for this chip.
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
