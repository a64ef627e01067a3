"""Ctrl-C as a request: the first asks the search to end with its best plan, the second ends the program.

A KeyboardInterrupt can be raised at any point and leave inconsistent state behind, also between two searches. So while
a search runs, the first Ctrl-C only sets a flag, which the search checks between two evaluations.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Stop:
    """A signal handler.

    `asked`: whether Ctrl-C was pressed. patient: whether a second Ctrl-C is to raise KeyboardInterrupt.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.asked = False
        self._patient = patient

    def __call__(self, *_: object) -> None:
        if self.asked and not self._patient:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def interruptible() -> Iterator[Stop]:
    """Makes Ctrl-C set `Stop.asked` while the block runs. Nested blocks share the outer `Stop`. Outside the main
    thread, which alone receives signals, the flag is never set."""
    before = signal.getsignal(signal.SIGINT)
    if isinstance(before, Stop):
        yield before
        return
    stop = Stop()
    try:
        signal.signal(signal.SIGINT, stop)
    except ValueError:  # not the main thread
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
