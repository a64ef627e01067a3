"""Functions that worker processes import by name in tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from toast_cli.base.errors import InputError


def job(what: str) -> str:
    """Does what its name says."""
    if what == "bad input":
        raise InputError("no such file", where="model.mlir")
    if what == "bug":
        raise KeyError("x")
    if what == "exit":
        os._exit(7)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what.startswith("slow "):
        time.sleep(20)
        Path(what.removeprefix("slow ")).touch()
    return what.upper()


class Counter:
    """Numbers the items that one process has worked on."""

    def __init__(self) -> None:
        self.done = 0

    def __call__(self, item: str) -> str:
        self.done += 1
        return f"{job(item)} {self.done}"
