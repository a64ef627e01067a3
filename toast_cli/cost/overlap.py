"""Exposed communication of a step in which collectives overlap with compute.

A latency-hiding scheduler starts a collective as soon as its operands are available and waits for it where its result
is first read. Links carry one collective at a time, the one that is needed first. While the cores compute, each link
carries the collectives that have started; the rest of a collective when its result is read is exposed: the cores wait,
and the links of other axes go on. A synchronous collective starts where it is read.

Enters: the kernels of one part of the program (all outside of loops, or one trip of a loop's body) and its collectives.
Leaves: seconds for which the cores wait.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective: ready: moment at which its operands are available; due: moment by which it must be done; axes: mesh
    axes whose links it uses."""

    ready: int
    due: int
    seconds: float
    axes: tuple[int, ...]


def exposed_seconds(
    moments: NDArray[np.int64] | Sequence[int], kernel_seconds: NDArray[np.float64] | Sequence[float], sent: list[Sent]
) -> float:
    """Seconds that the cores wait for collectives.

    Args:
        moments: [kernels] when each kernel runs, ascending. kernel_seconds: [kernels]. A collective that is due at the
            moment of a kernel is done before it, one that is ready at that moment starts before it.
    """
    computed = np.concatenate([[0.0], np.cumsum(np.asarray(kernel_seconds, np.float64))])
    due = sorted(sent, key=lambda one: (one.due, one.ready))
    ready = sorted(range(len(due)), key=lambda number: due[number].ready)
    events = np.unique(np.array([(one.ready, one.due) for one in due], np.int64))
    left = [one.seconds for one in due]
    links = len({axis for one in due for axis in one.axes})
    started: list[int] = []  # ascending, so the earliest due comes first
    exposed, before, starting, ending = 0.0, 0.0, 0, 0
    for event, now in zip(events.tolist(), computed[np.searchsorted(moments, events, "left")].tolist(), strict=True):
        _carry(started, due, left, now - before, links)
        before = now
        while starting < len(due) and due[ready[starting]].ready <= event:
            if due[ready[starting]].due > event:
                insort(started, ready[starting])
            starting += 1
        while ending < len(due) and due[ending].due <= event:
            rest, left[ending] = left[ending], 0.0
            exposed += rest
            _carry(started, due, left, rest, links, due[ending].axes)
            ending += 1
    return exposed


def _carry(
    started: list[int], due: Sequence[Sent], left: list[float], seconds: float, links: int, busy: tuple[int, ...] = ()
) -> None:
    """Lets the links that are not busy carry the started collectives for `seconds`."""
    while started and left[started[0]] <= 0.0:
        del started[0]
    idle = dict.fromkeys(busy, 0.0)  # axis -> seconds that its links have left
    spent = len(idle)
    for number in started if seconds > 0.0 else ():
        if spent == links:
            break
        carried = min(left[number], *[idle.get(axis, seconds) for axis in due[number].axes])
        if carried > 0.0:
            left[number] -= carried
            for axis in due[number].axes:
                idle[axis] = idle.get(axis, seconds) - carried
                spent += idle[axis] <= 0.0
