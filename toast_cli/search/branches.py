"""Cases that together are all that is open: by how one array is sharded where it is made.

Dual ascent, and a solver's relaxation, mix ways that go with different shardings of the same array, at a price that no
assignment has. Where it is decided how an array that many ops read lies, that mixing ends: most cases are out at once,
and what is left of the others is solved sooner than the whole.

Enters: ways, and a dual ascent that has run. Leaves: the cases in which some assignment may still be fast enough.
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
    """The cases in which an assignment may take less than `enough` seconds, the most promising first; the one case of
    `ascent` where there is nothing to tell apart, or time is up before all are looked at."""
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
    """(pattern, sharding of what it makes) -> which of its ways are that, for the array that is read most, in bytes, of
    those that can still lie in several."""
    read: dict[tuple[int, int], float] = defaultdict(float)
    for item in ways.items.arrays:
        if not item.free:
            read[item.pattern, item.result] += item.bytes * len(item.readers) * len(item.values)
    for pattern, result in sorted(read, key=lambda place: -read[place]):
        made = [way.iteration.shardings[result] for way in ways.of_pattern[pattern]]
        still = {at for at, left in zip(made, ascent.left[pattern], strict=True) if left}
        if len(still) > 1:
            return {(pattern, at): np.array([it == at for it in made]) for at in sorted(still)}
    return {(0, ()): np.ones(len(ascent.left[0]), dtype=bool)}
