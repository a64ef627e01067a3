"""Exposed communication of a step in which collectives overlap with compute.

A latency-hiding scheduler starts a collective as soon as its operands are available and waits for it where its result
is first read. Links carry one collective at a time, the one that is needed first. While the cores compute, each link
carries the collectives that have started; the rest of a collective when its result is read is exposed: the cores wait,
and the links of other axes go on. A synchronous collective starts where it is read.

In: the kernels of one part of the program (all outside of loops, or one trip of a loop's body) and its collectives.
Out: seconds for which the cores wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """Collectives.

    Attributes:
        ready, due: [collectives] moments at which each can start and by which it must be done.
        seconds: [collectives]
        axes: [collectives] mesh axes whose links each uses, one bit for each axis.
    """

    ready: NDArray[np.int64]
    due: NDArray[np.int64]
    seconds: NDArray[np.float64]
    axes: NDArray[np.int64]


def exposed_seconds(moments: NDArray[np.int64], kernel_seconds: NDArray[np.float64], sent: Sent) -> float:
    """Seconds that the cores wait for collectives.

    Args:
        moments: [kernels] when each kernel runs, ascending. kernel_seconds: [kernels]. A collective that is due at the
            moment of a kernel is done before it, one that is ready at that moment starts before it.
    """
    order = np.lexsort((sent.ready, sent.due))
    ready, due = sent.ready[order], sent.due[order]
    axes, left = sent.axes[order].tolist(), sent.seconds[order].tolist()
    events = np.unique(np.concatenate([ready, due]))
    computed = np.concatenate([[0.0], np.cumsum(kernel_seconds)])
    moment = computed[np.searchsorted(moments, events, "left")].tolist()
    waiting = np.argsort(-ready, kind="stable").tolist()
    starts, ends = ready.tolist(), due.tolist()
    links = _Links(axes, left)
    exposed, before, ending, count = 0.0, 0.0, 0, len(left)
    for event, now in zip(events.tolist(), moment, strict=True):
        if now > before:
            links.carry(now - before)
            before = now
        while waiting and starts[waiting[-1]] <= event:
            number = waiting.pop()
            if ends[number] > event:
                links.start(number)
        while ending < count and ends[ending] <= event:
            rest, left[ending] = left[ending], 0.0
            if rest > 0.0:
                exposed += rest
                links.carry(rest, axes[ending])
            ending += 1
    return exposed


class _Links:
    """The links of all axes, and the started collectives that wait for them, in the order in which they are needed.

    axes: [collectives] as in `Sent`. left: [collectives] seconds that each still takes; `carry` reduces them.
    """

    def __init__(self, axes: list[int], left: list[float]) -> None:
        self._axes, self._left, self._all = axes, left, 0
        self._started: dict[int, list[int]] = {}  # axes -> heap of collectives
        for some in axes:
            self._all |= some
            self._started[some] = []

    def start(self, number: int) -> None:
        heappush(self._started[self._axes[number]], number)

    def carry(self, seconds: float, busy: int = 0) -> None:
        """Lets the links that are not busy carry collectives for `seconds`."""
        left, spans = self._left, [(seconds, self._all & ~busy)]  # time that is left, and the axes that have it
        while spans:
            seconds, idle = spans.pop()
            first = len(left)
            for axes, started in self._started.items():
                while started and left[started[0]] <= 0.0:
                    heappop(started)
                if started and started[0] < first and not axes & ~idle:
                    first = started[0]
            if first == len(left):
                continue
            carried = min(left[first], seconds)
            left[first] -= carried
            others = idle & ~self._axes[first]
            if carried < seconds:
                spans.append((seconds - carried, idle))
            if others and others != idle:
                spans.append((carried, others))
