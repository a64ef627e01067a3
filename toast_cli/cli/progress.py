"""A progress line on stderr while the pipeline works: stage, best cost so far, evaluations, time."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toast_cli.confirm.model import ConfirmedRow

# Stage, fraction done (0 to 1), best cost so far in seconds (inf: none), evaluations, seconds since the search began.
Progress = Callable[[str, float, float, int, float], None]

_SECONDS_BETWEEN_UPDATES = 0.1


@contextmanager
def progress_line(*, wanted: bool) -> Iterator[Progress | None]:
    """The callback that updates the line; None, and no line, if it is not wanted or stderr is not a terminal."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Line

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    unicode = console.encoding.lower().startswith("utf")
    columns = [
        SpinnerColumn("dots" if unicode else "line"),
        TextColumn("{task.description}"),
        BarColumn(20),
        TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(),
    ]
    with Line(*columns, console=console, transient=True) as line:
        task = line.add_task("load", total=1.0, facts="")
        stage, shown_at, owner = "", -math.inf, os.getpid()

        def update(name: str, fraction: float, best_seconds: float, evaluations: int, elapsed_seconds: float) -> None:
            nonlocal stage, shown_at
            if os.getpid() != owner:  # a search process forked from this one must not draw the line
                return
            now = time.monotonic()
            if name == stage and now - shown_at < _SECONDS_BETWEEN_UPDATES:
                return
            stage, shown_at = name, now
            line.update(task, description=name, completed=fraction, facts=search_facts(best_seconds, evaluations))

        yield update


def search_facts(best_seconds: float, evaluations: int) -> str:
    """`best 23.4 ms, 12,345 evaluations`; empty before the first evaluation."""
    from toast_cli.quantities import format_count, format_seconds

    if evaluations == 0:
        return ""
    best = f"best {format_seconds(best_seconds)}, " if math.isfinite(best_seconds) else ""
    return f"{best}{format_count(evaluations)} evaluations"


@contextmanager
def counted(total: int, what: str, *, wanted: bool) -> Iterator[Callable[[], object]]:
    """A progress bar over `total` of `what` on stderr, if that is a terminal; yields a function that advances it by
    one."""
    if not wanted or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Line

    columns = [TextColumn(what), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn()]
    with Line(*columns, console=Console(stderr=True), transient=True) as line:
        task = line.add_task(what, total=total)
        yield lambda: line.advance(task)


def say_confirmed(place: int, count: int, row: ConfirmedRow) -> None:
    """A line on stderr for each plan that a compiler has answered about."""
    from toast_cli.report.confirmation import one_line

    print(f"confirm {place} of {count}: {one_line(row)}", file=sys.stderr)
