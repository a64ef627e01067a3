"""Stands in for `subprocess` in `toast_cli.verify.child`: tasks for XLA:CPU are done in this process."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from subprocess import TimeoutExpired as TimeoutExpired
from typing import Any

one_at_a_time = threading.Lock()  # standard error is the process's


@cache
def cpu_devices(count: int) -> list[Any]:
    """Clients of XLA never end their threads, so there is one for each number of devices."""
    from toast_cli.xla.running import cpu_devices

    return cpu_devices(count)


def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[bytes]:
    """The child's exit code, and what the compiler wrote to standard error."""
    from toast_cli.verify.child import work

    task, folder = command[-2], Path(command[-1])
    if "toast_cli.verify.child" not in command or task == "ahead" or asks_a_target(task, folder):
        return subprocess.run(command, **settings)
    with one_at_a_time, tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            code = work(task, folder)
            for thread in threading.enumerate():
                if thread.name.endswith("(compile_it)"):  # a compiler that is abandoned still writes to the folder
                    thread.join()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        log.seek(0)
        return subprocess.CompletedProcess(command, code, b"", log.read())


def asks_a_target(task: str, folder: Path) -> bool:
    return task == "partitioned" and b'"target": null' not in (folder / "request.json").read_bytes()
