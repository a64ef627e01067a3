"""Shardings: where the pieces of one array lie on the mesh.

A `Sharding` has one entry per dimension: the mesh axes (by number) that split it, major to minor. An axis occurs at
most once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def without(sharding: Sharding, axes: Collection[int]) -> Sharding:
    """The sharding in which those axes split nothing."""
    return tuple([tuple([axis for axis in have if axis not in axes]) for have in sharding])


def refines(fine: Sharding, coarse: Sharding) -> bool:
    """Whether the array in `fine` is the one in `coarse` with some dimensions cut further."""
    return all(b[: len(a)] == a for a, b in zip(coarse, fine, strict=True))


def in_mesh_order(sharding: Sharding) -> bool:
    """Whether the axes of every dimension stand in the order they have in the mesh."""
    return all(list(axes) == sorted(axes) for axes in sharding)


def scattered_in(axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Over which of these axes a product is scattered at once: in two steps, each over half of them.

    XLA:TPU makes two reduce-scatters as they are written. Over three and more axes one at a time it makes a
    reduce-scatter over the first and an all-reduce over all others, and over all at once an all-reduce.
    """
    half = (len(axes) + 1) // 2
    return [tuple(part) for part in (axes[:half], axes[half:]) if part]


def refinements(coarse: Sharding, fine: Sharding) -> tuple[Sharding, ...]:
    """Shardings from `coarse` to `fine`, both included, one more axis at a time; only the two where `fine` does not
    refine `coarse`."""
    steps = [coarse]
    if not refines(fine, coarse):
        return (coarse, fine)
    for dim, axes in enumerate(fine):
        for count in range(len(coarse[dim]) + 1, len(axes) + 1):
            steps.append((*steps[-1][:dim], axes[:count], *steps[-1][dim + 1 :]))
    return tuple(steps)
