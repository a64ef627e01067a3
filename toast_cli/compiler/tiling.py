"""How much larger an array is in a TPU's memory than its elements: the two innermost dimensions are padded to tiles.

A TPU keeps arrays in tiles of 8 x 128 elements (the vector register; Jouppi et al., "Ten Lessons From Three Generations Shaped Google's
TPUv4i", 2021); a second innermost dimension shorter than 8 gets a tile of 4, 2 or 1 rows. Which two dimensions are the innermost is the
compiler's choice, and it takes those that waste least, among those that the array's products leave it (all as seen in compiled programs):
of a batched product's arrays the dimensions that number the matrices stay outside, of a convolution's the spatial ones. What is elementwise
or transposed between products follows them; what is reshaped keeps the tiles of what it was, but a dimension that is split in the middle of
a tile (channels into groups) is not innermost.

A copy in another layout keeps the two of what it is made of: an image that has its batch in the lanes, since a device has fewer of its
features than of its batch, has them there when all features are gathered, too (libtpu 0.0.42.1).

Enters: a program. Leaves: a `Tiling` for each value, and `growth` for its local shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ARGUMENT, CONVOLUTION, REDUCE, RESHAPE, TRANSPOSE

Dims = tuple[int, ...]
Tile = tuple[int, int]  # rows, lanes


@dataclass(frozen=True, slots=True)
class Tiling:
    """dims: those that may be one of the two innermost; () where the array keeps the tiles of another, with its growth `fixed`. copies: only
    copies are so laid out; the array itself is an argument, which is in the tiles that waste least, whatever the program does with it."""

    dims: Dims
    fixed: float = 1.0
    copies: bool = False


UNTILED = Tiling(())


def tilings(program: Program, tile: Tile) -> list[Tiling]:
    """[values] how each is tiled by a chip with such tiles."""
    if tile == (1, 1):
        return [UNTILED] * len(program.values)
    allowed: list[Dims | None] = [None] * len(program.values)
    for op in program.ops:
        if op.kind.matrix_unit:
            _restrict(op, allowed)
    reshaped: list[Op | None] = [None] * len(program.values)  # the reshape whose operand each has the tiles of
    for op in program.ops:
        if op.name == RESHAPE:
            reshaped[op.results[0]] = reshaped[op.operands[0]] or op
        elif _follows(op):
            reshaped[op.results[0]] = next((reshaped[v] for v in op.operands if reshaped[v]), None)
            _carry_over(program, op, allowed, forward=True)
        elif op.name == REDUCE and len(op.results) == 1:
            _reduced(program, op, allowed)
    for op in reversed(program.ops):
        if _follows(op):
            _carry_over(program, op, allowed, forward=False)
    found, ops, producer = [], program.ops, program.producer
    for number, value in enumerate(program.values):
        if ops[producer[number]].name == ARGUMENT:
            found.append(Tiling(allowed[number] or (), copies=True))
            continue
        dims, reshape = allowed[number], reshaped[number]
        if dims is None and reshape:
            source = reshape.operands[0]
            shape = program.values[source].shape
            found.append(
                Tiling((), growth(shape, allowed[source] or tuple(range(len(shape))), tile, _split(reshape, tile[1])))
            )
        else:
            found.append(Tiling(tuple(range(len(value.shape))) if dims is None else dims))
    return found


def paddings(program: Program, tiled: list[Tiling], tile: Tile) -> list[float]:
    """[values] elements in memory over elements of the whole arrays."""
    return [
        growth(value.shape, tiling.dims, tile) if tiling.dims and not tiling.copies else tiling.fixed
        for value, tiling in zip(program.values, tiled, strict=True)
    ]


def _split(reshape: Op, lanes: int) -> Dims:
    """Dimensions that a reshape splits in the middle of a tile."""
    sizes, (operand, *_) = reshape.rule.sizes, reshape.rule.operands or ((),)
    return tuple(
        d for d, factors in enumerate(operand) if sum(sizes[f] > 1 for f in factors) > 1 and sizes[factors[-1]] % lanes
    )


def growth(
    shape: tuple[float, ...],
    dims: Dims,
    tile: Tile,
    never_innermost: Dims = (),
    like: tuple[float, ...] | None = None,
) -> float:
    """Elements in memory over elements of an array, with the two of `dims` innermost that waste least, of the shape `like` if there is one."""
    lanes = [d for d in (dims if set(dims) - set(never_innermost) else range(len(shape))) if d not in never_innermost]
    if not lanes:
        return 1.0
    if len(shape) == 1:
        return _padded(shape[0], tile[1]) / max(1.0, shape[0])
    rows = dims if len(dims) > 1 else range(len(shape))
    innermost = [(lane, row) for lane in lanes for row in rows if row != lane]
    if like is None or like == shape:
        return min(_growth_in(shape, lane, row, tile) for lane, row in innermost)
    return min((_growth_in(like, lane, row, tile), _growth_in(shape, lane, row, tile)) for lane, row in innermost)[1]


def _growth_in(shape: tuple[float, ...], lane: int, row: int, tile: Tile) -> float:
    return _padded(shape[lane], tile[1]) * _rows(shape[row], tile[0]) / max(1.0, shape[lane] * shape[row])


def _rows(size: float, most: int) -> float:
    """A short dimension's tile has 1, 2 or 4 rows."""
    return next((float(rows) for rows in (1, 2, 4) if size <= rows), _padded(size, most))


def _padded(size: float, tile: int) -> float:
    return ceil(size / tile) * float(tile)


def _restrict(op: Op, allowed: list[Dims | None]) -> None:
    rule = op.rule
    if len(rule.operands) < 2 or not rule.results:
        return
    if op.name == CONVOLUTION:
        outside, sides = set(rule.permutation), [(op.operands[0], rule.operands[0])]
    else:
        left, right, out = ({f for dim in dims for f in dim} for dims in (*rule.operands[:2], rule.results[0]))
        outside, sides = left & right & out, list(zip(op.operands, rule.operands, strict=True))
    for value, dims in (*sides, (op.results[0], rule.results[0])):
        kept = tuple(d for d, factors in enumerate(dims) if not outside.intersection(factors))
        if kept and len(kept) < len(dims):
            allowed[value] = kept


def _reduced(program: Program, op: Op, allowed: list[Dims | None]) -> None:
    """What sums over the features of images leave (norms of single pixels) has the batch in the lanes, and only that."""
    (result,), before = op.results, allowed[op.operands[0]]
    space = len(program.values[result].shape) - 1
    if before is None or space < 2 or not op.rule.results:
        return
    kept = {f for d in before for f in op.rule.operands[0][d]} - op.rule.reduction
    left = tuple(d for d, factors in enumerate(op.rule.results[0]) if kept.intersection(factors))
    if len(before) == 2 and len(left) == 1 and len(program.values[op.operands[0]].shape) == space + 2:
        allowed[result] = left


def _follows(op: Op) -> bool:
    return len(op.results) == 1 and (op.kind.elementwise or op.name == TRANSPOSE)


def _carry_over(program: Program, op: Op, allowed: list[Dims | None], *, forward: bool) -> None:
    """Takes the dims of an operand over to the result, or the other way round, by the factors they share."""
    (result,) = op.results
    if not op.rule.results:
        return
    for value, dims in zip(op.operands, op.rule.operands, strict=False):
        if program.values[value].elements != program.values[result].elements:
            continue
        source, target = (value, result) if forward else (result, value)
        of, to = (dims, op.rule.results[0]) if forward else (op.rule.results[0], dims)
        known = allowed[source]
        if known is None or allowed[target] is not None:
            continue
        factors = {f for d in known if d < len(of) for f in of[d]}
        kept = tuple(d for d, found in enumerate(to) if factors.intersection(found))
        if kept:
            allowed[target] = kept
