"""Layouts: the two innermost dimensions of an array in a TPU's memory are padded to tiles.

A TPU keeps arrays in tiles of 8 x 128 elements (the vector register; Jouppi et al., "Ten Lessons From Three
Generations Shaped Google's TPUv4i", 2021); a second innermost dimension shorter than 8 gets a tile of 4, 2 or 1 rows.
A resharded copy keeps the two innermost dimensions of its source: an image with its batch in the lanes, because a
device has fewer features than images, keeps them there when all features are gathered (libtpu 0.0.42.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from types import MappingProxyType

from toast_cli.price.profile import CompilerProfile, TileShape
from toast_cli.program.model import Op, Program, factors_of
from toast_cli.program.ops import ARGUMENT, CARRY, CONCATENATE, CONVOLUTION, GATHER, REDUCE, RESHAPE, SCATTER, TRANSPOSE

UNPADDED = (1, 1)
Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Possible tilings of an array. dims: dimensions that may be one of the two innermost; () if the array keeps the
    tiles of another, with its growth `fixed`. copies: this holds for copies only; the array itself is an argument, in
    the tiles that waste least. lanes: those of `dims` that may be the innermost; (): any. default_bits: of an element,
    if the last two dimensions are innermost, see `slowdown`. unless_narrow: any dimensions are innermost where tiles
    of `dims` waste too much, see `are_narrow`."""

    dims: Dims
    fixed: float = 1.0
    copies: bool = False
    lanes: Dims = ()
    default_bits: int = 0
    unless_narrow: bool = False


UNTILED = Tiling(())


def tile_of(profile: CompilerProfile) -> TileShape:
    """The multiples to which the two innermost dimensions are padded."""
    return profile.memory_tile if "tiling" in profile.passes else UNPADDED


def paddings(program: Program, tiled: list[Tiling], tile: TileShape) -> list[float]:
    """[values] elements in memory over elements of the whole arrays."""
    return [
        growth_in(value.shape, tiling, tile) if tiling.dims and not tiling.copies else tiling.fixed
        for value, tiling in zip(program.values, tiled, strict=True)
    ]


def growth_in(shape: Dims, tiling: Tiling, tile: TileShape, like: Dims | None = None) -> float:
    """`tile_growth` of a local shape in these tiles."""
    wasted = tile_growth(shape, tiling.dims, tile, like=like, lanes=tiling.lanes)
    if tiling.unless_narrow and are_narrow(wasted, tiling.dims):
        return tile_growth(shape, tuple(range(len(shape))), tile, like=like)
    return wasted


@lru_cache(maxsize=100_000)
def tile_growth(
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


def tilings(
    program: Program,
    tile: TileShape,
    *,
    chosen: bool = True,
    rows: Mapping[int, Dims] = MappingProxyType({}),
    gathered: Mapping[int, Dims] = MappingProxyType({}),
) -> list[Tiling]:
    """[values] tiling of each on a chip with these tiles.

    The compiler chooses the two innermost dimensions that waste least, among those that the array's contractions allow
    (libtpu 0.0.42.1): batch dimensions of a contraction's arrays and spatial dimensions of a convolution's are not
    innermost. Elementwise results and transposes between contractions follow them; a reshaped array keeps the tiles of
    its operand, but a dimension that is split in the middle of a tile (channels into groups) is not innermost.

    chosen: apply these rules, else take any two dimensions that waste least. rows: value -> the dimensions along which
    its rows run, see `dims_of_rows`. gathered: the same of what is gathered from arguments, see `row_copies`.
    """
    if tile == UNPADDED:
        return [UNTILED] * len(program.values)
    if not chosen:
        return [Tiling(tuple(range(len(value.shape)))) for value in program.values]
    allowed: list[Dims | None] = [None] * len(program.values)
    for op in program.ops:
        if op.kind.matrix_unit and not op.multiplies_by_vector:
            _restrict(op, allowed)
    reshaped: list[Op | None] = [None] * len(program.values)  # [values] reshape whose operand's tiles it keeps
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
    tiled, returned = [], {result.value for result in program.results}
    same: dict[Tiling, Tiling] = {}  # few tilings are distinct
    for number, value in enumerate(program.values):
        every, dims, reshape = tuple(range(len(value.shape))), allowed[number], reshaped[number]
        if program.ops[program.producer[number]].name == ARGUMENT:
            tiling = Tiling(dims or (), copies=True)
        elif number in rows:
            along = rows[number]
            tiling = Tiling(every, lanes=along) if len(along) == 1 else Tiling(along)
        elif number in gathered:
            tiling = Tiling(gathered[number], unless_narrow=True)
        elif dims is None and reshape and number not in returned:
            source = reshape.operands[0]
            shape = program.values[source].shape
            source_dims = allowed[source] or tuple(range(len(shape)))
            tiling = Tiling((), tile_growth(shape, source_dims, tile, _split(reshape, tile[1])))
        else:
            tiling = Tiling(every if dims is None else dims)
        tiled.append(same.setdefault(tiling, tiling))
    return tiled


def _split(reshape: Op, lanes: int) -> Dims:
    """Dimensions that a reshape splits in the middle of a tile."""
    sizes, (operand, *_) = reshape.rule.sizes, reshape.rule.operands or ((),)
    return tuple(
        d for d, factors in enumerate(operand) if sum(sizes[f] > 1 for f in factors) > 1 and sizes[factors[-1]] % lanes
    )


def _restrict(op: Op, allowed: list[Dims | None]) -> None:
    rule = op.rule
    if len(rule.operands) < 2 or not rule.results:
        return
    if op.name == CONVOLUTION:
        outside, sides = set(rule.permutation), [(op.operands[0], rule.operands[0])]
    else:
        left, right, out = factors_of(*rule.operands[:2], rule.results[0])
        outside, sides = left & right & out, list(zip(op.operands, rule.operands, strict=True))
    for value, dims in (*sides, (op.results[0], rule.results[0])):
        kept = tuple(d for d, factors in enumerate(dims) if not outside.intersection(factors))
        if kept and len(kept) < len(dims):
            allowed[value] = kept


def _reduced(program: Program, op: Op, allowed: list[Dims | None]) -> None:
    """Sums over the features of images (norms of single pixels) have only the batch in the lanes."""
    (result,), before = op.results, allowed[op.operands[0]]
    space = len(program.values[result].shape) - 1
    if before is None or space < 2 or not op.rule.results:
        return
    kept = {f for d in before for f in op.rule.operands[0][d]} - op.rule.reduction
    left = tuple(d for d, factors in enumerate(op.rule.results[0]) if kept.intersection(factors))
    if len(before) == 2 and len(left) == 1 and len(program.values[op.operands[0]].shape) == space + 2:
        allowed[result] = left


def _follows(op: Op) -> bool:
    return len(op.results) == 1 and (op.kind.elementwise or op.kind.scaling or op.name == TRANSPOSE)


def _carry_over(program: Program, op: Op, allowed: list[Dims | None], *, forward: bool) -> None:
    """Copies the allowed dimensions from an operand to the result, or back, by shared factors."""
    (result,) = op.results
    if not op.rule.results:
        return
    for value, dims in zip(op.operands, op.rule.operands, strict=False):
        if program.values[value].elements != program.values[result].elements:
            continue
        source, target = (value, result) if forward else (result, value)
        of, to = (dims, op.rule.results[0]) if forward else (op.rule.results[0], dims)
        source_dims = allowed[source]
        if source_dims is None or allowed[target] is not None:
            continue
        factors = {f for d in source_dims if d < len(of) for f in of[d]}
        kept = tuple(d for d, of_dim in enumerate(to) if factors.intersection(of_dim))
        if kept:
            allowed[target] = kept


_UPDATES = 2  # position of a scatter's updates


def dims_of_rows(program: Program, profile: CompilerProfile) -> dict[int, Dims]:
    """Value -> the dimensions along which its rows run: the one that is in the lanes, or those that are innermost.

    A TPU moves a row at a time, so that XLA:TPU lays out what is gathered, and what scatters read, with the dimension
    that a row runs along innermost; narrow rows are padded to 128 lanes: 327,680 rows of 16 f32 take 160 MiB and not
    20. Elementwise results of such rows keep their layout. A scatter into less than `scatter_bytes` keeps that on the
    chip and computes what it adds as it reads it; larger ones sort their indices, and what they add is written first,
    with the last two dimensions innermost that a row runs along. Told by whole arrays, before any plan is known. What
    products read of gathered rows is laid out anew, by a copy, and lives longer than the rows, which are not counted.
    Seen in gathers of rows and segment sums on v5e (rows of 2 to 256 elements of f32 and bf16, 16,384 to 1,048,576 of
    them) and in graph networks.
    """
    if "lookup-rows" not in profile.passes:
        return {}
    large, lanes = [], profile.memory_tile[1]
    for op in program.ops:  # scatters into large operands: as f32 with the last dimension in the lanes
        *outer, width = (program.values[op.operands[0]].shape if op.name == SCATTER else ()) or (1,)
        size = 4.0 * prod(outer) * ceil(width / lanes) * lanes
        large.append(op.name == SCATTER and size >= profile.scatter_bytes)
    row_dims: dict[int, Dims] = {}
    for op, sorts in zip(program.ops, large, strict=True):
        if op.name == GATHER and _combined(program, op.results[0]):
            rows = _rows_of(program, op, op.results[0], op.rule.results)
            row_dims.update((value, dims) for value, dims in rows if len(dims) == 1)
        elif sorts and len(op.operands) == _UPDATES + 1:
            row_dims.update(_rows_of(program, op, op.operands[_UPDATES], op.rule.operands[_UPDATES:]))
        elif op.kind.elementwise:
            # Elementwise results of such rows keep their layout.
            shape = program.values[op.results[0]].shape
            same = [
                row_dims[value] for value in op.operands if value in row_dims and program.values[value].shape == shape
            ]
            row_dims.update((op.results[0], dims) for dims in same)
    return row_dims


def _combined(program: Program, value: int) -> bool:
    """Whether rows are read only elementwise, by scatters, and by products with a vector (which multiply and add
    elementwise), also through reshapes and concatenations, so that no contraction needs another layout."""
    for number, _ in program.users[value]:
        reader = program.ops[number]
        if reader.name in (RESHAPE, CONCATENATE):
            if not _combined(program, reader.results[0]):
                return False
        elif not (reader.kind.elementwise or reader.name == SCATTER or _by_vector(reader)):
            return False
    return True


def _by_vector(op: Op) -> bool:
    return op.kind.contraction and op.rule.with_vector


def _rows_of(
    program: Program, op: Op, value: int, rule: tuple[tuple[tuple[int, ...], ...], ...]
) -> Iterator[tuple[int, Dims]]:
    """(`value`, its rows' dimensions), if there are any. rule: its first entry has the factors of the value's
    dimensions."""
    if not rule or len(op.rule.operands) < _UPDATES:
        return
    table, indices = factors_of(*op.rule.operands[:2])
    shape = program.values[value].shape
    rows = tuple(d for d, factors in enumerate(rule[0]) if shape[d] > 1 and (table - indices).intersection(factors))
    if rows and len(shape) > 1:
        yield value, rows


@dataclass(frozen=True, slots=True)
class RowCopy:
    """A copy of an array into tiles of its rows.

    Attributes:
        rows: the dimensions along which a row runs. updated: a scatter writes the copy, and what it wrote is copied
            back.
        gathered: the array is what a gather made, in tiles of its rows, and not a table. merged: its dimension that is
            in the lanes of a copy where the rows are too narrow for that.
        runs: copies made in one run of the program.
    """

    rows: Dims
    updated: bool
    gathered: bool
    merged: Dims
    runs: float


def row_copies(program: Program, profile: CompilerProfile) -> dict[int, tuple[RowCopy, ...]]:
    """Value -> its copies into tiles of rows.

    Arguments lie in the tiles that waste least, and a table of narrow rows has its looked-up dimension in the lanes. A
    gather reads a copy with a row's dimensions innermost, unless these are too narrow (see `are_narrow`); a scatter of
    rows of several dimensions always writes such a copy, with their last two innermost. A product of batches reads
    another copy of what was gathered; where the rows are too narrow and a reshape merges looked-up dimensions with one
    of a row, that one is in the lanes. Pages bf16[65536, 16, 4, 16] take 128 MiB, and 1,024 for a scatter; 65,536 that
    are gathered take 1,024 for the reshape. Seen in gathers and scatters of rows of 8 to 128 bf16 and f32, and of 2 to
    128 times as many, on v5e (libtpu 0.0.42.1).
    """
    copies_of: dict[int, list[RowCopy]] = {}
    if "lookup-rows" not in profile.passes:
        return {}
    tables = _as_arguments(program)
    for op in program.ops:
        if not op.kind.lookup or op.operands[0] not in tables or len(op.results) != 1 or not op.rule.results:
            continue  # scatters of several arrays, and ops without a sharding rule
        table, updated, (result,) = op.operands[0], op.name == SCATTER, op.results
        moved = op.rule.operands[_UPDATES] if updated else op.rule.results[0]
        (factors,) = factors_of(moved)
        rows, along = (
            tuple(d for _, dims in _rows_of(program, op, value, (rule,)) for d in dims if factors.intersection(rule[d]))
            for value, rule in ((table, op.rule.operands[0]), (result, op.rule.results[0]))
        )
        if updated and len(rows) > 1:
            copies_of.setdefault(table, []).append(RowCopy(rows[-2:], True, False, (), 2.0 * op.trips))
        elif rows and not updated and not any(copy.rows == rows for copy in copies_of.get(table, [])):
            copies_of.setdefault(table, []).append(RowCopy(rows, False, False, (), op.trips))
        if along and not updated:
            batched, merged = _meets_batches(program, result, along)
            copies_of[result] = [RowCopy(along, False, True, merged, op.trips if batched else 0.0)]
    return {value: tuple(copies) for value, copies in copies_of.items()}


def are_narrow(wasted: float, rows: Dims) -> bool:
    """Whether a gather does without tiles of rows, which take `wasted` times the elements."""
    return wasted > 4.0 or (wasted == 4.0 and len(rows) == 1)


def copied_rows(shape: Dims, copy: RowCopy, tile: TileShape, bits: int) -> tuple[float, float]:
    """(elements over those of a local shape, tiles) of a copy of rows; (0, 0) if there is none."""
    wasted, lanes = tile_growth(shape, copy.rows, tile), innermost_dims(shape, tile, bits)[0]
    if not copy.runs or (wasted == 1.0 if copy.gathered else lanes in copy.rows):
        return 0.0, 0.0
    if not copy.updated and are_narrow(wasted, copy.rows):
        wasted = tile_growth(shape, tuple(range(len(shape))), tile, lanes=copy.merged) if copy.merged else 0.0
    height = _rows(shape[copy.rows[0]], tile[0]) if copy.updated else tile[0]
    return wasted, wasted * prod(shape) / min(height, tile[0]) / tile[1]


def _as_arguments(program: Program) -> set[int]:
    """Values that lie as arguments of their shape do: these, parts of them, and their updates."""
    values = {argument.value for argument in program.arguments}
    for op in program.ops:
        part = op.name in (CARRY, RESHAPE) or op.kind.updates or (op.kind.takes_part and not op.kind.lookup)
        if part and op.operands and op.operands[0] in values:
            values.update(op.results[:1])
    return values


def _meets_batches(program: Program, value: int, rows: Dims) -> tuple[bool, Dims]:
    """Whether products of batches read a gathered value, and its row dimension that reshapes on the way merge."""
    merged: Dims = ()
    for number, position in program.users[value]:
        reader = program.ops[number]
        if reader.kind.contraction and not _by_vector(reader) and len(reader.rule.operands) == 2:
            left, right, out = factors_of(*reader.rule.operands, reader.rule.results[0])
            if left & right & out:
                return True, merged
        elif reader.kind.view_or_convert and reader.rule.results:
            if reader.name == RESHAPE:
                last = {factors[-1] for factors in reader.rule.results[0] if len(factors) > 1}
                merged = tuple(d for d in rows if last.intersection(reader.rule.operands[position][d]))
            if _meets_batches(program, reader.results[0], ())[0]:
                return True, merged
    return False, ()


def pieces_are_copied(profile: CompilerProfile, piece: tuple[int, ...], dim: int, *, looked_up: bool) -> bool:
    """Whether gathered pieces are copied. piece: local shape of a matrix before it is gathered along `dim`.

    An all-gather writes the pieces one after another, each in tiles of its own. These form the matrix without a copy if
    each has whole rows of tiles, 8 of f32 as of bf16, along the gathered dimension; the rows of tiles may be either
    dimension for a product, but must be the looked-up one for look-ups. Otherwise a copy assembles it, and both are in
    memory: a table of 50,257 words on 16 devices. Seen in single look-ups and products (64 to 2,048 features, 15,000 to
    640,000 rows) on v4, v5e and v6e (`python -m benchmarks.singles`).
    """
    if "gathered-pieces" not in profile.passes or len(piece) != 2:
        return False
    rows, lanes = profile.memory_tile
    return piece[dim] % (lanes if looked_up and dim == 1 else rows) != 0


# ---------------------------------------------------------------- short tiles
# Arrays in tiles of fewer than 8 rows, which a TPU copies and computes elementwise more slowly.

# Bits of an element -> rows of a tile -> time over that of 8 rows: `x + 1` on arrays of 268 million elements, by
# XLA:TPU's cycles (libtpu 0.0.42.1). v4, v5e, v5p and v6e differ by less than 8 %. Rows that would not fill a word of
# 32 bits are not innermost.
_SLOWDOWN = {8: {4: 1.7}, 16: {4: 1.55, 2: 2.7}, 32: {4: 2.0, 2: 3.1, 1: 5.3}}


def default_layouts(program: Program, tile: TileShape) -> dict[int, Tiling]:
    """Value -> its tiling, of arrays whose last two dimensions are innermost, with whole rows of lanes."""
    values = {argument.value for argument in program.arguments} | {result.value for result in program.results}
    for op in program.ops:
        if not op.operands or op.operands[0] not in values:
            continue
        sliced = op.kind.takes_part and not op.kind.lookup
        keeps = op.name == CARRY or op.kind.updates or sliced or op.kind.elementwise
        if op.name == RESHAPE:  # that removes or adds dimensions of one element in front of the last two
            before, after = (program.values[v].shape for v in (op.operands[0], op.results[0]))
            long = [[n for n in shape if n > 1] for shape in (before, after)]
            keeps = keeps or (before[-2:] == after[-2:] and long[0] == long[1])
        if keeps:
            values.update(op.results[:1])
    for op in program.ops:
        if op.name == CARRY and op.results[0] in values:
            values.update(op.operands)
    tilings = {bits: Tiling((), default_bits=bits) for bits in _SLOWDOWN}
    return {
        number: tilings[bits]
        for number in values
        if len((value := program.values[number]).shape) > 2
        and value.shape[-1] % tile[1] == 0
        and (bits := value.bits) in _SLOWDOWN
    }


def slowdown(shape: tuple[int, ...], tile: TileShape, bits: int) -> float:
    """Time of elementwise work on an array of this local shape over that in tiles of 8 rows."""
    rows = shape[innermost_dims(shape, tile, bits)[1]]
    return next((slower for most, slower in reversed(_SLOWDOWN.get(bits, {}).items()) if rows <= most), 1.0)
