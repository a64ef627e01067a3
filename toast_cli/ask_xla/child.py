"""Runs a function that may abort its process in a child process.

`ask` runs `python -m toast_cli.ask_xla.child FOLDER`, which reads the function's name and arguments from stdin and
writes what it returned to a file in the folder. A child that reports an error, dies or does not end is a `Failure`.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toast_cli.base.children import end_with_parent, function_named

ANSWER = "answer.pickle"
LONGEST = 1e6  # longest wait for an answer in seconds; the system counts milliseconds in 31 bits
_ABORT_REASON = re.compile(r"Check failed: (.*)|LLVM ERROR: (.*)|^F\d{4} (?!.*Check failed).*\] (.*)", re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """Why there is no answer. `aborted`: the compiler ended the process, or did not end in time."""

    reason: str
    aborted: bool = False


def ask(task: str, *arguments: Any, timeout_seconds: float = 600.0) -> tuple[Any, str] | Failure:
    """Calls the function `task` ("package.module:function") with these arguments in a child process. Returns what it
    returned, and the child's standard error. The child's temporary files are removed."""
    with tempfile.TemporaryDirectory(prefix="toast-") as folder:
        try:
            child = subprocess.run(
                command_of(folder),
                input=pickle.dumps((task, arguments)),
                env=environment(folder),
                capture_output=True,
                timeout=min(timeout_seconds, LONGEST),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Failure(f"no answer within {timeout_seconds:g} seconds", aborted=True)
        log = child.stderr.decode("utf-8", "replace")
        if child.returncode != 0:
            return Failure(abort_reason(child.returncode, log), aborted=True)
        answer = pickle.loads((Path(folder) / ANSWER).read_bytes())
        return answer if isinstance(answer, Failure) else (answer, log)


def command_of(folder: str) -> list[str]:
    """The command line that starts a child."""
    return [sys.executable, "-P", "-m", "toast_cli.ask_xla.child", folder]


def environment(folder: str) -> dict[str, str]:
    """The parent's environment, without an accelerator, with warnings on standard error, and with temporary files in
    the folder."""
    quiet = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "1", "TMPDIR": folder}
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


def free_bytes() -> int:
    """Free memory without swapping; all memory if the system does not report it."""
    try:
        found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# -- in the child -----------------------------------------------------------------------------------------------------


def work(request: bytes, folder: Path) -> None:
    """Calls the function and writes what it returned, or the reason why there is nothing."""
    try:
        task, arguments = pickle.loads(request)
        answer = function_named(task)(*arguments)
    except Exception as error:  # any error of the compiler's bindings is the verdict
        answer = Failure(str(error))
    (folder / ANSWER).write_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    from toast_cli.ask_xla import child  # under its own name, which is that of a pickled `Failure`

    end_with_parent()
    child.work(sys.stdin.buffer.read(), Path(sys.argv[1]))
    sys.stderr.flush()
    os._exit(0)  # a compiler may still be at work in another thread
