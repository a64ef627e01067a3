"""Rows of look-ups: what is gathered, and what scatters read, has its rows in the lanes.

A TPU moves a row at a time, so that XLA:TPU lays out both with the dimension that a row runs along innermost, and
narrow rows are padded to 128 lanes: 327,680 rows of 16 f32 take 160 MiB and not 20, the ends of 1,048,576 edges in
space 512 and not 16. Elementwise results of such rows, which keep their layout. Seen in gathers of rows and segment
sums compiled by libtpu 0.0.42.1 for v5e (rows of 2 to 256 elements of f32 and bf16, 16,384 to 1,048,576 of them) and in
graph networks. A scatter into less than `scatter_bytes` keeps that on the chip and computes what it adds as it reads
it; larger ones sort their indices, and what they add is written first, with the last two dimensions innermost that a
row runs along. Told by whole arrays, before any plan is known: a plan that splits the rows scattered into may get below
that. What products read of gathered rows is laid out anew, by a copy, and lives longer than the rows themselves, which
are not counted. Single elements, and gathered rows of several dimensions, are laid out as other arrays are. Without
this pass everything is.

Enters: a program and a profile. Leaves: which dimensions of a value its rows run along.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.tiling import Dims
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import GATHER, SCATTER

NAME = "lookup-rows"
_UPDATES = 2  # position of a scatter's updates


def dims_of_rows(program: Program, profile: CompilerProfile) -> dict[int, Dims]:
    """Value -> the dimensions along which its rows run: the one that is in the lanes, or those that are innermost."""
    if NAME not in profile.passes:
        return {}
    large = [op.name == SCATTER and _table_bytes(program, op, profile) >= profile.scatter_bytes for op in program.ops]
    found: dict[int, Dims] = {}
    for op, sorts in zip(program.ops, large, strict=True):
        if op.name == GATHER and _combined(program, op.results[0]):
            rows = _rows(program, op, op.results[0], op.rule.results)
            found.update((value, dims) for value, dims in rows if len(dims) == 1)
        elif sorts and len(op.operands) == _UPDATES + 1:
            found.update(_rows(program, op, op.operands[_UPDATES], op.rule.operands[_UPDATES:]))
        elif op.kind.elementwise:
            found.update(_passed_on(program, op, found))
    return found


def _combined(program: Program, value: int) -> bool:
    """Whether rows are read only elementwise and by scatters, so that no contraction needs another layout."""
    readers = [program.ops[user] for user, _ in program.users[value]]
    return all(reader.kind.elementwise or reader.name == SCATTER for reader in readers)


def _passed_on(program: Program, op: Op, found: dict[int, Dims]) -> Iterator[tuple[int, Dims]]:
    """Elementwise results of such rows, which keep their layout."""
    for value in op.operands:
        if value in found and program.values[value].shape == program.values[op.results[0]].shape:
            yield op.results[0], found[value]


def _table_bytes(program: Program, op: Op, profile: CompilerProfile) -> float:
    """Bytes of a scatter's operand as f32 with its last dimension in the lanes."""
    *rows, width = program.values[op.operands[0]].shape or (1,)
    lanes = profile.memory_tile[1]
    return 4.0 * prod(rows) * ceil(width / lanes) * lanes


def _rows(
    program: Program, op: Op, value: int, rule: tuple[tuple[tuple[int, ...], ...], ...]
) -> Iterator[tuple[int, Dims]]:
    """(`value`, its rows' dimensions), if there are any. rule: its first entry has the factors of the value's
    dimensions."""
    if not rule or len(op.rule.operands) < _UPDATES:
        return
    table, indices = ({factor for dim in dims for factor in dim} for dims in op.rule.operands[:2])
    shape = program.values[value].shape
    rows = tuple(d for d, factors in enumerate(rule[0]) if shape[d] > 1 and (table - indices).intersection(factors))
    if rows and len(shape) > 1:
        yield value, rows
