"""Calls a function for each of several items, each in a process of its own: items and a function go in, results or
reasons come out.

One process per item, so that a crash, or full memory, affects no other item.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from toast_cli.cli.exits import debug_wanted
from toast_cli.errors import ToastError
from toast_cli.process import end_with_parent

Task = TypeVar("Task")
Result = TypeVar("Result")

_CHILD = "import os, sys; sys.path[:] = sys.argv[1].split(os.pathsep); from toast_cli.cli.workers import serve; serve()"


@dataclass(frozen=True)
class PointFailure:
    """The reason why an item has no result, in a sentence, and a hint if there is one."""

    reason: str
    hint: str = ""


def run_all(
    items: Sequence[Task], work: Callable[[Task], Result], jobs: int
) -> Iterator[tuple[int, Result | PointFailure]]:
    """Runs `work` on every item, `jobs` at a time; yields (number of the item, its result) as each is done. If the
    caller stops early, the workers are ended. See `run_alone`."""
    children: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(jobs) as pool:
        numbers = {pool.submit(run_alone, item, work, children): number for number, item in enumerate(items)}
        try:
            for done in as_completed(numbers):
                yield numbers[done], done.result()
        finally:
            for waiting in numbers:
                waiting.cancel()
            while wait(numbers, timeout=0.05).not_done:  # a process may begin just now
                for child in list(children):
                    child.kill()


def run_alone(
    item: Task, work: Callable[[Task], Result], children: set[subprocess.Popen[bytes]] | None = None
) -> Result | PointFailure:
    """The result of `work` on one item, in a new process.

    `work` is a function of a module (the process imports it by name); item and result are picklable.

    Args:
        children: holds the process while it runs.
    """
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    command = [sys.executable, "-c", _CHILD, os.pathsep.join(sys.path), str(os.getpid())]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    running = set() if children is None else children
    running.add(child)
    try:
        answer, _ = child.communicate(pickle.dumps((work, item)))
    finally:
        running.discard(child)
    try:
        result: Result | PointFailure = pickle.loads(answer)
    except (EOFError, pickle.UnpicklingError):
        return PointFailure(f"the process died ({_cause(child.returncode)})")
    return result


def serve() -> None:
    """In the process: reads the task from stdin and writes its result to stdout. What the task prints goes to
    stderr."""
    # Ctrl-C reaches every process of the terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(int(sys.argv[2]))
    task, answers = sys.stdin.buffer.read(), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    work, item = pickle.loads(task)
    try:
        result: Any = work(item)
    except ToastError as error:
        result = failure_of(error)
    except Exception as error:
        if debug_wanted([]):
            traceback.print_exc()
        result = PointFailure(f"internal error: {type(error).__name__}: {error}")
    with answers:
        pickle.dump(result, answers)


def failure_of(error: ToastError) -> PointFailure:
    return PointFailure(f"{error.where}: {error.what}" if error.where else error.what, error.hint)


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
