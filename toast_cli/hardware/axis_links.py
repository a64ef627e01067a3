"""Maps logical axes to physical dimensions: axis sizes and dimensions in, the links each axis runs over out.

A dimension may be divided between several axes: the later (faster) axis gets the inner, contiguous piece, which is a
line; the outer piece is strided, so its hops cross as many links as the stride and share them with as many groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, isqrt, prod

from toast_cli.hardware.model import Link
from toast_cli.hardware.topology import Dimension

# [axes] devices of one dimension that each axis covers.
Cut = tuple[int, ...]


def lay_out(
    sizes: Sequence[int], dimensions: Sequence[Dimension], allowed: Sequence[frozenset[str] | None]
) -> list[tuple[Link, ...]] | None:
    """[axes] links of each axis, innermost first; None if no assignment exists.

    `sizes` [axes], first axis slowest; `dimensions` innermost first; `allowed` [axes] the dimension names an axis may
    use, None for any. Of all assignments the best one, in this order, keeps the network on the earliest axes, divides
    the fewest dimensions, and needs the least time to gather one byte along every axis in turn.
    """
    best: list[tuple[Link, ...]] | None = None
    best_rank: tuple[object, ...] = ()
    for cuts in _assignments(tuple(sizes), dimensions, allowed):
        links = _links(cuts, dimensions, len(sizes))
        rank = _rank(links)
        if best is None or rank < best_rank:
            best, best_rank = links, rank
    return best


def divisors(count: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    small = [factor for factor in range(1, isqrt(count) + 1) if count % factor == 0]
    return sorted({*small, *(count // factor for factor in small)})


def _assignments(
    sizes: tuple[int, ...], dimensions: Sequence[Dimension], allowed: Sequence[frozenset[str] | None]
) -> Iterator[list[Cut]]:
    """Every assignment of each dimension's devices to the axes that yields all sizes; [dimensions] cuts."""
    if not dimensions:
        if all(size == 1 for size in sizes):
            yield []
        return
    usable = [names is None or dimensions[0].name in names for names in allowed]
    for cut in _cuts(dimensions[0].size, sizes, usable):
        rest = tuple(size // part for size, part in zip(sizes, cut, strict=True))
        for others in _assignments(rest, dimensions[1:], allowed):
            yield [cut, *others]


def _cuts(size: int, wanted: tuple[int, ...], usable: list[bool]) -> Iterator[Cut]:
    """Every factorisation of `size` over the axes, each factor dividing the remaining size of its axis."""
    if not wanted:
        if size == 1:
            yield ()
        return
    for factor in divisors(gcd(size, wanted[0])) if usable[0] else [1]:
        for rest in _cuts(size // factor, wanted[1:], usable[1:]):
            yield (factor, *rest)


def _links(cuts: list[Cut], dimensions: Sequence[Dimension], axes: int) -> list[tuple[Link, ...]]:
    """[axes] links, innermost dimension first."""
    links: list[list[Link]] = [[] for _ in range(axes)]
    for cut, dimension in zip(cuts, dimensions, strict=True):
        stride = 1
        for axis in reversed(range(axes)):
            if cut[axis] > 1:
                links[axis].append(_piece(dimension, cut[axis], stride))
                stride *= cut[axis]
    return [tuple(found) for found in links]


def _piece(dimension: Dimension, size: int, stride: int) -> Link:
    """A link over `size` devices of a dimension, `stride` apart."""
    if dimension.kind in ("switch", "network"):
        return Link(dimension.kind, size, dimension.bytes_per_second, dimension.latency_seconds, dimension.name, stride)
    closes = dimension.kind == "ring" and size * stride == dimension.size
    return Link(
        kind="ring" if closes else "line",
        size=size,
        bytes_per_second=dimension.bytes_per_second / stride,
        latency_seconds=dimension.latency_seconds * stride,
        dimension=dimension.name,
        stride=stride,
    )


def _rank(links: list[tuple[Link, ...]]) -> tuple[object, ...]:
    """Sort key of an assignment, smaller is better (see `lay_out`); ties go to the fastest last axis."""
    network = [prod(link.size for link in axis if link.kind == "network") for axis in links]
    gather = [_gather_seconds(axis) for axis in links]
    return network[::-1], sum(map(len, links)), sum(gather), gather[::-1]


def _gather_seconds(links: tuple[Link, ...]) -> float:
    """Rough seconds to gather one byte along an axis: torus links share the load, other tiers follow one another."""
    torus = [link for link in links if link.kind in ("ring", "line")]
    seconds = sum(1 / link.bytes_per_second for link in links if link not in torus)
    if torus:
        seconds += 1 / sum(link.bytes_per_second * (2 if link.kind == "ring" else 1) for link in torus)
    return seconds
