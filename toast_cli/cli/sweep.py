"""`toast sweep`: programs x sizes x specifications x shapes x limits x seeds, in one table. A process reads a program
once, and searches its points one after the other, each from the plan of a point beside it.

Each point has a key by which its result is found in the file of those that are done, JSON lines, so that a killed
sweep can resume.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from toast_cli.base.errors import ToastError, UsageError
from toast_cli.base.files import (
    REPORT_BYTES,
    Target,
    check_targets,
    key_of,
    limit_of,
    read_whole_number,
    too_large,
    typed,
    write_target,
)
from toast_cli.cli import options
from toast_cli.cli.options import BestBy
from toast_cli.cli.running import (
    BAD_INPUT,
    DOES_NOT_FIT,
    INTERRUPTED,
    OK,
    PointFailure,
    counted,
    run_all,
    say,
)
from toast_cli.request import OPTIONS, bytes_or_none, whole_number

if TYPE_CHECKING:
    from toast_cli.frontend import Source
    from toast_cli.pipeline import Outcome
    from toast_cli.report.command_tables import SweepRow
    from toast_cli.request import Request


@options.with_options(
    *(
        "prices",
        *options.SEARCH,
        "keep_shardings",
        "as_written",
        "pins",
        "runs",
        "tactics",
        "strategy",
        "pipeline",
        "minimise",
        "subject_to",
        "fit",
    ),
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
    dim: Annotated[
        list[str] | None,
        typer.Option(
            "--dim",
            metavar="NAME=SIZE",
            help=f"{OPTIONS['dims'].help.removesuffix('.')}; several sizes, b=64,128, are points of their own.",
        ),
    ] = None,
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
    csv: Annotated[str | None, options.file("Write the table as CSV; - for stdout.")] = None,
    json: Annotated[str | None, options.file("Write the table as JSON; - for stdout.")] = None,
    best_by: Annotated[
        BestBy | None,
        options.words(
            BestBy,
            "--best-by",
            "Begin with the point that is best in this (default: step_time, or tokens a second if sizes differ); "
            "price: of a million tokens or samples; device_time: devices x step time.",
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(metavar="N", parser=whole_number(1, "--jobs"), help="Number of points at a time."),
    ] = 1,
    quiet: options.Quiet = False,
    **given: Any,
) -> int:
    """Plan every PROGRAM of all sizes for every mesh SPEC, shape, memory limit and seed, and tabulate the costs.

    Run again with the same --jsonl FILE, a sweep that was interrupted continues where it stopped. Exit code 0: all
    points are done and every program has one that fits; 3: a program has none; 2: a point failed (its row says why).
    See docs/howto/sweep.md.
    """
    named = (("--csv", csv), ("--json", json), ("--jsonl", jsonl))
    targets = {option: Target(option, path) for option, path in named if path is not None}
    if "-" in programs:
        raise UsageError("a sweep reads each program more than once, so not from stdin", hint="save it to a file")
    if fresh and (jsonl is None or jsonl == "-"):
        raise UsageError("--fresh empties a file of results", hint="name it with --jsonl FILE")
    check_targets(list(targets.values()), [*programs, *mesh])
    requests = [
        replace(options.make_request(program, spec, given), dims=dims)
        for program in programs
        for spec in mesh
        for dims in sizes_of(dim or ())
    ]
    from toast_cli.hardware import load_spec

    if best_by == BestBy.price and not any(load_spec(name, requests[0].prices).chip_price for name in mesh):
        hint = "give it with --price CHIP=PRICE, e.g. --price v5p=4.2, or as `price` in SPEC"
        raise UsageError("no chip has a price", where="--best-by price", hint=hint)
    limits = [bytes_or_none(text, "--memory-limit") for text in memory_limit or (None,)]
    points = points_of(requests, mesh_shape, limits, parse_seeds(seeds))

    from toast_cli.report import command_tables

    with open_log(jsonl, fresh=fresh) as log:
        rows, interrupted = _run(points, jobs, log, quiet)
    rows = command_tables.ranked(rows, best_by.value if best_by is not None else None)
    for option, write in (("--csv", command_tables.to_csv), ("--json", command_tables.to_json)):
        if option in targets:
            write_target(targets[option], write(rows))
    _show(rows, to_stderr=any(target.is_stdout for target in targets.values()), quiet=quiet)
    if interrupted:
        on = f"; the same command goes on from {jsonl}" if jsonl not in (None, "-") else ""
        say("note", f"interrupted: {len(rows)} of {len(points)} points are done{on}")
        return INTERRUPTED
    if any(row.status == "failed" for row in rows):
        return BAD_INPUT
    fitting = {row.program for row in rows if row.status in ("fits", "unsure")}
    return OK if all(row.program in fitting for row in rows) else DOES_NOT_FIT


def _run(points: Sequence[SweepPoint], jobs: int, log: SweepLog, quiet: bool) -> tuple[list[SweepRow], bool]:
    """(the rows in the order of the points, True if Ctrl-C ended it early)."""
    done = {number: log.finished[point.key] for number, point in enumerate(points) if point.key in log.finished}
    if done and not quiet:
        say("note", f"{len(done)} of {len(points)} points are done already")
    numbers = [number for number in range(len(points)) if number not in done]
    waiting = [points[number] for number in numbers]
    # Points of one machine are neighbours, too, if there are processes for several chains of them.
    chains = [(p.request.program, p.request.seed, p.request.mesh if jobs > 1 else "") for p in waiting]
    results = run_all(waiting, PointRunner, jobs, chains)
    interrupted = False
    try:
        for place, result in counted(results, len(waiting), "points", wanted=not quiet):
            row = done[numbers[place]] = _finished_row(waiting[place], result)
            log.append(row)
    except KeyboardInterrupt:
        interrupted = True
    return [done[number] for number in sorted(done)], interrupted


def _finished_row(point: SweepPoint, result: SweepRow | PointFailure) -> SweepRow:
    from toast_cli.report.command_tables import FAILED, SweepRow

    if not isinstance(result, PointFailure):
        return result
    request = point.request
    reason = f"{result.reason}; {result.hint}" if result.hint else result.reason
    return replace(
        SweepRow(request.program, request.mesh, request.mesh_shape or "", FAILED, reason),
        seed=request.seed,
        key=point.key,
        dims=",".join(request.dims),
    )


def _show(rows: Sequence[SweepRow], *, to_stderr: bool, quiet: bool) -> None:
    """Prints the table, or with --quiet a line for the best point, and for the first failure of each program.

    to_stderr: stdout holds the CSV or JSON.
    """
    from toast_cli.report.command_tables import best_line, sweep_blocks
    from toast_cli.report.style import make_console, plain_text, render

    stream = sys.stderr if to_stderr else sys.stdout
    if not quiet:
        console = make_console(stream)
        stream.write(render(sweep_blocks(rows, console.width), console))
    elif not to_stderr:
        failed: set[str] = set()
        for row in rows:
            if row.best:
                print(plain_text(best_line(row), stream.encoding), file=stream)
            elif row.status == "failed" and row.program not in failed:
                failed.add(row.program)
                say("error", f"{row.program} on {row.mesh}: {row.error}")


# ---------------------------------------------------------------- points
# The points of a sweep: programs, specifications, shapes, memory limits and seeds go in, `SweepPoint` values come out.
#
# Each has a key by which its result is found in the file of those that are done, JSON lines, so that a killed sweep
# can resume.

ALL_SHAPES = "all"
ANY_SIZE = "*"
_SEEDS_HINT = "write e.g. 3, 0-9 or 0,2,5-7"
MOST_SEEDS = 10_000

JSONL_OPTION = "--jsonl"


@dataclass(frozen=True)
class SweepPoint:
    """One point of the sweep; `error` if it is known beforehand that it cannot run.

    key: depends on the program's and the specification's content, all options, and toast's version.
    """

    request: Request
    key: str = ""
    error: str = ""


def points_of(
    requests: Sequence[Request], shapes: str | None, limits: Sequence[int | None], seeds: Sequence[int]
) -> list[SweepPoint]:
    """Every request for every shape, memory limit and seed, in this order, each once."""
    from toast_cli import __version__

    digests = {path: _digest(path) for request in requests for path in (request.program, request.mesh)}
    points: dict[str, SweepPoint] = {}
    for request in requests:
        for point in _shaped(shapes, request):
            for limit in limits:
                for seed in seeds:
                    varied = replace(point.request, memory_limit=limit, seed=seed)
                    key = key_of(b"", varied, digests[varied.program], digests[varied.mesh], __version__)[:16]
                    points.setdefault(key, SweepPoint(varied, key, point.error))
    return list(points.values())


def sizes_of(texts: Sequence[str]) -> list[tuple[str, ...]]:
    """Sizes of symbolic dimensions: `b=64,128` and `s=4096` -> [("b=64", "s=4096"), ("b=128", "s=4096")].

    Raises UsageError for what are no sizes.
    """
    from toast_cli.candidates.largest_size import split_dims

    named = [(name, sizes.split(",")) for name, _, sizes in (text.partition("=") for text in texts)]
    combinations = [*product(*([f"{name.strip()}={size.strip()}" for size in sizes] for name, sizes in named))]
    for dims in combinations:
        split_dims(dims)
    return combinations


def parse_seeds(text: str) -> list[int]:
    """`3` -> [3], `0-2,7` -> [0, 1, 2, 7]. Raises UsageError."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        begin, end = read_whole_number(first), read_whole_number(last if dash else first)
        if begin is None or end is None:
            raise UsageError(
                f'"{part.strip():.40}" is neither a seed nor a range of seeds', where="--seeds", hint=_SEEDS_HINT
            )
        if not 0 <= end - begin < MOST_SEEDS:
            raise UsageError(f'"{part.strip()}" is not a range', where="--seeds", hint=_SEEDS_HINT)
        seeds += range(begin, end + 1)
    return list(dict.fromkeys(seeds))


def _digest(path: str) -> str:
    """Hash of a file's content; empty if there is no such file (a built-in specification, or nothing)."""
    try:
        if not Path(path).is_file():  # reading a pipe would consume its content
            return ""
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return ""


def _shaped(shapes: str | None, request: Request) -> Iterator[SweepPoint]:
    """The request with every shape. A specification that cannot be read makes one failing point."""
    from toast_cli.hardware import load_spec, parse_shape, written_shape

    texts = [None] if shapes is None else [text.strip() for text in shapes.split(";")]
    for text in texts:
        if text is None or text == "auto":
            yield SweepPoint(replace(request, mesh_shape=text))
        elif text != ALL_SHAPES and ANY_SIZE not in text:
            parse_shape(text, "--mesh-shape")
            yield SweepPoint(replace(request, mesh_shape=text))
        else:
            wildcards = None if text == ALL_SHAPES else _parse_wildcards(text)
            try:
                spec = load_spec(request.mesh)
            except ToastError as error:
                yield SweepPoint(replace(request, mesh_shape=text), error=str(error))
                continue
            choices = spec.mesh_shapes() if wildcards is None else fill_in(wildcards, spec.devices)
            for sizes in choices:
                yield SweepPoint(replace(request, mesh_shape=written_shape(sizes)))
            if not choices:
                none = f"no shape {text} has the {spec.devices} devices of {spec.name}"
                yield SweepPoint(replace(request, mesh_shape=text), error=none)


def _parse_wildcards(text: str) -> dict[str, int | None]:
    """`data=*,model=4` -> {"data": None, "model": 4}."""
    from toast_cli.hardware import parse_shape

    sizes = parse_shape(text.replace(ANY_SIZE, "1"), "--mesh-shape")
    parts = [part.partition("=") for part in text.split(",")]
    return {name.strip(): None if size.strip() == ANY_SIZE else sizes[name.strip()] for name, _, size in parts}


def fill_in(sizes: dict[str, int | None], devices: int) -> list[dict[str, int]]:
    """Every assignment of sizes to the axes without one (None), such that the product of all is `devices`; larger first
    sizes first."""
    fixed = prod(size for size in sizes.values() if size is not None)
    open_axes = [name for name, size in sizes.items() if size is None]
    if devices % fixed:
        return []
    from toast_cli.hardware.topology import divisors

    left = devices // fixed
    return [
        {name: chosen[name] if size is None else size for name, size in sizes.items()}
        for factors in product(reversed(divisors(left)), repeat=len(open_axes))
        if prod(factors) == left
        for chosen in [dict(zip(open_axes, factors, strict=True))]
    ]


class PointRunner:
    """In a worker: partitions points, and returns their figures. A program of some sizes is read once, and a search
    begins at the plan of the point before on the same machine, or else of the last one of the same sizes."""

    def __init__(self) -> None:
        self._sources: dict[object, Source] = {}  # program and sizes -> the program
        self._near: dict[object, Outcome] = {}  # machine, or sizes -> the last outcome

    def __call__(self, point: SweepPoint) -> SweepRow:
        from toast_cli.pipeline import sized
        from toast_cli.report.command_tables import row_of

        if point.error:
            raise UsageError(point.error)
        request, began = point.request, time.perf_counter()
        outcome = sized(request, partial(self._planned, request.iterations))
        return row_of(request.program, request.mesh, outcome.report, time.perf_counter() - began, point.key)

    def _planned(self, iterations: int | None, request: Request, near: Outcome | None, _: bool) -> Outcome:
        """The outcome of a request; beside another point it gets a short search, unless it is one of fewer plans than
        the `iterations` that the user gave."""
        from toast_cli.pipeline import briefly, plan_given

        read, machine = (request.program, request.dims), (request.program, request.mesh, request.mesh_shape)
        beside = self._near.get(machine) or self._near.get(read)
        if near is None and beside is not None:
            near, request = beside, briefly(request) if request.iterations == iterations else request
        outcome = plan_given(request, source=self._sources.get(read), neighbour=near)
        self._sources[read] = outcome.original or outcome.source
        self._near[machine] = self._near[read] = outcome
        return outcome


class SweepLog:
    """An open file of results. `finished`: key -> the row of a point that need not be repeated."""

    def __init__(self, file: IO[bytes] | None, finished: dict[str, SweepRow]) -> None:
        self.finished = finished
        self._file = file

    def append(self, row: SweepRow) -> None:
        """Appends one line; it is handed to the system whole before this returns."""
        from toast_cli.report.command_tables import ROW_SCHEMA

        if self._file is None:
            return
        facts = {key: value for key, value in asdict(row).items() if key not in ("best", "front")}
        line = json.dumps({"schema": ROW_SCHEMA, **facts}, ensure_ascii=False, allow_nan=False) + "\n"
        self._file.write(line.encode("utf-8", "backslashreplace"))
        self._file.flush()


@contextmanager
def open_log(path: str | None, *, fresh: bool = False) -> Iterator[SweepLog]:
    """The log at `path` (`-`: stdout, which is only written), locked against other sweeps; `fresh` empties it first.
    Without a path, a log that keeps nothing.

    An incomplete last line is removed. Raises UsageError for a file with other content, or one that another sweep is
    writing.
    """
    if path is None or path == "-":
        sys.stdout.flush()
        yield SweepLog(None if path is None else sys.stdout.buffer, {})
        return
    if Path(path).exists() and not Path(path).is_file():
        raise UsageError(f"{path} is not a file", where=JSONL_OPTION, hint="give a file, or - for stdout")
    try:
        file = Path(path).open("a+b")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", where=JSONL_OPTION) from None
    with file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait for it, or give another file"
            raise UsageError(f"another sweep is writing {path}", where=JSONL_OPTION, hint=hint) from None
        except OSError:  # a file system without locks
            pass
        if fresh:
            file.truncate(0)
        file.seek(0)
        content = file.read(limit_of(REPORT_BYTES) + 1)
        if len(content) > limit_of(REPORT_BYTES):
            raise too_large(path, limit_of(REPORT_BYTES))
        finished, complete_bytes = _read(content, path)
        file.truncate(complete_bytes)  # removes a line that a killed sweep did not finish
        yield SweepLog(file, finished)


def _read(content: bytes, path: str) -> tuple[dict[str, SweepRow], int]:
    """(the finished rows by key, the last of equal keys; bytes of complete lines).

    Failed points are not finished.
    """
    from toast_cli.report.command_tables import FAILED

    finished: dict[str, SweepRow] = {}
    complete_bytes = content.rfind(b"\n") + 1
    for number, line in enumerate(content[:complete_bytes].splitlines(), 1):
        row = _stored_row(line)
        if row is None:
            hint = "--fresh would overwrite it; give another file if it is not one of toast sweep's"
            raise UsageError("this is not a result of a sweep", where=f"{path}:{number}", hint=hint)
        if row.status == FAILED:
            finished.pop(row.key, None)
        else:
            finished[row.key] = row
    if complete_bytes == 0 and content and not content.startswith(b'{"schema"'):
        raise UsageError("these are not the results of a sweep", where=path, hint="give another file")
    return finished, complete_bytes


def _stored_row(line: bytes) -> SweepRow | None:
    """The row in a line, without fields unknown to this version. None if the line is not a row."""
    from toast_cli.report.command_tables import ROW_SCHEMA, SweepRow

    try:
        facts: Any = json.loads(line)
        if not isinstance(facts, dict) or facts.get("schema") != ROW_SCHEMA:
            return None
        row: SweepRow = typed(SweepRow, facts, "the row")
    except (ValueError, RecursionError):
        return None
    return row
