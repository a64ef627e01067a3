"""Utilisation of the matrix unit by the local shape of a product.

A matrix unit is a grid of `matrix_tile` cells, fed row by row (Jouppi et al., "In-Datacenter Performance Analysis of a
TPU", 2017). A product of [M, K] and [K, N] fills the grid with tiles of K x N and streams M past it, or N past tiles of
K x M: padding to whole tiles is wasted, half of the time for a 64-wide shape on a 128-wide grid. Rows are streamed 8 at
a time.

A GPU has a matrix unit in each multiprocessor. One multiprocessor computes each tile of the result, so that the last
wave of tiles leaves some idle; with few tiles, several share the depth of one ("split K"). Smaller tiles spread better,
but load more for each product they compute. A library picks the fastest tile.

In: a product's form, and the number of shards of each factor. Out: the factor by which padding increases its
flops.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, prod

from toast_cli.cost.model import Attained
from toast_cli.dimensions.model import Form
from toast_cli.hardware import Chip, matrix_rate

STREAMED_ROWS = 8  # sublanes of a vector register
# Tiles of a multiprocessor -> fraction of the rate of large ones that cuBLAS, cuDNN and Triton reach with them in the
# single ops of `benchmarks/gpu_timer.py` on an H200.
TILES = (((256, 128), 1.0), ((128, 128), 1.0), ((128, 64), 0.55), ((64, 64), 0.45), ((64, 32), 0.3), ((32, 32), 0.2))
LEAST_DEPTH = 512  # of one part of a split depth
Factors = tuple[tuple[int, int], ...]  # factor, elements along it


@dataclass(frozen=True, slots=True)
class Grid:
    """A product of [rows, depth] and [depth, columns], batch times. window: kernel positions of a convolution, 1 for
    others.

    grouped: a convolution of feature groups runs as one of all features with a block-diagonal kernel.
    """

    batch: Factors
    rows: Factors
    columns: Factors
    depth: Factors
    window: float
    grouped: bool


def grid_of(form: Form, flops: float, convolution: bool) -> Grid:
    """The grid of an op with two operands; `flops` of the op as a whole."""
    left, right, out = ({s for factors in dims for s in factors} for dims in (*form.operands[:2], form.results[0]))

    def sized(factors: set[int]) -> Factors:
        return tuple((factor, form.sizes[factor]) for factor in sorted(factors))

    batch, rows, columns = left & right & out, (left & out) - right, (right & out) - left
    depth = (left | right) - out
    positions = flops / 2 / prod(form.sizes[s] for s in (*batch, *rows, *columns, *depth))
    return Grid(
        sized(batch), sized(rows), sized(columns), sized(depth), positions if convolution else 1.0,
        convolution and bool(batch),
    )  # fmt: skip


def growth(chip: Chip, attained: Attained, dtype: str, grid: Grid, cuts: tuple[int, ...]) -> float:
    """Flops done over flops needed; cuts: [factors] shards of each. Limited to the growth at which the vector unit
    would be faster."""
    rows, columns, depth = (local_size(factors, cuts) for factors in (grid.rows, grid.columns, grid.depth))
    depth *= max(1.0, grid.window)
    if attained.multiprocessors and not grid.grouped:
        found = shared_out(attained.multiprocessors, local_size(grid.batch, cuts), rows, columns, depth)
    elif grid.grouped:
        groups = local_size(grid.batch, cuts)
        found = groups * padding(chip.matrix_tile, rows, columns * groups, depth * groups)
    else:
        found = padding(chip.matrix_tile, rows, columns, depth)
    return bounded(chip, attained, dtype, found)


def bounded(chip: Chip, attained: Attained, dtype: str, found: float) -> float:
    """`found`, limited to the growth at which the matrix unit is as slow as the vector unit."""
    limit = matrix_rate(chip, dtype) * attained.matrix / (chip.vector_flops * attained.vector)
    return min(found, max(1.0, limit))


def least_rows(grid: Grid, cuts: tuple[int, ...]) -> float:
    """The shorter dimension of a product's result on one device."""
    return min(local_size(grid.rows, cuts), local_size(grid.columns, cuts))


def local_size(factors: Factors, cuts: tuple[int, ...]) -> float:
    """Elements along some factors on one device."""
    return prod(size / cuts[factor] for factor, size in factors)


def padding(tile: tuple[int, int], rows: float, columns: float, depth: float) -> float:
    """Factor by which padding to a grid of that tile increases a product of [rows, depth] and [depth, columns]; at
    least 1."""
    high, wide = tile
    streamed = _padded(rows, min(STREAMED_ROWS, high)) * _padded(columns, wide)
    swapped = _padded(rows, wide) * _padded(columns, min(STREAMED_ROWS, high))
    return min(streamed, swapped) / (rows * columns) * _padded(depth, high) / depth


def shared_out(count: int, batch: float, rows: float, columns: float, depth: float) -> float:
    """Time of a product on `count` multiprocessors, relative to full use of all with large tiles."""
    least = inf
    for tile, rate in TILES:
        for high, wide in (tile, tile[::-1]):
            tiles = batch * ceil(rows / high) * ceil(columns / wide)
            shares = max(1, min(count // tiles, depth // LEAST_DEPTH))
            least = min(least, ceil(tiles * shares / count) / shares * high * wide / rate)
    return least * count / (batch * rows * columns)


def _padded(size: float, tile: int) -> float:
    return ceil(size / tile) * tile
