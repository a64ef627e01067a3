"""Shardings: where the pieces of one array lie on the mesh.

A `Sharding` has one entry per dimension: the mesh axes (by number) that split it, major to minor. An axis occurs at most once.
"""

from __future__ import annotations

from functools import lru_cache

Sharding = tuple[tuple[int, ...], ...]


def replicated(rank: int) -> Sharding:
    """The sharding in which every device holds the whole array."""
    return ((),) * rank


@lru_cache(maxsize=200_000)
def shards(sharding: Sharding, sizes: tuple[int, ...]) -> int:
    """Into how many different pieces the array is cut; `sizes` [axes] are the mesh axis sizes."""
    count = 1
    for axes in sharding:
        for axis in axes:
            count *= sizes[axis]
    return count


def refinements(coarse: Sharding, fine: Sharding) -> tuple[Sharding, ...]:
    """Shardings from `coarse` to `fine`, both included, one more axis at a time; only the two where `fine` does not refine `coarse`."""
    steps = [coarse]
    if any(b[: len(a)] != a for a, b in zip(coarse, fine, strict=True)):
        return (coarse, fine)
    for dim, axes in enumerate(fine):
        for count in range(len(coarse[dim]) + 1, len(axes) + 1):
            steps.append((*steps[-1][:dim], axes[:count], *steps[-1][dim + 1 :]))
    return tuple(steps)
