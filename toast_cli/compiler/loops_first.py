"""Loops first: a contraction that stands before a loop and is read only after it runs after the loop.

The gradient of an output projection, before the loop over the layers, is the common case: it keeps what it reads (the
logits) until the loop is over. So does one whose result is only cast or changes its form before. Seen in schedules of
libtpu 0.0.42.1. Without this pass a contraction runs where the program has it.

Enters: a program and which values are written. Leaves: for each op the end of the loops that it waits for.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program

NAME = "loops-first"


def after_loops(program: Program, stored: list[bool], profile: CompilerProfile) -> list[int]:
    """[ops] half step at which the last loop between a product and all that reads it is over; 0 where there is none."""
    ends = sorted((loop.last, loop.first) for loop in program.loops if loop.parent < 0)
    found = [0] * len(program.ops)
    if not ends or NAME not in profile.passes:
        return found
    first = _first_readers(program, stored)
    for number, op in enumerate(program.ops):
        if op.loop < 0 and op.kind.matrix_unit and len(op.results) == 1:
            over = [last for last, start in ends if number < start and last <= first[op.results[0]]]
            found[number] = 2 * over[-1] if over else 0
    return found


def _first_readers(program: Program, stored: list[bool]) -> list[int]:
    """[values] the first op that ends a kernel which reads each value."""
    found = [len(program.ops)] * len(program.values)
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        end = number
        if len(op.results) == 1 and (op.kind.view_or_convert or not stored[op.results[0]]):
            end = found[op.results[0]]
        for value in op.operands:
            found[value] = min(found[value], end)
    return found
