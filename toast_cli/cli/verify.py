"""`toast verify`: compares a partitioned program's XLA compilation with its predicted figures (exit code 0, 1 or 2)."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Annotated

import typer

from toast_cli.cli import options
from toast_cli.cli.values import metavar, one_of
from toast_cli.cli.verdicts import EXITS, judge_of
from toast_cli.errors import UsageError
from toast_cli.outputs import Target, check_targets, write_target
from toast_cli.request import CompilerName

if TYPE_CHECKING:
    from toast_cli.verify.promises import Promises


def verify(
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="A program that `toast partition -o` wrote.")],
    report: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The report written with the program (`--json`): what was promised."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="ORIGINAL", help="The program before sharding: run both and compare the numbers."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="SPEC",
            autocompletion=options.complete_spec,
            help="Hardware to compile for; of a report for a ready one it is known.",
        ),
    ] = None,
    compiler: Annotated[
        CompilerName | None,
        typer.Option(
            "--compiler",
            parser=one_of(CompilerName, "--compiler"),
            metavar=metavar(CompilerName),
            help="Which compiler to check collectives and memory with (default: the chips' own where it is installed "
            "and the mesh is known, else cpu: XLA's partitioner on virtual CPU devices).",
        ),
    ] = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the verdict as JSON; - for stdout.")
    ] = None,
    quiet: options.Quiet = False,
) -> int:
    """Check with XLA that PROGRAM does what its report says.

    Compiled in a child process for virtual CPU devices, or ahead of time for the real chips: TPUs (extra `tpu`) or GPUs
    (extra `gpu`) that need not be there. Exit code 0: agreed, 1: disagreed, 2: nothing could be checked.
    """
    from toast_cli.report.json_file import write_json
    from toast_cli.report.promises import read_promises
    from toast_cli.report.verdict_table import print_verdict
    from toast_cli.verify.reading import original_bytes, partitioned_program
    from toast_cli.verify.verdict import verify as check

    output = Target("--json", json) if json is not None else None
    check_targets([output] if output else [], [path for path in (program, report, against) if path])
    promises = read_promises(report) if report is not None else None
    mesh = mesh or _ready_machine(promises)
    judge = judge_of(mesh, compiler, "--compiler")
    target = judge.target
    content, form, axes = partitioned_program(program, _axes(promises))
    if target is not None and target.devices != prod(axes.values()):
        raise UsageError(
            f"{mesh} has {target.devices} devices, the program is partitioned over {prod(axes.values())}",
            where="--mesh", hint="name the machine that it was partitioned for",
        )  # fmt: skip
    verdict = check(content, form, axes, original_bytes(against) if against else None, promises, judge)
    if output is not None:
        write_target(output, write_json(verdict.to_json()))
    print_verdict(verdict, sys.stderr if json == "-" else sys.stdout, quiet=quiet)
    return EXITS[verdict.outcome]


def _ready_machine(promises: Promises | None) -> str | None:
    """The name of the report's machine, if that is a ready specification."""
    from toast_cli.hardware import is_ready, load_spec

    if promises is None or not is_ready(promises.machine):
        return None
    return promises.machine if load_spec(promises.machine).devices == prod(promises.axes.values()) else None


def _axes(promises: Promises | None) -> dict[str, int] | None:
    return promises.axes if promises else None
