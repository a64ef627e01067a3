"""What toast has other processes do, tests do in their own: programs are read, compiled and run here, equal ones once.

`in_child` stands in for that of `toast_cli.base.children`, `ask` for that of `toast_cli.ask_xla.child`, `load` for that
of `toast_cli.frontend`, and the others for those of `toast_cli.xla.running`.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.child import ask as ask_in_new_process
from toast_cli.frontend import Source
from toast_cli.frontend import load as load_anew
from toast_cli.xla import running

new_devices, compile_anew = running.cpu_devices, running.compile_program
compilations = evaluations = 0  # programs that were to be compiled, and plans that were evaluated, so far
one_at_a_time = threading.Lock()  # standard error is the process's


def in_child(task: Callable[..., Any], *arguments: Any, **_limits: int) -> Any:
    """What the function returns, which is the same for the same arguments."""
    return answer(task, *arguments)


@lru_cache(maxsize=256)
def answer(task: Callable[..., Any], *arguments: Any) -> Any:
    return task(*arguments)


def load(path: str, *, content: bytes, kernels: str | None = None, dims: Sequence[str] = (), **facts: Any) -> Source:
    """Command after command reads the same few programs, and analyses them."""
    if kernels is not None:  # a file, whose content may change
        return load_anew(path, content=content, kernels=kernels, dims=dims, **facts)
    return loaded(path, content, dims=tuple(dims), **facts)


@lru_cache(maxsize=16)
def loaded(path: str, content: bytes, **facts: Any) -> Source:
    return load_anew(path, content=content, **facts)


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


def ask(task: Callable[..., Any], *arguments: Any, timeout_seconds: float = 600.0) -> tuple[Any, str] | Failure:
    """What the function returns, and what the compiler wrote to standard error."""
    from toast_cli.ask_xla import compile

    if any(getattr(argument, "platform", "cpu") != "cpu" for argument in arguments):
        return ask_in_new_process(task, *arguments, timeout_seconds=timeout_seconds)
    with one_at_a_time, tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        here = SimpleNamespace(mkdtemp=partial(tempfile.mkdtemp, dir=folder))
        try:
            with patch.object(compile, "tempfile", here):
                answer = task(*arguments)
        except Exception as error:  # any error of the compiler's bindings is the verdict
            return Failure(str(error))
        finally:
            for thread in threading.enumerate():
                if thread.name.endswith("(compile_it)"):  # a compiler that is abandoned still writes to the folder
                    thread.join()
            os.dup2(kept, 2)
            os.close(kept)
        log.seek(0)
        return answer if isinstance(answer, Failure) else (answer, log.read().decode("utf-8", "replace"))
