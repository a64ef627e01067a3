"""Runs work that may abort the process in a child process.

`ask` writes the files of a request to a temporary folder, runs `python -m toast_cli.ask_xla.child TASK FOLDER`, and
reads the answer back. A child that reports an error, dies or does not end is returned as a `Failure`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from toast_cli.base.children import end_with_parent

FAILED = 3
REQUEST, ANSWER, ERROR = "request.json", "answer.json", "error.txt"
LONGEST = 1e6  # longest wait for an answer in seconds; the system counts milliseconds in 31 bits
_ABORT_REASON = re.compile(r"Check failed: (.*)|LLVM ERROR: (.*)|^F\d{4} (?!.*Check failed).*\] (.*)", re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """Why there is no answer. `aborted`: the compiler ended the process, or did not end in time."""

    reason: str
    aborted: bool = False


@dataclass(frozen=True)
class Answer:
    """A child's answer: plain data, the folder's files by name, and its standard error."""

    facts: dict[str, Any]
    files: dict[str, bytes]
    log: str = ""


def ask(
    task: str, request: dict[str, Any], files: dict[str, bytes], *, timeout_seconds: float = 600.0
) -> Answer | Failure:
    """Runs a task in a child process: the function `{task}_task` of `toast_cli.ask_xla.{task}`."""
    with tempfile.TemporaryDirectory(prefix="toast-") as name:
        folder = Path(name)
        (folder / REQUEST).write_text(json.dumps(request))
        for file, content in files.items():
            (folder / file).write_bytes(content)
        command = command_of(task, name)
        try:
            child = subprocess.run(
                command, env=environment(), capture_output=True, timeout=min(timeout_seconds, LONGEST), check=False
            )
        except subprocess.TimeoutExpired:
            return Failure(f"no answer within {timeout_seconds:g} seconds", aborted=True)
        if child.returncode == FAILED:
            return Failure((folder / ERROR).read_text())
        if child.returncode != 0:
            return Failure(abort_reason(child.returncode, child.stderr.decode("utf-8", "replace")), aborted=True)
        written = {
            path.name: path.read_bytes()
            for path in folder.iterdir()
            if path.is_file() and path.name not in (REQUEST, ANSWER, *files)
        }
        log = child.stderr.decode("utf-8", "replace")
        return Answer(json.loads((folder / ANSWER).read_text()), written, log)


def free_bytes() -> int:
    """Free memory without swapping; all memory if the system does not report it."""
    try:
        found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def command_of(task: str, folder: str) -> list[str]:
    """The command line that starts a child."""
    return [sys.executable, "-P", "-m", "toast_cli.ask_xla.child", task, folder]


def environment() -> dict[str, str]:
    """The parent's environment, without an accelerator, and with warnings on standard error."""
    quiet = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "1"}
    # By default libtpu asks a metadata server for the machine's type, and locks the chips.
    libtpu = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return {**os.environ, **quiet, **libtpu}


def abort_reason(code: int, stderr: str) -> str:
    """The reason in a dead child's standard error, or the signal that ended it."""
    found = _ABORT_REASON.search(stderr)
    if found:
        return next(text for text in found.groups() if text).strip()
    lines = stderr.strip().splitlines()
    return lines[-1] if lines else f"the compiler ended with signal {-code}"


# -- in the child -----------------------------------------------------------------------------------------------------


def work(task: str, folder: Path) -> int:
    """Runs a task and writes its answer, or the reason why there is none; returns the exit code."""
    try:
        run = getattr(import_module(f"toast_cli.ask_xla.{task}"), f"{task}_task")
        facts = run(json.loads((folder / REQUEST).read_text()), folder)
    except Exception as error:  # any error of the compiler's bindings is the verdict
        (folder / ERROR).write_text(str(error))
        return FAILED
    (folder / ANSWER).write_text(json.dumps(facts))
    return 0


if __name__ == "__main__":
    end_with_parent()
    code = work(sys.argv[1], Path(sys.argv[2]))
    sys.stderr.flush()
    os._exit(code)  # a compiler may still be at work in another thread
