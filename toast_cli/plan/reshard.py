"""How an array gets from one layout to another: slices (free), all-to-alls, permutes and all-gathers.

Enters: two layouts of one array. Leaves: the collectives in order. Slices come first, since they make everything after them
smaller; all-gathers last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from toast_cli.plan.layout import Layout, shards


@dataclass(frozen=True, slots=True)
class Step:
    """One collective. `fraction` of the whole array is its result on each device (1 = everything)."""

    kind: str
    axes: tuple[int, ...]
    fraction: float


@lru_cache(maxsize=200_000)
def reshard_steps(source: Layout, target: Layout, sizes: tuple[int, ...]) -> tuple[Step, ...]:
    """Collectives that take an array laid out as `source` to `target`; `sizes` [axes] of the mesh."""
    if source == target:
        return ()
    removed: dict[int, int] = {}  # axis -> dimension it leaves
    added: dict[int, int] = {}  # axis -> dimension it comes to
    for dim, (have, want) in enumerate(zip(source, target, strict=True)):
        same = 0
        while same < min(len(have), len(want)) and have[same] == want[same]:
            same += 1
        removed.update(dict.fromkeys(have[same:], dim))
        added.update(dict.fromkeys(want[same:], dim))
    steps: list[Step] = []
    count = shards(source, sizes)
    for axis in added:
        if axis not in removed:  # a slice
            count *= sizes[axis]
    shuffled = {dim for axis, dim in removed.items() if added.get(axis) == dim}  # an axis stays, but at another place
    reordered = tuple(axis for axis, dim in removed.items() if dim in shuffled)
    if reordered:
        steps.append(Step("collective-permute", reordered, 1.0 / count))
    moved: dict[tuple[int, int], tuple[int, ...]] = {}  # (dimension it leaves, dimension it comes to) -> axes
    for axis, dim in removed.items():
        if axis in added and added[axis] != dim:
            moved[dim, added[axis]] = (*moved.get((dim, added[axis]), ()), axis)
    steps.extend(Step("all-to-all", axes, 1.0 / count) for axes in moved.values())
    for dim in range(len(source)):
        gone = tuple(a for a, d in removed.items() if d == dim and a not in added)
        for axis in gone:
            count //= sizes[axis]
        if gone:
            steps.append(Step("all-gather", gone, 1.0 / count))
    return tuple(steps)
