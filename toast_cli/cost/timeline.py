"""The moments at which memory can peak, and how many arrays of an item are alive at each.

Memory can only peak where something has been made since the last time something died; between such moments nothing changes
for the worse. Long programs have more of them than are worth looking at one by one: then neighbouring moments share a
bucket, in which an array counts as alive if it is alive at any of them (an upper bound).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from toast_cli.cost.liveness import Lives
from toast_cli.program.model import Program

MAX_MOMENTS = 4096


class Timeline:
    """moments: [moments] half steps, ascending (the last of each bucket)."""

    def __init__(self, program: Program, lives: Lives, limit: int = MAX_MOMENTS) -> None:
        candidates = _peak_candidates(lives)
        width = -(-len(candidates) // limit)
        self._edges: NDArray[np.int64] = np.array(candidates, np.int64)
        self._width = max(1, width)
        self.moments: list[int] = candidates[self._width - 1 :: self._width]
        if candidates and (not self.moments or self.moments[-1] != candidates[-1]):
            self.moments.append(candidates[-1])

    def presence(self, intervals: Iterable[tuple[int, int]]) -> NDArray[np.float32]:
        """[moments] how many of the intervals (first, last half step, included) cover each moment."""
        count = len(self.moments)
        pairs = np.array(list(intervals), np.int64).reshape(-1, 2)
        first = np.searchsorted(self._edges, pairs[:, 0], "left")
        last = np.searchsorted(self._edges, pairs[:, 1], "right") - 1
        covers = last >= first
        change = np.zeros(count + 1, np.float32)
        np.add.at(change, first[covers] // self._width, 1.0)
        np.add.at(change, last[covers] // self._width + 1, -1.0)
        return np.cumsum(change)[:count].astype(np.float32)


def _peak_candidates(lives: Lives) -> list[int]:
    births = {first for intervals in lives.intervals for first, _ in intervals} | {2 * op for op, _ in lives.read_at}
    deaths = {last for intervals in lives.intervals for _, last in intervals} | set(lives.read_at.values()) | {lives.end}
    found: list[int] = []
    born = False
    for moment in sorted(births | deaths):
        born = born or moment in births
        if born and moment in deaths:
            found.append(moment)
            born = False
    return found
