"""Shardings: how one array is split over the mesh.

A `Sharding` has one entry per dimension: the mesh axes (by number) that split it, major to minor. An axis occurs at
most once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from math import prod

from toast_cli.program.model import Value

Sharding = tuple[tuple[int, ...], ...]


def replicated(rank: int) -> Sharding:
    """The sharding in which every device holds the whole array."""
    return ((),) * rank


@lru_cache(maxsize=200_000)
def shards(sharding: Sharding, sizes: tuple[int, ...]) -> int:
    """The number of different shards of the array; `sizes` [axes] are the mesh axis sizes."""
    count = 1
    for axes in sharding:
        for axis in axes:
            count *= sizes[axis]
    return count


def local_shape(shape: tuple[int, ...], sharding: Sharding, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one device's shard of an array."""
    return tuple([n // shards((axes,), sizes) for n, axes in zip(shape, sharding, strict=True)])


def without(sharding: Sharding, axes: Collection[int]) -> Sharding:
    """The sharding in which those axes split nothing."""
    return tuple([tuple([axis for axis in have if axis not in axes]) for have in sharding])


def refines(fine: Sharding, coarse: Sharding) -> bool:
    """Whether the array in `fine` is the one in `coarse` with some dimensions cut further."""
    return all(b[: len(a)] == a for a, b in zip(coarse, fine, strict=True))


def in_mesh_order(sharding: Sharding) -> bool:
    """Whether the axes of every dimension are in mesh order."""
    return all(list(axes) == sorted(axes) for axes in sharding)


def scattered_in(over: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The axes of each step of a contraction's reduce-scatter, in two steps at most.

    XLA:TPU makes two reduce-scatters as they are written, each over axes that split one dimension in the mesh's order.
    A step over two dimensions, or over axes in another order, becomes an all-reduce, and so do all steps after the
    second one. Axes of one dimension that could go in one step go in two of about the same size: over the whole mesh
    at once it makes an all-reduce.

    Args:
        over: [dimensions] axes that come to split each, major to minor. sizes: [axes] of the mesh.
    """
    runs: list[tuple[int, ...]] = []
    for axes in over:
        for place, axis in enumerate(axes):
            if place and axis > axes[place - 1]:
                runs[-1] += (axis,)
            else:
                runs.append((axis,))
    if len(runs) > 1:
        return [runs[0], tuple([axis for run in runs[1:] for axis in run])]
    return [part for run in runs for part in _halves(run, sizes) if part]


def _halves(axes: tuple[int, ...], sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes in two parts, with as few devices as possible in the larger."""
    parts = [(axes[:count], axes[count:]) for count in range(len(axes), 0, -1)]
    return min(parts, key=lambda both: max(prod(sizes[axis] for axis in part) for part in both))


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


def axes_of(sharding: Sharding) -> set[int]:
    """All axes that split the array."""
    return {axis for axes in sharding for axis in axes}


def split_further(sharding: Sharding, target: Sharding, axes: Iterable[int]) -> Sharding:
    """`sharding` once `axes` split the dimensions that they split in `target`."""
    return tuple([(*have, *(a for a in want if a in axes)) for have, want in zip(sharding, target, strict=True)])


def is_uneven(value: Value, sharding: Sharding) -> bool:
    """Whether an array is padded in this sharding."""
    return value.written is not None and any(
        axes and own != size for own, size, axes in zip(value.written, value.shape, sharding, strict=True)
    )


def written_part(value: Value, *shardings: Sharding | None) -> float:
    """The fraction of a padded array that a collective moves: only dimensions that are split in one of these shardings
    are padded."""
    if value.written is None:
        return 1.0
    split = [any(at is not None and at[dim] for at in shardings) for dim in range(len(value.shape))]
    return prod(own / size for own, size, padded in zip(value.written, value.shape, split, strict=True) if not padded)
