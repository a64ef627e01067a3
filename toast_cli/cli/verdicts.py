"""Shared by `toast verify` and `toast partition --verify`: the choice of the compiler, and a verdict's exit code."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from toast_cli.cli.exits import BAD_INPUT, CHECK_FAILED, OK
from toast_cli.cli.values import Format
from toast_cli.errors import UsageError
from toast_cli.request import CompilerName

if TYPE_CHECKING:
    from toast_cli.pipeline import Outcome
    from toast_cli.verify.judge import Judge

EXITS = {"agreed": OK, "disagreed": CHECK_FAILED, "unchecked": BAD_INPUT}
_EXAMPLE = {CompilerName.tpu: "v4-32", CompilerName.gpu: "h100-8"}


def judge_of(mesh: str | None, compiler: CompilerName | None, option: str) -> Judge:
    """The compiler that judges a program for this machine; compiler: None for the default.

    Raises `UsageError` if `compiler` cannot compile for it.
    """
    from toast_cli.hardware import load_spec
    from toast_cli.verify.judge import choose_judge

    if mesh is None and compiler in _EXAMPLE:
        hint = f"name it with --mesh, e.g. --mesh {_EXAMPLE[compiler]}"
        raise UsageError("which machine to compile for is missing", where=option, hint=hint)
    spec = load_spec(mesh) if mesh is not None else None
    if spec is not None and compiler in _EXAMPLE and spec.chip.platform != compiler:
        raise UsageError(
            f"{option} {compiler.value} cannot compile for {spec.chip.name}", where=f"--mesh {mesh}",
            hint=f"use {option} {spec.chip.platform}",
        )  # fmt: skip
    return choose_judge(spec, compiler, option)


def verify_outcome(
    outcome: Outcome, content: bytes, form: Format, judge: Judge, *, to_stderr: bool, quiet: bool
) -> int:
    """Verifies a program just written, numbers included, and prints the verdict. Returns the exit code."""
    from toast_cli import xla
    from toast_cli.report.promises import promises_of
    from toast_cli.report.verdict_table import print_verdict
    from toast_cli.verify.verdict import verify

    promises = promises_of(outcome.report.to_json())
    original = xla.write_bytecode((outcome.original or outcome.source).module)
    verdict = verify(
        content,
        "hlo" if form in (Format.hlo, Format.spmd_hlo) else "stablehlo",
        promises.axes,
        original,
        promises,
        judge,
    )
    stream = sys.stderr if to_stderr else sys.stdout
    print_verdict(verdict, stream, quiet=quiet)
    return EXITS[verdict.outcome]
