"""Runs work that may abort the process in a child process.

`ask` writes the files of a request to a temporary folder, runs `python -m toast_cli.verify.worker TASK FOLDER`, and
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
from pathlib import Path
from typing import Any

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
    """Runs one task of `TASKS` in a child process."""
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


def command_of(task: str, folder: str) -> list[str]:
    """The command line that starts a child."""
    return [sys.executable, "-P", "-m", "toast_cli.verify.worker", task, folder]


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
