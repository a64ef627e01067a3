"""Tile dimensions: chooses the two innermost dimensions of an array, which are padded to tiles.

The compiler chooses those that waste least, among those that the array's contractions allow (all as seen in programs
compiled by libtpu 0.0.42.1): batch dimensions of a contraction's arrays and spatial dimensions of a convolution's are
not innermost. Elementwise results and transposes between contractions follow them; a reshaped array keeps the tiles of
its operand, but a dimension that is split in the middle of a tile (channels into groups) is not innermost. Without this
pass any two dimensions that waste least are chosen.

Enters: a program. Leaves: a `Tiling` for each value.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from toast_cli.compiler.profile import TileShape
from toast_cli.compiler.tiling import UNPADDED, UNTILED, Dims, Tiling, growth
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ARGUMENT, CONVOLUTION, REDUCE, RESHAPE, TRANSPOSE

NAME = "tile-dimensions"


def tilings(
    program: Program, tile: TileShape, *, chosen: bool = True, rows: Mapping[int, Dims] = MappingProxyType({})
) -> list[Tiling]:
    """[values] tiling of each on a chip with these tiles. chosen: apply the rules of this pass, else take any two
    dimensions that waste least. rows: value -> the dimensions along which its rows run, see `lookup_rows`."""
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
    found, ops, producer = [], program.ops, program.producer
    for number, value in enumerate(program.values):
        if ops[producer[number]].name == ARGUMENT:
            found.append(Tiling(allowed[number] or (), copies=True))
            continue
        if number in rows:
            along = rows[number]
            found.append(Tiling(tuple(range(len(value.shape))), lanes=along) if len(along) == 1 else Tiling(along))
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
    same: dict[Tiling, Tiling] = {}  # few tilings are distinct
    return [same.setdefault(tiling, tiling) for tiling in found]


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
        left, right, out = ({f for dim in dims for f in dim} for dims in (*rule.operands[:2], rule.results[0]))
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
        known = allowed[source]
        if known is None or allowed[target] is not None:
            continue
        factors = {f for d in known if d < len(of) for f in of[d]}
        kept = tuple(d for d, found in enumerate(to) if factors.intersection(found))
        if kept:
            allowed[target] = kept
