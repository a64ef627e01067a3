"""Memory over time: at all moments at which it can peak for exact answers, at a selection of them for quick ones.

Memory can only peak where an array has been allocated since the last one was freed. A search evaluates a few hundred of
those moments: the highest under a handful of reference plans, and an even spread. If the exact profile of a plan peaks
at another moment, that moment is added and the search continues (a cutting-plane scheme).

Some bytes of arrays that live briefly take no device memory at all (see `on_chip`). With `alive` bytes,
`brief` of them in such arrays, the bytes in device memory are max(alive - capacity, alive - brief). So each moment has
two sums, of all bytes less the capacity and of the bytes not brief; the peak is the largest of all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toast_cli.compiler.liveness import Lives

SELECTED = 256
_SPREAD = 64

Intervals = list[tuple[int, int]]  # first and last tick, both included
# [intervals] first entry of a profile covered, first entry after it, bytes
Spans = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


class Timeline:
    """candidates: [candidates] ticks at which memory can peak. moments: [moments] those a search evaluates;
    ascending."""

    def __init__(self, lives: Lives, on_chip_bytes: float = 0.0) -> None:
        self.candidates: NDArray[np.int64] = np.array(_peak_candidates(lives), np.int64)
        self.moments: NDArray[np.int64] = self.candidates
        self._selected = self.moments
        self._on_chip_bytes = on_chip_bytes

    def start(self) -> NDArray[np.float64]:
        """[entries] bytes in device memory at the selected moments, before any array is alive."""
        count = len(self.moments)
        if not self._on_chip_bytes:
            return np.zeros(count)
        return np.repeat([-self._on_chip_bytes, 0.0], count)

    def nothing(self) -> NDArray[np.float64]:
        """[entries] zeros."""
        return np.zeros(2 * len(self.moments) if self._on_chip_bytes else len(self.moments))

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

    def add(self, candidate: int) -> bool:
        """Adds a candidate, by number, to the selected moments; False if it is among them already."""
        moment = self.candidates[candidate]
        if moment in self.moments:
            return False
        self.moments = np.sort(np.append(self.moments, moment))
        return True

    def reset(self) -> bool:
        """Resets the moments to the initial selection; False if none were added."""
        grown = len(self.moments) > len(self._selected)
        self.moments = self._selected
        return grown

    def presence(self, intervals: Intervals, brief: Intervals) -> NDArray[np.float64]:
        """[entries] how many of the intervals cover each moment; brief: the intervals that can be spent in on-chip
        memory."""
        covered = self._covered(intervals)
        if not self._on_chip_bytes:
            return covered
        return np.concatenate([covered, covered - self._covered(brief) if brief else covered])

    def _covered(self, intervals: Intervals) -> NDArray[np.float64]:
        pairs = np.array(intervals, np.int64).reshape(-1, 2)
        born = np.searchsorted(np.sort(pairs[:, 0]), self.moments, "right")
        dead = np.searchsorted(np.sort(pairs[:, 1]), self.moments, "left")
        return (born - dead).astype(np.float64)

    def spans(self, intervals: Intervals, sizes: list[float], brief: Intervals, brief_sizes: list[float]) -> Spans:
        """Intervals in numbers of candidates, each with its size in bytes; `brief`: those of them that can be spent in
        on-chip memory."""
        first, last = self._numbers(intervals)
        held = np.array(sizes, np.float64)
        if not self._on_chip_bytes:
            return first, last, held
        row = len(self.candidates) + 1
        start, end = self._numbers(brief)
        return (
            np.concatenate([first, first + row, start + row]), np.concatenate([last, last + row, end + row]),
            np.concatenate([held, held, -np.array(brief_sizes, np.float64)]),
        )  # fmt: skip

    def _numbers(self, intervals: Intervals) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        pairs = np.array(intervals, np.int64).reshape(-1, 2)
        first = np.searchsorted(self.candidates, pairs[:, 0], "left")
        return first, np.searchsorted(self.candidates, pairs[:, 1], "right")

    def profile(self, parts: list[Spans]) -> NDArray[np.float64]:
        """[candidates] bytes in device memory: each interval counts with its size."""
        alive, lasting = self.profiles(parts)
        return np.maximum(alive - self._on_chip_bytes, lasting)

    def shared(self, parts: dict[str, Spans]) -> dict[str, NDArray[np.float64]]:
        """The profile of all parts together, split by part: each gets its share of the on-chip memory."""
        profiles = {name: self.profiles([spans]) for name, spans in parts.items()}
        brief = sum((alive - lasting for alive, lasting in profiles.values()), np.zeros(len(self.candidates)))
        out = np.maximum(brief - self._on_chip_bytes, 0.0) / np.maximum(brief, 1.0)  # fraction that does not fit
        return {name: lasting + out * (alive - lasting) for name, (alive, lasting) in profiles.items()}

    def profiles(self, parts: list[Spans]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[candidates] bytes of all arrays, and of those that are not brief."""
        count, rows = len(self.candidates), 2 if self._on_chip_bytes else 1
        if not parts:
            return np.zeros(count), np.zeros(count)
        first, last, sizes = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        length = rows * (count + 1)
        change = np.bincount(first, sizes, length) - np.bincount(last, sizes, length)
        alive, *lasting = np.cumsum(change.reshape(rows, count + 1), axis=1)[:, :count]
        return alive, lasting[0] if lasting else alive


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
