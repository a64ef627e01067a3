"""What toast has other processes do, tests do in their own: programs are read, compiled and run here, equal ones once.

`in_child` stands in for that of `toast_cli.base.children`, `run` for `subprocess` in `toast_cli.ask_xla.child`, and the
others for those of `toast_cli.xla.running`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from importlib import import_module
from pathlib import Path
from subprocess import TimeoutExpired as TimeoutExpired
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from toast_cli.xla import running

new_devices, compile_anew = running.cpu_devices, running.compile_program
compilations = evaluations = 0  # programs that were to be compiled, and plans that were evaluated, so far
one_at_a_time = threading.Lock()  # standard error is the process's


def in_child(task: str, *arguments: Any, **_limits: int) -> bytes:
    """What the function returns, which is the same for the same arguments."""
    return answer(task, *arguments)


@lru_cache(maxsize=256)
def answer(task: str, *arguments: Any) -> bytes:
    module, _, name = task.partition(":")
    found: bytes = getattr(import_module(module), name)(*arguments)
    return found


@cache
def cpu_devices(count: int) -> list[Any]:
    """A client of XLA has some twenty threads, and waits for them when the garbage collector ends it, in the middle of
    another test: so there is one for each number of devices, which stays."""
    return new_devices(count)


def compile_program(
    program: bytes, devices: list[Any], *, shardy: bool, settings: Mapping[str, str | bool] | None = None
) -> Any:
    """Several forms and plans are compared with one original program, and compiled beside it again and again."""
    global compilations
    compilations += 1
    if settings:  # they ask for files
        return compile_anew(program, devices, shardy=shardy, settings=settings)
    return compiled(program, tuple(devices), shardy)


@lru_cache(maxsize=8)
def compiled(program: bytes, devices: tuple[Any, ...], shardy: bool) -> Any:
    return compile_anew(program, list(devices), shardy=shardy)


def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[bytes]:
    """The child's exit code, and what the compiler wrote to standard error."""
    from toast_cli.ask_xla import compile
    from toast_cli.ask_xla.child import work

    if "toast_cli.ask_xla.child" not in command or asks_a_target(settings["input"]):
        return subprocess.run(command, **settings)
    with one_at_a_time, tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        here = SimpleNamespace(mkdtemp=partial(tempfile.mkdtemp, dir=command[-1]))
        try:
            with patch.object(compile, "tempfile", here):
                work(settings["input"], Path(command[-1]))
            for thread in threading.enumerate():
                if thread.name.endswith("(compile_it)"):  # a compiler that is abandoned still writes to the folder
                    thread.join()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        log.seek(0)
        return subprocess.CompletedProcess(command, 0, b"", log.read())


def asks_a_target(request: bytes) -> bool:
    _, arguments = pickle.loads(request)
    return any(getattr(argument, "platform", "cpu") != "cpu" for argument in arguments)
