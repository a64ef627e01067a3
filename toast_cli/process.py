"""Settings of the process itself: garbage collection, how it ends, and what happens when its parent ends."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

INTERRUPTED = 130  # 128 + SIGINT
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def without_cycle_collection() -> Iterator[None]:
    """Disables Python's cyclic garbage collector while the block runs.

    A run makes millions of small objects that all live to its end. Searching them for cycles makes big programs
    superlinear.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def leave(code: int) -> NoReturn:
    """Ends the process at once, without freeing its objects one by one."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, never there, or nobody reads it any more
            stream.flush()
    os._exit(code)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the block is over. It protects operations that must not be left half-way: a fork, whose hooks
    print exceptions and go on, and loading native modules, which end the process if one of their imports fails.

    This replaces the signal handler instead of masking the signal: with a mask, another thread would receive the
    signal, and Python would run the handler in this thread all the same.
    """
    handler = signal.getsignal(signal.SIGINT)
    pressed: list[int] = []
    try:
        signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    except ValueError:  # not the main thread, which alone is interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def interrupt_at_once(*_: object) -> NoReturn:
    """Ctrl-C handler while the command is being loaded, when there is no state to clean up."""
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def open_standard_streams() -> None:
    """Opens the descriptors 0, 1 and 2 if the parent process has closed them.

    Otherwise the next file that is opened would get one of these numbers and be written to as if it were the terminal.
    Reading from a closed stdin and writing to a closed stdout fail, as they should; output to a closed stderr is
    discarded.
    """
    for descriptor, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, flags)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def end_with_parent(parent: int | None = None) -> None:
    """Asks the system to kill this process when the thread that started it ends.

    `parent` is the parent's process id, if it is known; if the parent has changed already, this process ends at once.
    It does nothing outside Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # it ended before the line above
        os._exit(1)
