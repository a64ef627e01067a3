"""Tiling: the two innermost dimensions of an array in a TPU's memory are padded to tiles.

A TPU keeps arrays in tiles of 8 x 128 elements (the vector register; Jouppi et al., "Ten Lessons From Three Generations
Shaped Google's TPUv4i", 2021); a second innermost dimension shorter than 8 gets a tile of 4, 2 or 1 rows.
`tile_dimensions` chooses the two innermost dimensions.

A resharded copy keeps the two innermost dimensions of its source: an image with its batch in the lanes, because a
device has fewer features than images, keeps them there when all features are gathered (libtpu 0.0.42.1).

Enters: the tiling of a value, and its local shape. Leaves: its growth by padding. Without this pass arrays are not
padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from toast_cli.compiler.profile import CompilerProfile, TileShape
from toast_cli.program.model import Program

NAME = "tiling"
UNPADDED = (1, 1)
Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Possible tilings of an array. dims: dimensions that may be one of the two innermost; () if the array keeps the
    tiles of another, with its growth `fixed`. copies: this holds for copies only; the array itself is an argument, in
    the tiles that waste least. lanes: those of `dims` that may be the innermost; (): any."""

    dims: Dims
    fixed: float = 1.0
    copies: bool = False
    lanes: Dims = ()


UNTILED = Tiling(())


def tile_of(profile: CompilerProfile) -> TileShape:
    """The multiples to which the two innermost dimensions are padded."""
    return profile.memory_tile if NAME in profile.passes else UNPADDED


def paddings(program: Program, tiled: list[Tiling], tile: TileShape) -> list[float]:
    """[values] elements in memory over elements of the whole arrays."""
    return [
        growth(value.shape, it.dims, tile, lanes=it.lanes) if it.dims and not it.copies else it.fixed
        for value, it in zip(program.values, tiled, strict=True)
    ]


def growth(
    shape: tuple[float, ...],
    dims: Dims,
    tile: TileShape,
    never_innermost: Dims = (),
    like: tuple[float, ...] | None = None,
    lanes: Dims = (),
) -> float:
    """Padded elements over elements of an array, with the two of `dims` innermost that waste least for the shape
    `like`, or its own. lanes: see `Tiling`."""
    free = set(lanes or dims) - set(never_innermost) or set(range(len(shape))) - set(never_innermost)
    if not free:
        return 1.0
    if len(shape) == 1:
        return _padded(shape[0], tile[1]) / max(1.0, shape[0])
    rows = dims if len(dims) > 1 else range(len(shape))
    innermost = [(lane, row) for lane in sorted(free) for row in rows if row != lane]
    if like is None or like == shape:
        return min(_growth_in(shape, lane, row, tile) for lane, row in innermost)
    return min((_growth_in(like, lane, row, tile), _growth_in(shape, lane, row, tile)) for lane, row in innermost)[1]


def innermost_dims(shape: tuple[int, ...], tile: TileShape, bits: int) -> tuple[int, int]:
    """Lanes and rows of the tiles that waste least for elements of that size; of equal ones, the last two dims."""
    fewest = max(1, 32 // max(1, bits))  # rows are packed into words
    padded = tuple(max(fewest, size) for size in shape)
    pairs = [(lane, row) for lane in reversed(range(len(shape))) for row in reversed(range(len(shape))) if row != lane]
    return min(
        pairs, key=lambda pair: _growth_in(padded, pair[0], pair[1], tile) * padded[pair[1]] / max(1, shape[pair[1]])
    )


def _growth_in(shape: tuple[float, ...], lane: int, row: int, tile: TileShape) -> float:
    return _padded(shape[lane], tile[1]) * _rows(shape[row], tile[0]) / max(1.0, shape[lane] * shape[row])


def _rows(size: float, most: int) -> float:
    """Padded rows: the tile of a short dimension has 1, 2 or 4 rows."""
    return next((float(rows) for rows in (1, 2, 4) if size <= rows), _padded(size, most))


def _padded(size: float, tile: int) -> float:
    return ceil(size / tile) * float(tile)
