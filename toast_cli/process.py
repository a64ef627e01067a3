"""What a run spares its process: both take a tenth of the time on a program of some ten thousand ops, and change nothing that is written."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn


@contextmanager
def without_cycle_collection() -> Iterator[None]:
    """Millions of small objects that all live to the end: looking for cycles among them makes big programs superlinear."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def leave(code: int) -> NoReturn:
    """Ends the process here and now: nothing waits for those objects to be taken apart one by one."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
    os._exit(code)
