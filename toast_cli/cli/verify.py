"""`toast verify`: compares a partitioned program's XLA compilation with its predicted figures (exit code 0, 1 or 2)."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toast_cli.base.errors import UsageError
from toast_cli.base.files import Format, check_targets, write_target
from toast_cli.cli import options
from toast_cli.cli.running import BAD_INPUT, CHECK_FAILED, OK, json_target
from toast_cli.request import CompilerName

if TYPE_CHECKING:
    from toast_cli.ask_xla.verdict import Judge
    from toast_cli.pipeline import Outcome


EXITS = {"agreed": OK, "disagreed": CHECK_FAILED, "unchecked": BAD_INPUT}
_EXAMPLE = {CompilerName.tpu: "v4-32", CompilerName.gpu: "h100-8"}


@options.with_options("dims", before="mesh")
def verify(
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="A program that `toast partition -o` wrote.")],
    report: Annotated[
        str | None,
        options.file("The report written with the program (`--json`): what was promised."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="ORIGINAL", help="The program before sharding: run both and compare the numbers."),
    ] = None,
    mesh: Annotated[
        str | None,
        options.spec("Hardware to compile for; not needed with a report for a built-in mesh."),
    ] = None,
    compiler: Annotated[
        CompilerName | None,
        options.words(
            CompilerName,
            "--compiler",
            "Which compiler to check collectives and memory with (default: the chips' own where it is installed "
            "and the mesh is known, else cpu: XLA's partitioner on virtual CPU devices).",
        ),
    ] = None,
    json: Annotated[str | None, options.file("Write the verdict as JSON; - for stdout.")] = None,
    quiet: options.Quiet = False,
    **given: Any,
) -> int:
    """Check with XLA that PROGRAM does what its report says.

    Compiled in a child process for virtual CPU devices, or ahead of time for the real chips: TPUs (extra `tpu`) or GPUs
    (extra `gpu`) that need not be there. Exit code 0: agreed, 1: disagreed, 2: nothing could be checked.
    """
    from toast_cli.ask_xla.verdict import original_bytes, partitioned_program
    from toast_cli.ask_xla.verdict import verify as check
    from toast_cli.report.command_tables import print_verdict
    from toast_cli.report.model import read_report, write_json

    targets = json_target(json)
    check_targets(targets, [path for path in (program, report, against) if path])
    promises = read_report(report).promises if report is not None else None
    if not mesh and promises is not None:  # the report's machine, if that is a built-in specification
        from toast_cli.hardware import load_spec, needs_no_file

        built_in = needs_no_file(promises.machine)
        if built_in and load_spec(promises.machine).devices == prod(promises.axes.values()):
            mesh = promises.machine
    judge = judge_of(mesh, compiler, "--compiler")
    target = judge.target
    content, form, axes = partitioned_program(program, promises.axes if promises else None)
    if target is not None and target.devices != prod(axes.values()):
        raise UsageError(
            f"{mesh} has {target.devices} devices, the program is partitioned over {prod(axes.values())}",
            where="--mesh", hint="name the machine that it was partitioned for",
        )  # fmt: skip
    original = original_bytes(against, given["dim"] or ()) if against else None
    verdict = check(content, form, axes, original, promises, judge)
    for output in targets:
        write_target(output, write_json(verdict.to_json()))
    print_verdict(verdict, sys.stderr if json == "-" else sys.stdout, quiet=quiet)
    return EXITS[verdict.outcome]


def judge_of(mesh: str | None, compiler: CompilerName | None, option: str) -> Judge:
    """The compiler that judges a program for this machine; compiler: None for the default.

    Raises `UsageError` if `compiler` cannot compile for it.
    """
    from toast_cli.ask_xla.verdict import choose_judge
    from toast_cli.hardware import load_spec

    if mesh is None and compiler in _EXAMPLE:
        hint = f"name it with --mesh, e.g. --mesh {_EXAMPLE[compiler]}"
        raise UsageError("which machine to compile for is missing", where=option, hint=hint)
    return choose_judge(load_spec(mesh) if mesh is not None else None, compiler, option)


def verify_outcome(
    outcome: Outcome, content: bytes, form: Format, judge: Judge, *, to_stderr: bool, quiet: bool
) -> int:
    """Verifies a program just written, numbers included, and prints the verdict. Returns the exit code."""
    from toast_cli import xla
    from toast_cli.ask_xla.verdict import verify as check
    from toast_cli.report.command_tables import print_verdict

    promises = outcome.report.promises
    original = xla.write_bytecode((outcome.original or outcome.source).module)
    verdict = check(content, "hlo" if form == Format.hlo else "stablehlo", promises.axes, original, promises, judge)
    print_verdict(verdict, sys.stderr if to_stderr else sys.stdout, quiet=quiet)
    return EXITS[verdict.outcome]
