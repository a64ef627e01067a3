"""`toast check`: plans must stay within limits, and near stored reports (exit code 0, 1 or 2)."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toast_cli.base.errors import InputError, ToastError, UsageError
from toast_cli.base.files import Target, check_targets, resolved, write_target
from toast_cli.cli import options
from toast_cli.cli.options import CheckFormat, parse_fraction
from toast_cli.cli.running import (
    BAD_INPUT,
    CHECK_FAILED,
    OK,
    PointFailure,
    counted,
    failure_of,
    progress_line,
    run_all,
    say,
    say_confirmed,
)
from toast_cli.request import bytes_or_none, one_of, seconds_or_none, whole_number

if TYPE_CHECKING:
    from toast_cli.report.checks import CheckLimits, CheckVerdict
    from toast_cli.report.model import Report
    from toast_cli.request import Request


STDOUT = Target("--output-format", "-")
DEFAULT_TOLERANCE = "5%"


@dataclass(frozen=True)
class CheckPoint:
    """One program on one mesh, its limits, and the stored report it is compared with (empty: none). update: write that
    report instead of comparing with it."""

    request: Request
    limits: CheckLimits
    against: str = ""
    update: bool = False


@dataclass(frozen=True)
class Judged:
    """A verdict on a plan, and its report; None if there is no plan."""

    verdict: CheckVerdict
    report: Report | None = None


@options.with_options(*(*options.PLANNING, *options.REWRITING, "strategy", "plan", *options.CONFIRMING), before="jobs")
def check(
    programs: Annotated[list[str], typer.Argument(metavar="PROGRAM...", help="Programs to check.")],
    mesh: options.MeshSpec,
    max_memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Largest peak memory allowed per device, e.g. 28GiB.")
    ] = None,
    max_step_time: Annotated[
        str | None, typer.Option(metavar="SECONDS", help="Longest step time allowed, e.g. 120ms or 1.5s.")
    ] = None,
    max_communication: Annotated[
        str | None, typer.Option(metavar="SECONDS", help="Longest communication time allowed in a step, e.g. 20ms.")
    ] = None,
    against: Annotated[
        str | None,
        options.file("Compare with this report, stored by --update or `toast partition --json FILE`."),
    ] = None,
    tolerance: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="How much worse than --against is allowed (default: 5%).")
    ] = None,
    time_tolerance: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="The same for the step time alone.")
    ] = None,
    memory_tolerance: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="The same for the peak memory alone.")
    ] = None,
    communication_tolerance: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="The same for the communication alone.")
    ] = None,
    same_plan: Annotated[
        bool, typer.Option("--same-plan", help="Also fail when the plan's decisions differ from those of --against.")
    ] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Replace the stored reports instead of comparing with them.")
    ] = False,
    output_format: Annotated[
        list[str] | None,
        typer.Option(
            "--output-format",
            metavar="FORMAT[=FILE]",
            help="How to report: text (default), json, junit or github, on stdout or to FILE; repeatable.",
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=whole_number(1, "--jobs"),
            help="Number of checks at a time.",
        ),
    ] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only what failed.")] = False,
    verbose: options.Verbose = False,
    **given: Any,
) -> int:
    """Check that plans fit and stay within limits: exit code 0 if all do, 1 if not, 2 if one could not be checked.

    The plan is the one `toast partition` finds with the same options; with --confirm, limits are held against what the
    compiler says of it. See docs/howto/ci.md.
    """
    options.refuse_both(quiet, verbose)
    if "-" in programs and len(programs) > 1:
        raise UsageError("stdin is one program of several", hint="save it to a file")
    if against is not None and len(programs) > 1:
        raise UsageError("one stored report for several programs", where="--against", hint="check one at a time")
    tolerances = {
        "--time-tolerance": time_tolerance, "--memory-tolerance": memory_tolerance,
        "--communication-tolerance": communication_tolerance,
    }  # fmt: skip
    compared = {"--tolerance": tolerance, **tolerances, "--same-plan": same_plan or None, "--update": update or None}
    for option, value in compared.items():
        if value is not None and against is None:
            raise UsageError(f"{option} needs a stored report", hint="give that report with --against FILE")
    from toast_cli.report.checks import CheckLimits

    shared = parse_fraction(tolerance or DEFAULT_TOLERANCE, "--tolerance")
    step, memory, communication = (
        shared if text is None else parse_fraction(text, option) for option, text in tolerances.items()
    )
    limits = CheckLimits(
        bytes_or_none(max_memory, "--max-memory"),
        seconds_or_none(max_step_time, "--max-step-time"),
        seconds_or_none(max_communication, "--max-communication"),
        time_tolerance=step,
        memory_tolerance=memory,
        communication_tolerance=communication,
        same_plan=same_plan,
    )
    if max_memory is not None and given["plan"] is None and given["strategy"] is None:
        # The search looks for what is allowed; a given plan is only evaluated.
        given["subject_to"] = [*(given["subject_to"] or ()), f"peak_memory<={max_memory}"]
    targets = _output_targets(output_format or ["text"])
    requests = [options.make_request(program, mesh, given) for program in programs]
    points = [CheckPoint(request, limits, against or "", update) for request in requests]
    check_targets([target for _, target in targets if not target.is_stdout], [p.request.program for p in points])

    if len(points) == 1:
        judged = [_judge_alone(points[0], quiet, verbose, reported=targets != [(CheckFormat.text, STDOUT)])]
    else:
        judged = _judge_all(points, jobs, quiet)
    for point, result in zip(points, judged, strict=True):
        _store(point, result, quiet)
    verdicts = [result.verdict for result in judged]
    _write(verdicts, targets, quiet, verbose)
    statuses = {verdict.status for verdict in verdicts}
    return BAD_INPUT if "error" in statuses else CHECK_FAILED if "failed" in statuses else OK


def judge_point(point: CheckPoint, progress: Any = None, tell: Any = None) -> Judged:
    """Partitions and judges one point. Raises ToastError if that is not possible."""
    from toast_cli import pipeline
    from toast_cli.hardware import load_spec
    from toast_cli.report import checks
    from toast_cli.report.model import is_report, read_report

    exists = bool(point.against) and Path(point.against).exists()
    if point.against and not exists and not point.update:
        hint = "--update (or `toast partition --json FILE`) makes it"
        raise InputError("there is no such stored report", where=point.against, hint=hint)
    if exists and point.update and not is_report(point.against):
        hint = "give another file, or remove this one"
        raise InputError("is not a report of toast's and is not overwritten", where=point.against, hint=hint)
    stored = read_report(point.against) if exists and not point.update else None
    if stored is not None:
        spec = load_spec(point.request.mesh)
        checks.refuse_other_mesh(stored, point.against, spec.chip.name, spec.devices)
    began = time.perf_counter()
    report = pipeline.partition(point.request, progress, tell, annotated=False).report
    seconds = time.perf_counter() - began
    return Judged(checks.verdict(report, point.request, point.limits, stored, point.against, seconds), report)


def _judge_alone(point: CheckPoint, quiet: bool, verbose: bool, reported: bool) -> Judged:
    """Judges one point in this process, with progress.

    An error is raised, or becomes a verdict if that is `reported` to other programs.
    """
    from toast_cli.report.terminal import print_report

    try:
        with progress_line(wanted=not quiet) as progress:
            judged = judge_point(point, progress, None if quiet else say_confirmed)
    except ToastError as error:
        if not reported:
            raise
        return _not_judged(point, failure_of(error))
    if verbose and judged.report is not None:
        print_report(judged.report, sys.stderr, verbose=True)
        print(file=sys.stderr)
    return judged


def _judge_all(points: list[CheckPoint], jobs: int, quiet: bool) -> list[Judged]:
    """Judges several points, each in its own process; a failure becomes a verdict too."""
    done: dict[int, Judged] = {}
    for number, result in counted(run_all(points, judge_point, jobs), len(points), "checks", wanted=not quiet):
        done[number] = _not_judged(points[number], result) if isinstance(result, PointFailure) else result
    return [done[number] for number in range(len(points))]


def _not_judged(point: CheckPoint, failure: PointFailure) -> Judged:
    from toast_cli.report.checks import CheckVerdict

    request = point.request
    return Judged(CheckVerdict(request.program, request.mesh, error=failure.reason, hint=failure.hint))


def _store(point: CheckPoint, judged: Judged, quiet: bool) -> None:
    """Writes the stored report with --update, unless a limit is exceeded."""
    from toast_cli.report.model import same_facts, to_bytes

    if not point.update:
        return
    if judged.report is None or judged.verdict.status != "passed":
        failed = "was not made" if judged.report is None else "failed"
        say("note", f"{point.against} was not written: the check {failed}")
        return
    is_same = same_facts(point.against, judged.report)
    if not is_same:
        resolved(point.against, "--update", UsageError).parent.mkdir(parents=True, exist_ok=True)
        write_target(Target("--update", point.against), to_bytes(judged.report))
    if not quiet:
        say("note", f"{point.against} is up to date" if is_same else f"wrote {point.against}")


def _output_targets(texts: list[str]) -> list[tuple[CheckFormat, Target]]:
    """Formats and their targets, from `--output-format FORMAT[=FILE]`."""
    where = "--output-format"
    targets = []
    for text in texts:
        word, _, path = text.partition("=")
        targets.append((one_of(CheckFormat, where)(word), Target(where, path or "-")))
    printed = [form for form, target in targets if target.is_stdout]
    lone = [form.value for form in printed if form in (CheckFormat.json, CheckFormat.junit)]
    if lone and len(printed) > 1:
        raise UsageError(
            f"{lone[0]} must be alone on stdout", where=where, hint=f"give the file of one: {lone[0]}=FILE"
        )
    return targets


def _write(verdicts: list[CheckVerdict], targets: list[tuple[CheckFormat, Target]], quiet: bool, verbose: bool) -> None:
    import io

    from toast_cli.report import checks
    from toast_cli.report.style import make_console, render

    writers = {
        CheckFormat.json: checks.as_json,
        CheckFormat.junit: checks.as_junit,
        CheckFormat.github: checks.as_github,
    }
    for form, target in targets:
        if form in writers:
            content = writers[form](verdicts)
        else:
            console = make_console(sys.stdout if target.is_stdout else io.StringIO())
            content = render(checks.as_text(verdicts, quiet=quiet, verbose=verbose), console)
        if target.is_stdout:
            sys.stdout.write(content)
        else:
            write_target(target, content.encode("utf-8", "backslashreplace"))
