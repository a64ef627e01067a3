"""Ctrl-C as a request: the first asks the search to end with its best plan, the second ends the program.

A KeyboardInterrupt that strikes anywhere leaves half-made states behind, and strikes between two searches as well as in
them. So while a search runs the first Ctrl-C only sets a flag, which is looked at between two evaluations.
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
    """While this lasts Ctrl-C sets `Stop.asked`. Where one is in charge already it is that one; outside the main
    thread, which alone receives signals, it never is asked.
    """
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
