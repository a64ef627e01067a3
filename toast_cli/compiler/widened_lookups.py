"""Widened look-ups: rows in which single elements are looked up lie in memory in the look-up's own type.

A loss looks up each label's logit in f32 where logits are bf16 (`take_along_axis` of `logits.astype(f32)`). All else
widens them as it reads (see `narrow_stores`), but a gather reads memory, so that XLA:TPU's kernel that makes the logits
writes them twice: as bf16, for the backward pass, and as f32 until the look-up. Seen in the losses of decoders,
recurrent networks and state-space models compiled by libtpu 0.0.42.1 for v5e, where the two make the peak. Tables that
are arguments, of which a few rows are read, are looked up as they are. Without this pass there is one array.

Enters: a program, which values are written and when things happen. Leaves: which values are written a second time, and
until when.
"""

from __future__ import annotations

from toast_cli.compiler.liveness import Interval, Lives
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ARGUMENT, CARRY, CONVERT, GATHER, RESHAPE

NAME = "widened-lookups"


def written_again(
    program: Program, stored: list[bool], lives: Lives, profile: CompilerProfile
) -> dict[int, list[Interval]]:
    """Value that is not in memory otherwise -> from when what it widens is made until it is looked up for the last
    time."""
    if NAME not in profile.passes:
        return {}
    found: dict[int, list[Interval]] = {}
    for number, op in enumerate(program.ops):
        if op.name == GATHER and _picks_in_rows(op):
            value = op.operands[0]
            source = _narrower(program, stored, value)
            maker = program.producer[source]
            if source != value and program.ops[maker].name not in (ARGUMENT, CARRY):
                born = lives.times[maker]
                known = found.get(value, [(born, born)])
                found[value] = [(born, max(known[0][1], lives.times[number]))]
    return found


def _picks_in_rows(op: Op) -> bool:
    """Whether rows of the indices belong to rows of the array."""
    rows, indices = ({factor for dim in dims for factor in dim} for dims in op.rule.operands[:2])
    return any(op.rule.sizes[factor] > 1 for factor in rows & indices)


def _narrower(program: Program, stored: list[bool], value: int) -> int:
    """The array in memory that a value is a wider view of; the value itself where there is none."""
    source = value
    while not stored[source]:
        maker = program.ops[program.producer[source]]
        if maker.name not in (CONVERT, RESHAPE):
            return value
        source = maker.operands[0]
    return source if program.values[source].bytes < program.values[value].bytes else value
