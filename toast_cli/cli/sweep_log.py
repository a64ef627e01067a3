"""Results of a sweep as JSON lines, one appended as each point is done, so that a killed sweep can resume.

Enters: a path. Leaves: the rows in it by key, and a place to append more.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from toast_cli.errors import UsageError
from toast_cli.inputs import REPORT_BYTES, limit_of, too_large

if TYPE_CHECKING:
    from toast_cli.report.sweep_table import SweepRow

OPTION = "--jsonl"


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
    from toast_cli.report.sweep_table import ROW_SCHEMA, STATUSES, SweepRow

    try:
        facts: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict) or facts.get("schema") != ROW_SCHEMA:
        return None
    known = {field.name: str(field.type) for field in fields(SweepRow)}
    kept = {key: value for key, value in facts.items() if key in known}
    if not all(_is(known[key], value) for key, value in kept.items()) or kept.get("status") not in STATUSES:
        return None
    try:
        return SweepRow(**kept)
    except TypeError:  # a field is missing
        return None


def _is(wanted: str, value: Any) -> bool:
    """True if a JSON value has a field's type, given by its name: `str`, `int`, `float | None`."""
    if value is None:
        return "None" in wanted
    if "float" in wanted or "int" in wanted:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, bool if wanted == "bool" else str)
