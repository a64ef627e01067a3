"""Chooses the cuts between segments of the forward pass that the backward pass rematerialises one by one.

Values alive at a cut are kept, and all others in a segment are recomputed from them (Chen et al., "Training Deep Nets
with Sublinear Memory Cost", 2016). The cuts minimise the bytes of the kept values plus the largest segment: they fall
between the layers of a deep network.

In: when each value of the forward pass is made and read. Out: the cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_STEP = 1.2  # ratio of successive bounds on the largest segment


@dataclass(frozen=True)
class Lifetimes:
    """Lifetimes of the values of the forward pass.

    Attributes:
        made: statement that computes it. last: last statement of the forward pass that reads it. saved: whether the
            backward pass reads it.
    """

    made: NDArray[np.int64]  # [values]
    last: NDArray[np.int64]  # [values]
    saved: NDArray[np.bool_]  # [values]
    bytes: NDArray[np.int64]  # [values]


@dataclass(frozen=True)
class Checkpoints:
    """Chosen cuts. cuts: statements before which a segment ends. kept: bytes alive at the cuts. largest: bytes that the
    largest segment saves."""

    cuts: tuple[int, ...]
    kept: int
    largest: int


def checkpoints(lifetimes: Lifetimes, end: int) -> Checkpoints:
    """The best cuts of a forward pass of `end` statements."""
    cuts = _candidates(lifetimes, end)
    kept, inner = _costs(lifetimes, [*cuts, end])
    kept[-1] = 0
    cap, best = float(np.max(np.diagonal(inner, 1))), Checkpoints((), 0, int(inner[0, -1]))
    while cap < best.kept + best.largest:
        total, chosen = _chain(kept, inner, cap)
        largest = int(max(inner[a, b] for a, b in pairwise(chosen)))
        if total + largest < best.kept + best.largest:
            best = Checkpoints(tuple(cuts[k] for k in chosen[1:-1]), int(total), largest)
        cap = max(_STEP * cap, cap + 1)
    return best


def _candidates(lifetimes: Lifetimes, end: int) -> list[int]:
    """Candidate cuts: 0, then the local minima of the live bytes."""
    change = np.zeros(end + 2, dtype=np.int64)
    np.add.at(change, lifetimes.made + 1, lifetimes.bytes)
    np.add.at(change, np.maximum(lifetimes.last, lifetimes.made) + 1, -lifetimes.bytes)
    alive = np.cumsum(change)[: end + 1]
    found, falling = [0], False
    for place in range(1, end):
        falling = falling or alive[place] < alive[place - 1]
        if falling and alive[place + 1] > alive[place]:
            found.append(place)
            falling = False
    return found


def _costs(lifetimes: Lifetimes, cuts: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """([later cut, cut] bytes made after the cut and alive at the later one, [cut, later cut] bytes saved between them
    and not alive at the later one)."""
    count = len(cuts)
    kept, inner = (np.zeros((count, count), dtype=np.int64) for _ in range(2))
    part = np.searchsorted(cuts, lifetimes.made, side="right") - 1  # [values] last cut before its statement
    for later in range(1, count):
        before = lifetimes.made < cuts[later]
        alive = before & (lifetimes.last >= cuts[later])
        for table, which in ((kept, alive), (inner, before & ~alive & lifetimes.saved)):
            sums = np.bincount(part[which], lifetimes.bytes[which], minlength=count)
            table[:, later] = np.cumsum(sums[::-1])[::-1]
    return kept.T, inner


def _chain(kept: NDArray[np.int64], inner: NDArray[np.int64], cap: float) -> tuple[float, list[int]]:
    """(bytes kept, cuts) with the fewest bytes kept such that no segment saves more than `cap` bytes."""
    count = len(inner)
    total = np.full(count, np.inf)
    total[0], before = 0, np.zeros(count, dtype=np.int64)
    for later in range(1, count):
        sums = np.where(inner[:later, later] <= cap, total[:later] + kept[later, :later], np.inf)
        before[later] = np.argmin(sums)
        total[later] = sums[before[later]]
    chosen = [count - 1]
    while chosen[-1]:
        chosen.append(int(before[chosen[-1]]))
    return float(total[-1]), chosen[::-1]
