"""`toast check`: plans must stay within limits, and near stored reports (exit code 0, 1 or 2)."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toast_cli.cli import options
from toast_cli.cli.check_points import CheckPoint, key_of_point, points_of, points_of_project
from toast_cli.cli.exits import BAD_INPUT, CHECK_FAILED, OK, say
from toast_cli.cli.progress import counted, progress_line, say_confirmed
from toast_cli.cli.values import CheckFormat
from toast_cli.cli.workers import PointFailure, failure_of, run_all
from toast_cli.disk_cache import DiskCache, users_folder
from toast_cli.errors import InputError, ToastError, UsageError
from toast_cli.inputs import resolved
from toast_cli.option_values import one_of, whole_number
from toast_cli.outputs import Target, check_targets, write_target

if TYPE_CHECKING:
    from toast_cli.report.checks import CheckVerdict
    from toast_cli.report.model import Report


STDOUT = Target("--output-format", "-")


@dataclass(frozen=True)
class Judged:
    """A verdict, and the bytes of the report to store; None if it is not to be stored or the file is up to date."""

    verdict: CheckVerdict
    stored: bytes | None = None


@options.with_options(
    *(*options.PLANNING, *options.REWRITING, "strategy", "plan", *options.CONFIRMING, "ask"), before="jobs", unset=True
)
def check(
    programs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROGRAM]...", help="Programs to check; without --mesh, only these of the project file's."
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        options.spec(
            "Hardware: a name from `toast mesh list`, or a YAML file; else a project file says what to check."
        ),
    ] = None,
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
    config: Annotated[
        str | None,
        options.file(
            "The project file (default: the nearest toast.yaml or pyproject.toml, here or in a folder above)."
        ),
    ] = None,
    allow_project_code: Annotated[
        bool,
        typer.Option(
            "--allow-project-code",
            help="Run Python files of tactics that the project file names. Only for files you trust.",
        ),
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
    compiler says of it. Without --mesh the nearest project file lists
    what to check; options given here win over its own. See docs/howto/ci.md.
    """
    options.refuse_both(quiet, verbose)
    given = _given({**locals(), **given})
    targets = _output_targets(output_format or ["text"])
    if mesh is not None:
        points = points_of(programs or [], mesh, given, config, update)
    else:
        points = points_of_project(programs or [], given, config, update, allow_project_code)
    check_targets([target for _, target in targets if not target.is_stdout], [p.request.program for p in points])

    judged = _judge(points, jobs, quiet, verbose, reported=targets != [(CheckFormat.text, STDOUT)])
    for point, result in zip(points, judged, strict=True):
        _store(point, result, quiet)
    verdicts = [result.verdict for result in judged]
    _write(verdicts, targets, quiet, verbose)
    statuses = {verdict.status for verdict in verdicts}
    return BAD_INPUT if "error" in statuses else CHECK_FAILED if "failed" in statuses else OK


def judge_point(point: CheckPoint, progress: Any = None, tell: Any = None) -> tuple[Report, Judged]:
    """Partitions and judges one point. Raises ToastError if that is not possible."""
    from toast_cli import pipeline
    from toast_cli.hardware import load_spec
    from toast_cli.report import checks
    from toast_cli.report.json_file import is_report, read_report, same_facts, to_bytes

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
    verdict = checks.verdict(report, point.request, point.limits, stored, point.against, seconds)
    wanted = point.update and bool(point.against) and verdict.status == checks.PASSED
    return report, Judged(verdict, to_bytes(report) if wanted and not same_facts(point.against, report) else None)


def work_on(point: CheckPoint) -> Judged:
    """In a worker: judges one of several points."""
    return judge_point(point)[1]


def _given(written: Mapping[str, Any]) -> dict[str, Any]:
    """The given options that a project file may set too, by key. written: the command's parameters."""
    from toast_cli.cli.project import KEYS

    values = {name.replace("_", "-"): value for name, value in written.items()}
    given = {name: value for name, value in values.items() if name in KEYS and name not in ("program", "mesh")}
    return {name: value for name, value in given.items() if value is not None and value is not False}


def _judge(points: list[CheckPoint], jobs: int, quiet: bool, verbose: bool, reported: bool) -> list[Judged]:
    """Judges all points; those with a cached verdict are not partitioned again (unless `verbose`, which shows a whole
    report)."""
    from toast_cli.report.checks import CheckVerdict

    known = DiskCache(users_folder("checked"), CheckVerdict)
    keys = ["" if verbose else key_of_point(point) for point in points]
    done = {k: Judged(verdict) for k, key in enumerate(keys) if (verdict := known.find(key)) is not None}
    left = [k for k in range(len(points)) if k not in done]
    if done and not quiet:
        say("note", f"{len(done)} of {len(points)} checks are known from before (TOAST_CACHE=off makes them again)")
    if left and len(points) == 1:
        done[0] = _judge_alone(points[0], quiet, verbose, reported)
    elif left:
        done.update(zip(left, _judge_all([points[k] for k in left], jobs, quiet), strict=True))
    for k in left:
        if not done[k].verdict.error:
            known.store(keys[k], replace(done[k].verdict, seconds=0.0))
    return [done[k] for k in range(len(points))]


def _judge_alone(point: CheckPoint, quiet: bool, verbose: bool, reported: bool) -> Judged:
    """Judges one point in this process, with progress.

    An error is raised, or becomes a verdict if that is `reported` to other programs.
    """
    from toast_cli.report.checks import CheckVerdict
    from toast_cli.report.terminal import print_report

    try:
        with progress_line(wanted=not quiet) as progress:
            report, judged = judge_point(point, progress, None if quiet else say_confirmed)
    except ToastError as error:
        if not reported:
            raise
        failure = failure_of(error)
        return Judged(CheckVerdict(point.request.program, point.request.mesh, error=failure.reason, hint=failure.hint))
    if verbose:
        print_report(report, sys.stderr, verbose=True)
        print(file=sys.stderr)
    return judged


def _judge_all(points: list[CheckPoint], jobs: int, quiet: bool) -> list[Judged]:
    """Judges several points, each in its own process; a failure becomes a verdict too."""
    from toast_cli.report.checks import CheckVerdict

    done: dict[int, Judged] = {}
    with counted(len(points), "checks", wanted=not quiet) as advance:
        for number, result in run_all(points, work_on, jobs):
            request = points[number].request
            if isinstance(result, PointFailure):
                result = Judged(CheckVerdict(request.program, request.mesh, error=result.reason, hint=result.hint))
            done[number] = result
            advance()
    return [done[number] for number in range(len(points))]


def _store(point: CheckPoint, judged: Judged, quiet: bool) -> None:
    """Writes the stored report with --update, unless a limit is exceeded."""
    if not point.update or not point.against:
        return
    status = judged.verdict.status
    if judged.stored is not None:
        resolved(point.against, "--update", UsageError).parent.mkdir(parents=True, exist_ok=True)
        write_target(Target("--update", point.against), judged.stored)
        text = f"wrote {point.against}"
    elif status == "passed":
        text = f"{point.against} is up to date"
    else:
        say("note", f"{point.against} was not written: the check {'failed' if status == 'failed' else 'was not made'}")
        return
    if not quiet:
        say("note", text)


def _output_targets(texts: list[str]) -> list[tuple[CheckFormat, Target]]:
    """Formats and their targets, from `--output-format FORMAT[=FILE]`."""
    where = "--output-format"
    found = []
    for text in texts:
        word, _, path = text.partition("=")
        found.append((one_of(CheckFormat, where)(word), Target(where, path or "-")))
    whole = [form.value for form, target in found if target.is_stdout and form in (CheckFormat.json, CheckFormat.junit)]
    if whole and sum(target.is_stdout for _, target in found) > 1:
        raise UsageError(
            f"{whole[0]} must be alone on stdout", where=where, hint=f"give the file of one: {whole[0]}=FILE"
        )
    return found


def _write(verdicts: list[CheckVerdict], targets: list[tuple[CheckFormat, Target]], quiet: bool, verbose: bool) -> None:
    import io

    from toast_cli.report import check_outputs
    from toast_cli.report.style import make_console, render

    writers = {
        CheckFormat.json: check_outputs.as_json,
        CheckFormat.junit: check_outputs.as_junit,
        CheckFormat.github: check_outputs.as_github,
    }
    for form, target in targets:
        if form in writers:
            content = writers[form](verdicts)
        else:
            console = make_console(sys.stdout if target.is_stdout else io.StringIO())
            content = render(check_outputs.as_text(verdicts, quiet=quiet, verbose=verbose), console)
        if target.is_stdout:
            sys.stdout.write(content)
        else:
            write_target(target, content.encode("utf-8", "backslashreplace"))
