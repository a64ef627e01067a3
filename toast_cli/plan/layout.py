"""Layouts: where the pieces of one array lie on the mesh.

A `Layout` has one entry per dimension: the mesh axes (by number) that split it, major to minor. An axis occurs at most once.
"""

from __future__ import annotations

Layout = tuple[tuple[int, ...], ...]


def replicated(rank: int) -> Layout:
    """The layout in which every device holds the whole array."""
    return ((),) * rank


def shards(layout: Layout, sizes: tuple[int, ...]) -> int:
    """Into how many different pieces the array is cut; `sizes` [axes] are the mesh axis sizes."""
    count = 1
    for axes in layout:
        for axis in axes:
            count *= sizes[axis]
    return count
