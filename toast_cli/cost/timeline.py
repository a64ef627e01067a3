"""Memory over time. All moments at which it can peak for exact answers, a selection of them for quick ones.

Memory can only peak where something has been made since the last time something died. Of those moments a search looks at a
few hundred: the highest under a handful of reference plans, and an even spread. The exact profile of the plan a search
returns tells whether a moment was missed; it is then added and the search goes on (a cutting-plane scheme).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toast_cli.cost.liveness import Lives

SELECTED = 256
_SPREAD = 64

Intervals = list[tuple[int, int]]  # first and last half step, both included
# [intervals] first candidate covered, first candidate after it, bytes
Spans = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


class Timeline:
    """candidates: [candidates] half steps at which memory can peak. moments: [moments] those a search looks at; ascending."""

    def __init__(self, lives: Lives) -> None:
        self.candidates: NDArray[np.int64] = np.array(_peak_candidates(lives), np.int64)
        self.moments: NDArray[np.int64] = self.candidates
        self._selected = self.moments

    def select(self, profiles: list[NDArray[np.float64]]) -> None:
        """Keeps the highest moments of each profile [candidates], and an even spread."""
        count = len(self.candidates)
        if count <= SELECTED:
            return
        keep = set(np.linspace(0, count - 1, _SPREAD).astype(int).tolist())
        each = (SELECTED - _SPREAD) // max(1, len(profiles))
        for profile in profiles:
            keep.update(np.argsort(-profile, kind="stable")[:each].tolist())
        self.moments = self._selected = self.candidates[sorted(keep)]

    def keep_highest(self, profile: NDArray[np.float64], count: int) -> None:
        """Looks only at the `count` highest moments of one profile [candidates]."""
        self.moments = self._selected = self.candidates[np.sort(np.argsort(-profile, kind="stable")[:count])]

    def add(self, candidate: int) -> bool:
        """Looks at one more candidate (by number) from now on; False if it was looked at already."""
        moment = self.candidates[candidate]
        if moment in self.moments:
            return False
        self.moments = np.sort(np.append(self.moments, moment))
        return True

    def reset(self) -> bool:
        """Looks at the selected moments only; False if it does already."""
        grown = len(self.moments) > len(self._selected)
        self.moments = self._selected
        return grown

    def presence(self, intervals: Intervals) -> NDArray[np.float64]:
        """[moments] how many of the intervals cover each moment."""
        pairs = np.array(intervals, np.int64).reshape(-1, 2)
        born = np.searchsorted(np.sort(pairs[:, 0]), self.moments, "right")
        dead = np.searchsorted(np.sort(pairs[:, 1]), self.moments, "left")
        return (born - dead).astype(np.float64)

    def spans(self, intervals: Intervals, sizes: list[float]) -> Spans:
        """Intervals in numbers of candidates, each with its size in bytes."""
        pairs = np.array(intervals, np.int64).reshape(-1, 2)
        first = np.searchsorted(self.candidates, pairs[:, 0], "left")
        last = np.searchsorted(self.candidates, pairs[:, 1], "right")
        return first, last, np.array(sizes, np.float64)

    def profile(self, parts: list[Spans]) -> NDArray[np.float64]:
        """[candidates] bytes alive: each interval counts with its size."""
        count = len(self.candidates)
        if not parts:
            return np.zeros(count)
        first, last, sizes = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        change = np.bincount(first, sizes, count + 1) - np.bincount(last, sizes, count + 1)
        return np.cumsum(change)[:count]


def _peak_candidates(lives: Lives) -> list[int]:
    # Copies, and partial results before and while they are reduced, come and go between the arrays themselves.
    lasts = {last for intervals in lives.intervals for _, last in intervals}
    births = {first for intervals in lives.intervals for first, _ in intervals} | {last + 1 for last in lasts}
    births.update(lives.times)
    deaths = lasts | {lives.end}
    deaths.update(lives.times, lives.read_at.values(), lives.deaths, lives.program_deaths)
    found: list[int] = []
    born = False
    for moment in sorted(births | deaths):
        born = born or moment in births
        if born and moment in deaths:
            found.append(moment)
            born = False
    return found
