"""`toast sweep`: programs x specifications x shapes x limits x seeds, each point partitioned in a process of its own,
in one table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toast_cli.cli import options
from toast_cli.cli.exits import BAD_INPUT, DOES_NOT_FIT, INTERRUPTED, OK, say
from toast_cli.cli.sweep_points import SweepPoint, parse_seeds, points_of, run_point
from toast_cli.cli.values import BestBy
from toast_cli.cli.workers import PointFailure, run_all
from toast_cli.errors import UsageError
from toast_cli.option_values import bytes_or_none, whole_number
from toast_cli.outputs import Target, check_targets, write_target

if TYPE_CHECKING:
    from toast_cli.report.sweep_table import SweepRow


@options.with_options(
    *(*options.SEARCH, "keep_shardings", "as_written", "pins", "tactics", "strategy", "minimise", "subject_to", "fit"),
    before="jobs",
)
def sweep(
    programs: Annotated[
        list[str], typer.Argument(metavar="PROGRAM", help="StableHLO or HLO programs, also .gz or .zst.")
    ],
    mesh: Annotated[
        list[str],
        options.spec("Hardware, as for `toast partition`; repeatable."),
    ],
    mesh_shape: Annotated[
        str | None,
        typer.Option(
            "--mesh-shape",
            metavar="SHAPES",
            help="Mesh shapes: all, 'data=*,model=*' (every size for *), or 'data=8,model=2;data=16' "
            "(default: as in SPEC).",
        ),
    ] = None,
    memory_limit: Annotated[
        list[str] | None,
        typer.Option(
            "--memory-limit",
            metavar="BYTES",
            help="Memory a plan may use per device, e.g. 28GiB (default: as in SPEC); repeatable.",
        ),
    ] = None,
    seeds: Annotated[
        str, typer.Option("--seeds", "--seed", metavar="SEEDS", help="Seeds of the search, e.g. 3, 0-9 or 0,2,5-7.")
    ] = "0",
    jsonl: Annotated[
        str | None,
        options.file("Add a JSON line for each point when it is done, and skip points that FILE has; - for stdout."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Empty --jsonl's FILE first, and compute every point.")
    ] = False,
    csv: Annotated[str | None, options.file("Write the table as CSV, also line by line; - for stdout.")] = None,
    json: Annotated[str | None, options.file("Write the table as JSON; - for stdout.")] = None,
    html: Annotated[
        str | None,
        options.file("Plot all points, time against memory, on a page of its own; - for stdout."),
    ] = None,
    best_by: Annotated[
        BestBy,
        options.words(
            BestBy, "--best-by", "Mark the point with the least of this; device_time is devices x step time."
        ),
    ] = BestBy.step_time,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=whole_number(1, "--jobs"),
            help="Number of points at a time (default: 1; on a cluster, as many as it has room for).",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Work on a running cluster: dask://HOST:PORT, ray://HOST:PORT or ray://auto."
        ),
    ] = None,
    quiet: options.Quiet = False,
    **given: Any,
) -> int:
    """Plan every PROGRAM for every mesh SPEC, shape, memory limit and seed, and tabulate what each should cost.

    Run again with the same --jsonl FILE, a sweep that was interrupted continues where it stopped. Exit code 0: all
    points are done and every program has one that fits; 3: a program has none; 2: a point failed (its row says why).
    See docs/howto/sweep.md.
    """
    named = (("--csv", csv), ("--json", json), ("--jsonl", jsonl), ("--html", html))
    targets = {option: Target(option, path) for option, path in named if path is not None}
    if "-" in programs:
        raise UsageError("a sweep reads each program more than once, so not from stdin", hint="save it to a file")
    if fresh and (jsonl is None or jsonl == "-"):
        raise UsageError("--fresh empties a file of results", hint="name it with --jsonl FILE")
    check_targets(list(targets.values()), [*programs, *mesh])
    if cluster is not None:
        from toast_cli.cli.cluster import parse_address

        parse_address(cluster)
    requests = [options.make_request(program, spec, given) for program in programs for spec in mesh]
    limits = [bytes_or_none(text, "--memory-limit") for text in memory_limit or (None,)]
    points = points_of(requests, mesh_shape, limits, parse_seeds(seeds))

    rows, interrupted = _run(points, jobs, cluster, targets, fresh, quiet)

    from toast_cli.report import sweep_table
    from toast_cli.report.html import sweep_page

    rows = sweep_table.mark_best(rows, best_by.value)
    for option, write in (("--csv", sweep_table.to_csv), ("--json", sweep_table.to_json), ("--html", sweep_page.page)):
        if option in targets:
            write_target(targets[option], write(rows))
    _show(rows, to_stderr=any(target.is_stdout for target in targets.values()), quiet=quiet)
    if interrupted:
        on = f"; the same command goes on from {jsonl}" if jsonl not in (None, "-") else ""
        say("note", f"interrupted: {len(rows)} of {len(points)} points are done{on}")
        return INTERRUPTED
    return _exit_code(rows)


def _run(
    points: Sequence[SweepPoint],
    jobs: int | None,
    cluster: str | None,
    targets: dict[str, Target],
    fresh: bool,
    quiet: bool,
) -> tuple[list[SweepRow], bool]:
    """(the rows in the order of the points, True if Ctrl-C ended it early)."""
    from toast_cli.cli.sweep_points import open_log

    interrupted = False
    with ExitStack() as stack:
        log = stack.enter_context(open_log(targets["--jsonl"].path, fresh=fresh)) if "--jsonl" in targets else None
        known = log.finished if log is not None else {}
        done = {number: known[point.key] for number, point in enumerate(points) if point.key in known}
        if done and not quiet:
            say("note", f"{len(done)} of {len(points)} points are done already")
        left = [number for number in range(len(points)) if number not in done]
        add_to_csv = _csv_lines(targets.get("--csv"), list(done.values()))
        show = stack.enter_context(_live(list(done.values()), len(points), wanted=not quiet))
        try:
            for place, result in _results([points[number] for number in left], jobs, cluster):
                number = left[place]
                row = _row(points[number], result)
                done[number] = row
                if log is not None:
                    log.append(row)
                add_to_csv(row)
                show(row)
        except KeyboardInterrupt:
            interrupted = True
    return [done[number] for number in sorted(done)], interrupted


def _results(
    points: Sequence[SweepPoint], jobs: int | None, cluster: str | None
) -> Iterator[tuple[int, SweepRow | PointFailure]]:
    """(index of the point, its result) as each is done, here or on the cluster."""
    if cluster is None:
        yield from run_all(points, run_point, jobs or 1)
    elif points:
        from toast_cli.cli.cluster import run_on_cluster

        yield from run_on_cluster(points, cluster, jobs)


def _row(point: SweepPoint, result: SweepRow | PointFailure) -> SweepRow:
    from toast_cli.report.sweep_table import FAILED, SweepRow

    if not isinstance(result, PointFailure):
        return result
    request = point.request
    reason = f"{result.reason}; {result.hint}" if result.hint else result.reason
    return replace(
        SweepRow(request.program, request.mesh, request.mesh_shape or "", FAILED, reason),
        seed=request.seed,
        key=point.key,
    )


def _csv_lines(target: Target | None, rows: list[SweepRow]) -> Callable[[SweepRow], None]:
    """Writes the finished rows; returns a function that appends one.

    The whole table, with the best marked, replaces this in the end.
    """
    if target is None or target.is_stdout or Path(target.path).suffix in (".gz", ".zst"):
        return lambda row: None
    from toast_cli.report.sweep_table import to_csv

    write_target(target, to_csv(rows))

    def add(row: SweepRow) -> None:
        with Path(target.path).open("ab") as file:
            file.write(to_csv([row], head=False))

    return add


@contextmanager
def _live(rows: list[SweepRow], total: int, *, wanted: bool) -> Iterator[Callable[[SweepRow], None]]:
    """A bar and a table of the latest rows on stderr, if that is a terminal; yields a function that adds a row."""
    if not wanted or not sys.stderr.isatty():
        yield lambda row: None
        return
    from rich.console import Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from toast_cli.report.style import make_console
    from toast_cli.report.sweep_table import rows_table

    console = make_console(sys.stderr)
    bar = Progress(TextColumn("points"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
    task = bar.add_task("points", total=total, completed=len(rows))
    shown = list(rows)

    def picture() -> Group:
        latest = shown[-max(1, console.height - 4) :]
        return Group(*([rows_table(latest, console.width)] if latest else []), bar)

    with Live(picture(), console=console, transient=True, vertical_overflow="crop") as live:

        def add(row: SweepRow) -> None:
            shown.append(row)
            bar.advance(task)
            live.update(picture())

        yield add


def _show(rows: Sequence[SweepRow], *, to_stderr: bool, quiet: bool) -> None:
    """Prints the table, or with --quiet a line for the best of each program and for its first failure.

    to_stderr: stdout holds the CSV or JSON.
    """
    from toast_cli.report.style import make_console, plain_text, render
    from toast_cli.report.sweep_table import best_line, sweep_tables

    stream = sys.stderr if to_stderr else sys.stdout
    if not quiet:
        console = make_console(stream)
        stream.write(render(sweep_tables(rows, console.width), console))
    elif not to_stderr:
        failed: set[str] = set()
        for row in rows:
            if row.best:
                print(plain_text(best_line(row), stream.encoding), file=stream)
            elif row.status == "failed" and row.program not in failed:
                failed.add(row.program)
                say("error", f"{row.program} on {row.mesh}: {row.error}")


def _exit_code(rows: Sequence[SweepRow]) -> int:
    """A failed point has precedence; then a program for which nothing fits."""
    if any(row.status == "failed" for row in rows):
        return BAD_INPUT
    fitting = {row.program for row in rows if row.status in ("fits", "unsure")}
    return OK if all(row.program in fitting for row in rows) else DOES_NOT_FIT
