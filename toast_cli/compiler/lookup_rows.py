"""Rows of look-ups: what scatters read, and what is gathered for them alone, has its rows in the lanes.

A TPU moves a row at a time, so that XLA:TPU lays out both with the dimension that a row runs along innermost, and
narrow rows are padded to 128 lanes: 327,680 rows of 16 f32 take 160 MiB and not 20. Seen in gathers of rows and segment
sums compiled by libtpu 0.0.42.1 for v5e (rows of 8 to 256 elements of f32 and bf16, 16,384 to 1,048,576 of them) and in
graph networks. What others read of gathered rows is laid out anew, by a copy, and lives longer than the rows
themselves, which are not counted. A scatter into less than `scatter_bytes` keeps that on the chip and computes what it
adds as it reads it; larger ones sort their indices, and what they add is written first. Told by whole arrays, before
any plan is known: a plan that splits the rows scattered into may get below that. Single elements, and rows of several
dimensions, are laid out as other arrays are. Without this pass everything is.

Enters: a program and a profile. Leaves: which dimension of a value is in the lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import GATHER, SCATTER

NAME = "lookup-rows"
_UPDATES = 2  # which operand of a scatter they are


def lanes_of_rows(program: Program, profile: CompilerProfile) -> dict[int, int]:
    """Value -> the dimension along which its rows run."""
    if NAME not in profile.passes:
        return {}
    large = [op.name == SCATTER and _table_bytes(program, op, profile) >= profile.scatter_bytes for op in program.ops]
    into_scatters = _into_scatters(program, large)
    found: dict[int, int] = {}
    for op, sorts in zip(program.ops, large, strict=True):
        if op.name == GATHER and into_scatters[op.results[0]]:
            found.update(_rows(program, op, op.results[0], op.rule.results))
        elif sorts and len(op.operands) == _UPDATES + 1:
            found.update(_rows(program, op, op.operands[_UPDATES], op.rule.operands[_UPDATES:]))
    return found


def _table_bytes(program: Program, op: Op, profile: CompilerProfile) -> float:
    """Of what a scatter adds to, as f32 with its last dimension in the lanes."""
    *rows, width = program.values[op.operands[0]].shape or (1,)
    lanes = profile.memory_tile[1]
    return 4.0 * prod(rows) * ceil(width / lanes) * lanes


def _into_scatters(program: Program, large: list[bool]) -> list[bool]:
    """[values] whether `large` scatters alone read it, and what is elementwise on the way to them."""
    found = [False] * len(program.values)
    for value in range(len(program.values) - 1, -1, -1):
        uses = program.users[value]
        found[value] = bool(uses) and all(
            (large[reader] and position == _UPDATES)
            or (program.ops[reader].kind.elementwise and found[program.ops[reader].results[0]])
            for reader, position in uses
        )
    return found


def _rows(
    program: Program, op: Op, value: int, rule: tuple[tuple[tuple[int, ...], ...], ...]
) -> Iterator[tuple[int, int]]:
    """`value` and its rows' dimension, if there is one. rule: the factors of its dimensions, first."""
    if not rule or len(op.rule.operands) < _UPDATES:
        return
    table, indices = ({factor for dim in dims for factor in dim} for dims in op.rule.operands[:2])
    shape = program.values[value].shape
    rows = [d for d, factors in enumerate(rule[0]) if shape[d] > 1 and (table - indices).intersection(factors)]
    if len(rows) == 1 and len(shape) > 1:
        yield value, rows[0]
