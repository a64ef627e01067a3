"""Runs independent items in processes of their own: items and a function go in, results or reasons come out.

One process per item, so that a crash, or full memory, affects no other item.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from toast_cli.cli.exits import debug_wanted
from toast_cli.errors import ToastError
from toast_cli.process import end_with_parent

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class PointFailure:
    """The reason why an item has no result, in a sentence, and a hint if there is one."""

    reason: str
    hint: str = ""


@dataclass(frozen=True)
class _Done(Generic[Result]):
    """Wraps a worker's result, so that any result can be told from a failure."""

    result: Result


def run_all(
    items: Sequence[Task], work: Callable[[Task], Result], jobs: int
) -> Iterator[tuple[int, Result | PointFailure]]:
    """Runs `work` on every item, `jobs` at a time; yields (number of the item, its result) as each is done.

    `work` is a function of a module (workers import it by name); items and results are picklable. If the caller stops
    early, the workers are ended.
    """
    context = multiprocessing.get_context("spawn")
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    waiting = list(enumerate(items))[::-1]
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, item = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=_work_on, args=(theirs, work, item), daemon=True)
                process.start()
                theirs.close()  # the worker holds the only other end, so its death reads as the end of the stream
                running[ours] = (number, process)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                number, ended = running.pop(ready)
                yield number, _collect(ready, ended)
    finally:
        for connection, (_, unfinished) in running.items():
            unfinished.terminate()
            unfinished.join()
            connection.close()


def _collect(connection: Connection, process: BaseProcess) -> Any:
    """The worker's answer, or, if its end of the pipe closed without one, how it died."""
    try:
        sent = connection.recv()
    except EOFError:
        sent = None
    connection.close()
    process.join()
    if isinstance(sent, _Done):
        return sent.result
    return (
        sent if isinstance(sent, PointFailure) else PointFailure(f"the process died ({_cause(process.exitcode or 0)})")
    )


def _work_on(connection: Connection, work: Callable[[Task], Result], item: Task) -> None:
    """In the worker: does the work and sends the result."""
    # Ctrl-C reaches every process of the terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    end_with_parent(None if parent is None else parent.pid)
    try:
        connection.send(_Done(work(item)))
    except ToastError as error:
        connection.send(failure_of(error))
    except Exception as error:
        if debug_wanted([]):
            traceback.print_exc()
        connection.send(PointFailure(f"internal error: {type(error).__name__}: {error}"))


def failure_of(error: ToastError) -> PointFailure:
    return PointFailure(f"{error.where}: {error.what}" if error.where else error.what, error.hint)


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
