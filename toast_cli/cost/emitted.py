"""What a chip's compiler makes of the collectives that the partitioner writes.

XLA:TPU lays arrays out in tiles, the two minor dimensions padded to whole ones, and lets a reduce-scatter take them apart only where every
device gets whole tiles; elsewhere an all-reduce stays, of which each device keeps its piece. The rules were found by compiling some two
thousand sums and products of different shapes with libtpu 0.0.42.1 for slices of v4, v5e, v5p and v6e:

* Two streams run around the ring, and each takes half of every device's piece: halves of the columns' tiles, or of the rows' where the
  columns' are odd in number. Four devices in a square run four streams.
* A piece is padded to that as long as it grows by less than half.
* Both hold where the scattered dimension is the outermost. Inside another one, pieces have to be whole tiles as they are; tiles of types
  narrower than 32 bits hold that many more rows (and columns, when these are scattered).
* Vectors, matrices of fewer rows than a tile has, and pieces inside a dimension of size 1 stay all-reduces.
* So does what is summed over a whole slice, of three dimensions or a square one of at least 4 x 4: there is an all-reduce that uses all
  links, and no such reduce-scatter.

An all-gather of a vector in pieces of less than a row of a tile becomes an all-reduce of zeros and one's own piece.

Products come out in whichever layout has the fewest tiles and leaves each operand's dimensions in order; other arrays in row-major order.

Enters: a mesh and a local array. Leaves: whether a reduce-scatter or all-gather of it stays one.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations
from math import ceil, prod

from toast_cli.hardware.model import Mesh
from toast_cli.program.model import PRODUCTS, Op

Tile = tuple[int, int]  # rows, columns
Sides = tuple[tuple[int, ...], tuple[int, ...]]  # dimensions of a product's result, by the operand they come from
NO_PRODUCT: Sides = ((), ())
_MOST_GROWTH = 1.5
_WORD_BITS = 32


def stays_scatter(
    mesh: Mesh, axes: tuple[int, ...], shape: tuple[int, ...], dim: int, bits: int, sides: Sides = NO_PRODUCT
) -> bool:
    """Whether the chip's compiler keeps a reduce-scatter over `axes`, and does not leave an all-reduce in its place.

    shape: of the array on one device, before. dim: the dimension that is scattered. bits: of an element. sides: of the product
    that the array is.
    """
    tile = mesh.chip.rewrites.scatter_tile
    if tile is None:
        return True
    count, torus = prod(mesh.sizes[axis] for axis in axes), _torus(mesh, axes)
    if count == mesh.devices and (len(torus) > 2 or (len(torus) == 2 and torus[0] == torus[1] >= 4)):
        return False
    streams = 4 if torus == [2, 2] and count == 4 else 2
    return _comes_apart(tile, shape, dim, count, max(1, _WORD_BITS // bits), streams, sides)


def stays_gather(mesh: Mesh, shape: tuple[int, ...], shards: int) -> bool:
    """Whether the chip's compiler keeps an all-gather of a whole array of that shape from so many pieces."""
    tile = mesh.chip.rewrites.scatter_tile
    return tile is None or len(shape) != 1 or shape[0] // shards >= tile[1]


def _torus(mesh: Mesh, axes: tuple[int, ...]) -> list[int]:
    """How many devices of each torus dimension the axes join, ascending."""
    sizes: dict[str, int] = {}
    for axis in axes:
        for place, link in enumerate(mesh.axes[axis].links):
            if link.kind in ("ring", "line"):
                dimension = link.dimension or f"{axis}.{place}"
                sizes[dimension] = sizes.get(dimension, 1) * link.size
    return sorted(sizes.values())


def sides_of(op: Op) -> Sides:
    """Of a product's result the dimensions that come from its first operand alone, and from its second; none of other ops'."""
    if op.name not in PRODUCTS:
        return NO_PRODUCT
    first, second = ({factor for factors in dims for factor in factors} for dims in op.rule.operands[:2])
    dims = [(dim, set(factors)) for dim, factors in enumerate(op.rule.results[0])]
    return tuple(d for d, f in dims if f & first - second), tuple(d for d, f in dims if f & second - first)


@lru_cache(maxsize=50_000)
def _comes_apart(
    tile: Tile, shape: tuple[int, ...], dim: int, count: int, packed: int, streams: int, sides: Sides
) -> bool:
    """Whether every device gets whole tiles, as many for each stream. packed: elements in 32 bits."""
    if len(shape) < 2 or shape[dim] % count:
        return False
    piece = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    order = _compact(tile, piece, sides) if all(sides) else tuple(range(len(shape)))
    majors, row, column = order[:-2], order[-2], order[-1]
    if shape[row] < tile[0]:
        return False
    if dim == column:
        return piece[column] % (tile[1] * packed) == 0
    if order[0] == dim:
        rows = prod(piece[d] for d in majors) * ceil(piece[row] / tile[0]) * tile[0] if majors else piece[row]
        halves = streams // 2 if ceil(piece[column] / tile[1]) % 2 == 0 else streams
        return ceil(rows / (tile[0] * halves)) * tile[0] * halves < _MOST_GROWTH * rows
    if prod(shape[d] for d in order[: order.index(dim)]) == 1:
        return False
    return dim in majors or piece[row] % (tile[0] * packed) == 0


def _compact(tile: Tile, piece: tuple[int, ...], sides: Sides) -> tuple[int, ...]:
    """Dimensions, the outermost first, in the order with the fewest tiles; of such orders the last dimension's and longer rows first."""
    first, second = sides
    last = max(*first, *second)

    def rank(pair: tuple[int, int]) -> tuple[int, bool, int]:
        row, column = pair
        tiles = ceil(piece[row] / tile[0]) * ceil(piece[column] / tile[1])
        return tiles * prod(piece) // (piece[row] * piece[column]), column != last, -piece[row]

    pairs = [(a, b) for a, b in permutations(first + second, 2) if a < b or (a in first) != (b in first)]
    row, column = min(pairs, key=rank)
    return (*(d for d in range(len(piece)) if d not in (row, column)), row, column)
