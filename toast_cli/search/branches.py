"""Branching: splits the open assignments into cases by the sharding in which one array is made.

Dual ascent, and a solver's relaxation, mix ways that need different shardings of the same array, at a price below that
of any assignment. Fixing the sharding of an array with many readers ends that: most cases are excluded at once, and the
others are solved sooner than the whole.

In: ways, and a dual ascent that has run. Out: the cases in which some assignment may still be fast enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from toast_cli.plan.sharding import Sharding
from toast_cli.search.dual_ascent import FEW_PASSES, DualAscent
from toast_cli.search.ways import PatternWays


def cases_of(
    ways: PatternWays, ascent: DualAscent, enough: float, ended: Callable[[], bool] = lambda: False
) -> list[DualAscent]:
    """The cases in which an assignment may take less than `enough` seconds, the most promising first; only `ascent`
    itself where there is nothing to branch on, or time is up before all cases are bounded."""
    found: list[DualAscent] = []
    for place, taken in _shardings(ways, ascent).items():
        case = ascent.within(place[0], taken, enough)
        case.run(FEW_PASSES, ended)
        if ended():
            return [ascent]
        if case.bound < enough:
            found.append(case)
    return sorted(found, key=lambda case: case.bound)


def _shardings(ways: PatternWays, ascent: DualAscent) -> dict[tuple[int, Sharding], np.ndarray]:
    """(pattern, sharding of its result) -> mask of its ways with that sharding, for the array with most bytes read
    among those that can still have several shardings."""
    read: dict[tuple[int, int], float] = defaultdict(float)
    for item in ways.items.arrays:
        if not item.free:
            read[item.pattern, item.result] += item.bytes * len(item.readers) * len(item.values)
    for pattern, result in sorted(read, key=lambda place: -read[place]):
        made = [way.op_sharding.shardings[result] for way in ways.of_pattern[pattern]]
        still = {at for at, left in zip(made, ascent.left[pattern], strict=True) if left}
        if len(still) > 1:
            return {(pattern, at): np.array([it == at for it in made]) for at in sorted(still)}
    return {(0, ()): np.ones(len(ascent.left[0]), dtype=bool)}
