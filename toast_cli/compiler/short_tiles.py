"""Arrays in tiles of fewer than 8 rows, which a TPU copies and computes elementwise more slowly.

XLA:TPU may choose which two dimensions of an intermediate array are innermost. Arguments and results have the last two
there, and so do arrays that a loop carries, slices or updates for them: a cache [batch, length, heads, 128] with 2
heads on each device lies in tiles of 2 rows. Elementwise work takes about as long for each tile as for one of 8 rows.

In: a program. Out: the values that lie so, and the slowdown of a local shape.
"""

from __future__ import annotations

from toast_cli.compiler.layouts import Tiling, innermost_dims
from toast_cli.compiler.profile import TileShape
from toast_cli.program.model import DTYPE_BITS, Op, Program
from toast_cli.program.ops import CARRY, RESHAPE

# Bits of an element -> rows of a tile -> time over that of 8 rows: `x + 1` on arrays of 268 million elements, by
# XLA:TPU's cycles (libtpu 0.0.42.1). v4, v5e, v5p and v6e differ by less than 8 %. Rows that would not fill a word of
# 32 bits are not innermost.
_SLOWDOWN = {8: {4: 1.7}, 16: {4: 1.55, 2: 2.7}, 32: {4: 2.0, 2: 3.1, 1: 5.3}}


def default_layouts(program: Program, tile: TileShape) -> dict[int, Tiling]:
    """Value -> its tiling, of arrays whose last two dimensions are innermost, with whole rows of lanes."""
    found = {argument.value for argument in program.arguments} | {result.value for result in program.results}
    for op in program.ops:
        if op.operands and op.operands[0] in found and (_keeps(op) or _squeezes(program, op)):
            found.update(op.results[:1])
    for op in program.ops:
        if op.name == CARRY and op.results[0] in found:
            found.update(op.operands)
    tilings = {bits: Tiling((), default_bits=bits) for bits in _SLOWDOWN}
    return {
        number: tilings[bits]
        for number in found
        if len((value := program.values[number]).shape) > 2
        and value.shape[-1] % tile[1] == 0
        and (bits := DTYPE_BITS.get(value.dtype, 0)) in _SLOWDOWN
    }


def _keeps(op: Op) -> bool:
    sliced = op.kind.takes_part and not op.kind.lookup
    return op.name == CARRY or op.kind.updates or sliced or op.kind.elementwise


def _squeezes(program: Program, op: Op) -> bool:
    """Whether an op removes or adds dimensions of one element in front of the last two."""
    if op.name != RESHAPE:
        return False
    before, after = (program.values[v].shape for v in (op.operands[0], op.results[0]))
    return before[-2:] == after[-2:] and [n for n in before if n > 1] == [n for n in after if n > 1]


def slowdown(shape: tuple[int, ...], tile: TileShape, bits: int) -> float:
    """Time of elementwise work on an array of this local shape over that in tiles of 8 rows."""
    rows = shape[innermost_dims(shape, tile, bits)[1]]
    return next((slower for most, slower in reversed(_SLOWDOWN[bits].items()) if rows <= most), 1.0)
