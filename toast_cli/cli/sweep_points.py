"""The points of a sweep: programs, specifications, shapes, memory limits and seeds go in, `SweepPoint` values come out.

Each has a key by which its result is found in the file of those that are done, JSON lines, so that a killed sweep can
resume.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from toast_cli.errors import ToastError, UsageError
from toast_cli.inputs import REPORT_BYTES, limit_of, too_large, typed, whole_number

if TYPE_CHECKING:
    from toast_cli.pipeline import Request
    from toast_cli.report.sweep_table import SweepRow

ALL_SHAPES = "all"
ANY_SIZE = "*"
_SEEDS_HINT = "write e.g. 3, 0-9 or 0,2,5-7"
MOST_SEEDS = 10_000

OPTION = "--jsonl"


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
    digests = {path: _digest(path) for request in requests for path in (request.program, request.mesh)}
    found: dict[str, SweepPoint] = {}
    for request in requests:
        for point in _shaped(shapes, request):
            for limit in limits:
                for seed in seeds:
                    one = replace(point.request, memory_limit=limit, seed=seed)
                    key = key_of(one, digests[one.program], digests[one.mesh])
                    found.setdefault(key, SweepPoint(one, key, point.error))
    return list(found.values())


def parse_seeds(text: str) -> list[int]:
    """`3` -> [3], `0-2,7` -> [0, 1, 2, 7]. Raises UsageError."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        begin, end = whole_number(first), whole_number(last if dash else first)
        if begin is None or end is None:
            raise UsageError(
                f'"{part.strip():.40}" is neither a seed nor a range of seeds', where="--seeds", hint=_SEEDS_HINT
            )
        if not 0 <= end - begin < MOST_SEEDS:
            raise UsageError(f'"{part.strip()}" is not a range', where="--seeds", hint=_SEEDS_HINT)
        seeds += range(begin, end + 1)
    return list(dict.fromkeys(seeds))


def key_of(request: Request, program_digest: str, mesh_digest: str) -> str:
    """Sixteen hexadecimal digits that identify the point, including the content of its files."""
    from toast_cli import __version__

    facts = {
        **asdict(request),
        "program content": program_digest,
        "mesh content": mesh_digest,
        "version": __version__,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


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
    from toast_cli.hardware import load_spec, parse_shape

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
            found = spec.mesh_shapes() if wildcards is None else fill_in(wildcards, spec.devices)
            for sizes in found:
                yield SweepPoint(
                    replace(request, mesh_shape=",".join(f"{axis}={size}" for axis, size in sizes.items()))
                )
            if not found:
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
    return [
        {name: chosen[name] if size is None else size for name, size in sizes.items()}
        for factors in _factors(devices // fixed, len(open_axes))
        for chosen in [dict(zip(open_axes, factors, strict=True))]
    ]


def _factors(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every ordered way to write `count` as a product of `parts` factors of one or more."""
    if parts == 1:
        yield (count,)
        return
    for first in range(count, 0, -1):
        if count % first == 0:
            for rest in _factors(count // first, parts - 1):
                yield (first, *rest)


def run_point(point: SweepPoint) -> SweepRow:
    """In a worker: partitions and returns the figures."""
    from toast_cli.pipeline import partition
    from toast_cli.report.sweep_table import row_of

    if point.error:
        raise UsageError(point.error)
    began = time.perf_counter()
    report = partition(point.request, annotated=False).report
    return row_of(point.request.program, point.request.mesh, report, time.perf_counter() - began, point.key)


class SweepLog:
    """An open file of results. `finished`: key -> the row of a point that need not be repeated."""

    def __init__(self, file: IO[bytes], finished: dict[str, SweepRow]) -> None:
        self.finished = finished
        self._file = file

    def append(self, row: SweepRow) -> None:
        """Appends one line; it is handed to the system whole before this returns."""
        self._file.write(line_of(row))
        self._file.flush()


@contextmanager
def open_log(path: str, *, fresh: bool = False) -> Iterator[SweepLog]:
    """The log at `path` (`-`: stdout, which is only written), locked against other sweeps; `fresh` empties it first.

    An incomplete last line is removed. Raises UsageError for a file with other content, or one that another sweep is
    writing.
    """
    if path == "-":
        sys.stdout.flush()
        yield SweepLog(sys.stdout.buffer, {})
        return
    with _opened(path) as file:
        if fresh:
            file.truncate(0)
        if os.fstat(file.fileno()).st_size > limit_of(REPORT_BYTES):
            raise too_large(path, limit_of(REPORT_BYTES))
        finished, whole = _read(file.read(), path)
        file.truncate(whole)  # removes a line that a killed sweep did not finish
        yield SweepLog(file, finished)


def line_of(row: SweepRow) -> bytes:
    from toast_cli.report.sweep_table import ROW_SCHEMA

    facts = {key: value for key, value in asdict(row).items() if key != "best"}
    return (json.dumps({"schema": ROW_SCHEMA, **facts}, ensure_ascii=False, allow_nan=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise UsageError(f"{path} is not a file", where=OPTION, hint="give a file, or - for stdout")
        file = Path(path).open("a+b")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", where=OPTION) from None
    with file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait for it, or give another file"
            raise UsageError(f"another sweep is writing {path}", where=OPTION, hint=hint) from None
        except OSError:  # a file system without locks
            pass
        file.seek(0, os.SEEK_SET)
        yield file


def _read(content: bytes, path: str) -> tuple[dict[str, SweepRow], int]:
    """(the finished rows by key, the last of equal keys; bytes of complete lines).

    Failed points are not finished.
    """
    from toast_cli.report.sweep_table import FAILED

    finished: dict[str, SweepRow] = {}
    whole = content.rfind(b"\n") + 1
    for number, line in enumerate(content[:whole].splitlines(), 1):
        row = _row(line)
        if row is None:
            hint = "--fresh would overwrite it; give another file if it is not one of toast sweep's"
            raise UsageError("this is not a result of a sweep", where=f"{path}:{number}", hint=hint)
        if row.status == FAILED:
            finished.pop(row.key, None)
        else:
            finished[row.key] = row
    if whole == 0 and content and not content.startswith(b'{"schema"'):
        raise UsageError("these are not the results of a sweep", where=path, hint="give another file")
    return finished, whole


def _row(line: bytes) -> SweepRow | None:
    """The row in a line, without fields unknown to this version. None if the line is not a row."""
    from toast_cli.report.sweep_table import ROW_SCHEMA, SweepRow

    try:
        facts: Any = json.loads(line)
        if not isinstance(facts, dict) or facts.get("schema") != ROW_SCHEMA:
            return None
        row: SweepRow = typed(SweepRow, facts, "the row")
    except (ValueError, RecursionError):
        return None
    return row
