"""Asks XLA in a new process, which it may abort: an answer, or a `Failure` that says why there is none."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toast_cli.base.children import ChildError, abort_reason, outcomes, scratch, text_in

LONGEST = 1e6  # longest wait for an answer in seconds; the system counts milliseconds in 31 bits


@dataclass(frozen=True)
class Failure:
    """Why there is no answer. `aborted`: the compiler ended the process, or did not end in time."""

    reason: str
    aborted: bool = False


def ask(task: Callable[..., Any], *arguments: Any, timeout_seconds: float = 600.0) -> tuple[Any, str] | Failure:
    """Calls a function of a module with these arguments in a new process. Returns what it returned, and the process's
    standard error. Its temporary files are removed."""
    timed_out = threading.Event()
    with tempfile.TemporaryDirectory(prefix="toast-") as folder, scratch() as stderr:
        running: set[Any] = set()

        def end() -> None:
            timed_out.set()
            for process in list(running):
                process.kill()

        timer = threading.Timer(min(timeout_seconds, LONGEST), end)
        timer.daemon = True
        timer.start()
        try:
            (outcome,) = outcomes(task, [arguments], environment=environment(folder), log=stderr, running=running)
        except ChildError as error:  # there is no process
            return Failure(error.reason, aborted=True)
        finally:
            timer.cancel()
            timer.join()
        log = text_in(stderr)
    if outcome.kind == "value":
        return outcome.facts if isinstance(outcome.facts, Failure) else (outcome.facts, log)
    if outcome.kind == "died" and timed_out.is_set():
        return Failure(f"no answer within {timeout_seconds:g} seconds", aborted=True)
    if outcome.kind == "died":
        last = (log.strip().splitlines() or [f"the compiler ended with signal {-outcome.facts}"])[-1]
        return Failure(abort_reason(log) or last, aborted=True)
    return Failure(str(outcome.error) if outcome.kind == "told" else outcome.facts[1])


def environment(folder: str) -> dict[str, str]:
    """The parent's environment, without an accelerator, with warnings on standard error, and with temporary files in
    the folder."""
    quiet = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "1", "TMPDIR": folder}
    # By default libtpu asks a metadata server for the machine's type, and locks the chips.
    libtpu = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return {**os.environ, **quiet, **libtpu}


def free_bytes() -> int:
    """Free memory without swapping; all memory if the system does not report it."""
    try:
        match = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        match = None
    return int(match[1]) * 1024 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
