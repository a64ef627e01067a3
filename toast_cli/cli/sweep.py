"""`toast sweep`: programs x specifications x mesh shapes, each point partitioned in a process of its own, in one table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from toast_cli.cli import options
from toast_cli.cli.exits import BAD_INPUT, DOES_NOT_FIT, INTERRUPTED, OK, say
from toast_cli.cli.outputs import Target, check_targets, write_target
from toast_cli.cli.values import Search, whole_number
from toast_cli.cli.workers import Failure, run_all
from toast_cli.errors import ToastError, UsageError

if TYPE_CHECKING:
    from toast_cli.pipeline import Request
    from toast_cli.report.sweep_table import Row

ALL_SHAPES = "all"


@dataclass(frozen=True)
class Point:
    """One line of the sweep; `error` when it is known beforehand that there is nothing to run."""

    request: Request
    error: str = ""


def sweep(
    programs: Annotated[
        list[str], typer.Argument(metavar="PROGRAM", help="StableHLO or HLO programs, also .gz or .zst.")
    ],
    mesh: Annotated[
        list[str], typer.Option("--mesh", metavar="SPEC", help="Hardware, as for `toast partition`; repeatable.")
    ],
    shapes: Annotated[
        str | None,
        typer.Option(metavar="SHAPES", help="Mesh shapes: all, or 'data=8,model=2;data=16' (default: the SPEC's)."),
    ] = None,
    csv: Annotated[str | None, typer.Option(metavar="FILE", help="Write the table as CSV; - for stdout.")] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the table as JSON; - for stdout.")] = None,
    search: options.SearchName = Search.mcts,
    budget: options.Budget = None,
    iterations: options.Iterations = None,
    seed: options.Seed = 0,
    memory_limit: options.MemoryLimit = None,
    keep_shardings: options.KeepShardings = False,
    pin: options.Pins = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", parser=whole_number(1, "--jobs"), help="Points worked on at a time.")
    ] = 1,
    quiet: options.Quiet = False,
) -> int:
    """Partition every PROGRAM for every mesh SPEC and shape, and tabulate what each should cost; the best is marked.

    A point that fails is a row of the table. Exit code 0: something fits; 3: nothing does; 2: every point failed.
    """
    targets = [Target(option, path) for option, path in (("--csv", csv), ("--json", json)) if path is not None]
    if "-" in programs:
        raise UsageError("a sweep reads each program more than once, so not from stdin", hint="save it to a file")
    check_targets(targets, [*programs, *mesh])
    points = [
        point
        for program in programs
        for spec in mesh
        for point in _points(
            shapes,
            options.make_request(
                program,
                spec,
                mesh_shape=None,
                search=search,
                budget=budget,
                iterations=iterations,
                seed=seed,
                memory_limit=memory_limit,
                keep_shardings=keep_shardings,
                pins=pin,
            ),
        )
    ]

    from toast_cli.report import sweep_table

    rows, interrupted = _run(points, jobs, quiet)
    rows = sweep_table.mark_best(rows)
    for target in targets:
        write_target(target, sweep_table.to_csv(rows) if target.option == "--csv" else sweep_table.to_json(rows))
    _show(rows, to_stderr=any(target.is_stdout for target in targets), quiet=quiet)
    if interrupted:
        say("note", f"interrupted: {len(rows)} of {len(points)} points are done")
        return INTERRUPTED
    return _exit_code(rows)


def run_point(point: Point) -> Row:
    """In a worker: partition and keep the figures."""
    from toast_cli.pipeline import partition
    from toast_cli.report.sweep_table import row_of

    if point.error:
        raise UsageError(point.error)
    began = time.perf_counter()
    report = partition(point.request).report
    return row_of(point.request.program, point.request.mesh, report, time.perf_counter() - began)


def _points(shapes: str | None, request: Request) -> Iterator[Point]:
    """The points of one program on one specification. A specification that cannot be read makes one failing point."""
    from dataclasses import replace

    from toast_cli.hardware import load_spec, parse_shape

    if shapes is None:
        yield Point(request)
        return
    if shapes.strip() != ALL_SHAPES:
        for shape in shapes.split(";"):
            text = shape.strip()
            if text != "auto":
                parse_shape(text, "--shapes")
            yield Point(replace(request, mesh_shape=text))
        return
    try:
        found = load_spec(request.mesh).mesh_shapes()
    except ToastError as error:
        yield Point(request, error=str(error))
        return
    for sizes in found:
        yield Point(replace(request, mesh_shape=",".join(f"{axis}={size}" for axis, size in sizes.items())))


def _run(points: Sequence[Point], jobs: int, quiet: bool) -> tuple[list[Row], bool]:
    """(the rows in the order of the points, whether Ctrl-C ended it before the last one)."""
    from toast_cli.report.sweep_table import FAILED, Row

    done: dict[int, Row] = {}
    interrupted = False
    with _counted(len(points), wanted=not quiet) as advance:
        try:
            for number, result in run_all(points, run_point, jobs):
                request = points[number].request
                if isinstance(result, Failure):
                    done[number] = Row(request.program, request.mesh, request.mesh_shape or "", FAILED, result.reason)
                else:
                    done[number] = result
                advance()
        except KeyboardInterrupt:
            interrupted = True
    return [done[number] for number in sorted(done)], interrupted


@contextmanager
def _counted(total: int, *, wanted: bool) -> Iterator[Callable[[], object]]:
    """A progress bar over the points on stderr, where that is a terminal; yields what moves it on by one."""
    if not wanted or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [TextColumn("points"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as line:
        task = line.add_task("points", total=total)
        yield lambda: line.advance(task)


def _show(rows: Sequence[Row], *, to_stderr: bool, quiet: bool) -> None:
    """The table, or with --quiet a line for the best of each program; to_stderr: stdout holds the CSV or JSON."""
    from toast_cli.report.style import make_console, plain_text, render
    from toast_cli.report.sweep_table import best_line, sweep_tables

    stream = sys.stderr if to_stderr else sys.stdout
    if not quiet:
        console = make_console(stream)
        stream.write(render(sweep_tables(rows, console.width), console))
    elif not to_stderr:
        for row in rows:
            if row.best:
                print(plain_text(best_line(row), stream.encoding), file=stream)


def _exit_code(rows: Sequence[Row]) -> int:
    statuses = {row.status for row in rows}
    if "fits" in statuses:
        return OK
    return DOES_NOT_FIT if "does-not-fit" in statuses else BAD_INPUT
