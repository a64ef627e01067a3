"""`toast check`: the plan for a program must stay within limits, or near a stored report (exit code 0 or 1)."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from toast_cli.cli import options
from toast_cli.cli.exits import CHECK_FAILED, OK, say
from toast_cli.cli.progress import progress_line
from toast_cli.cli.values import Search, bytes_or_none, parse_fraction, seconds_or_none
from toast_cli.errors import UsageError


def check(
    program: options.Program,
    mesh: options.MeshSpec,
    max_memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Most peak memory per device, e.g. 28GiB.")
    ] = None,
    max_step_time: Annotated[
        str | None, typer.Option(metavar="SECONDS", help="Longest step, e.g. 120ms or 1.5s.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="FILE", help="A report stored with `toast partition --json FILE`.")
    ] = None,
    tolerance: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="How much worse than --against is allowed (default: 5%).")
    ] = None,
    mesh_shape: options.MeshShape = None,
    search: options.SearchName = Search.mcts,
    budget: options.Budget = None,
    iterations: options.Iterations = None,
    seed: options.Seed = 0,
    memory_limit: options.MemoryLimit = None,
    keep_shardings: options.KeepShardings = False,
    pin: options.Pins = None,
    jobs: options.Jobs = 1,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Check that the plan for PROGRAM fits and stays within limits: exit code 0 if it does, 1 if not.

    The plan is the one `toast partition` finds with the same options. With --quiet only failures are printed.
    """
    from toast_cli.hardware import load_spec
    from toast_cli.report import checks
    from toast_cli.report.json_file import read_report

    options.refuse_both(quiet, verbose)
    if tolerance is not None and against is None:
        raise UsageError("--tolerance says how far from a stored report", hint="give that report with --against FILE")
    max_bytes = bytes_or_none(max_memory, "--max-memory")
    max_step_seconds = seconds_or_none(max_step_time, "--max-step-time")
    allowed_change = parse_fraction(tolerance or "5%", "--tolerance")
    stored = read_report(against) if against is not None else None
    if stored is not None:
        spec = load_spec(mesh)
        checks.refuse_other_mesh(stored, spec.chip.name, spec.devices)
    request = options.make_request(
        program,
        mesh,
        mesh_shape=mesh_shape,
        search=search,
        budget=budget,
        iterations=iterations,
        seed=seed,
        memory_limit=memory_limit,
        keep_shardings=keep_shardings,
        pins=pin,
        jobs=jobs,
    )

    from toast_cli import pipeline
    from toast_cli.report.style import make_console, render
    from toast_cli.report.terminal import one_line, print_report

    with progress_line(wanted=not quiet) as progress:
        report = pipeline.partition(request, progress).report
    results = checks.judge(
        report, max_bytes=max_bytes, max_step_seconds=max_step_seconds, stored=stored, tolerance=allowed_change
    )
    failed = [result for result in results if not result.passed]
    console = make_console(sys.stdout)
    if verbose:
        print_report(report, sys.stdout, verbose=True)
        print()
    if not quiet:
        sys.stdout.write(render([one_line(report), checks.checks_table(results)], console))
    elif failed:
        sys.stdout.write(render([checks.checks_table(failed)], console))
    change = checks.plan_change(report, stored) if stored is not None else ""
    if change and (failed or not quiet):
        say("note", change)
    return CHECK_FAILED if failed else OK
