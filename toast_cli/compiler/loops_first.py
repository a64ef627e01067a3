"""Loops first: a contraction that stands before a loop and is read only after it runs after the loop, if the loop sets
more memory free.

The gradient of an output projection, before the backward loop over the layers, is the common case. It keeps what it
reads (the gradient of the logits). XLA's list scheduler runs first what sets most memory free: the contraction, whose
operand nobody reads afterwards, or the loop, which is the last to read what the forward loop saved. Seen in schedules
of libtpu 0.0.42.1 for scanned decoders: where layers save nothing but their inputs, the contraction comes first in 10
of 13; where they save the results of contractions, the loop does in 7 of 7. Without this pass a contraction runs where
the program has it.

Enters: a program and which values are written. Leaves: for each op the end of the loops that it waits for.
"""

from __future__ import annotations

from bisect import bisect_right

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program
from toast_cli.program.ops import CARRY

NAME = "loops-first"


def after_loops(program: Program, stored: list[bool], profile: CompilerProfile) -> list[int]:
    """[ops] half step at which the last loop between a product and all that reads it is over; 0 where there is none."""
    ends = sorted((loop.last, loop.first) for loop in program.loops if loop.parent < 0)
    found = [0] * len(program.ops)
    if not ends or NAME not in profile.passes:
        return found
    first, freed = _first_readers(program, stored), _freed_by(program, stored, ends)
    for number, op in enumerate(program.ops):
        if op.loop < 0 and op.kind.matrix_unit and len(op.results) == 1:
            over = [loop for loop in ends if number < loop[1] and loop[0] <= first[op.results[0]]]
            kept = {v for v in op.operands if stored[v] and over}
            waits = [
                last
                for last, start in over
                if freed[last] >= sum(program.values[v].bytes for v in kept if program.users[v][-1][0] < start)
            ]
            found[number] = 2 * waits[-1] if waits else 0
    return found


def _freed_by(program: Program, stored: list[bool], ends: list[tuple[int, int]]) -> dict[int, int]:
    """End of a loop -> bytes of what is made before it and read for the last time in it, but for what it carries on."""
    freed = dict.fromkeys((last for last, _ in ends), 0)
    arguments = {argument.value for argument in program.arguments}
    for value, users in enumerate(program.users):
        readers = [number for number, _ in users]
        if not readers or not stored[value] or value in arguments or program.ops[readers[0]].name == CARRY:
            continue
        over = bisect_right(ends, max(readers), key=lambda loop: loop[0])  # the first loop that ends behind the reader
        if over < len(ends) and program.producer[value] < ends[over][1] <= max(readers):
            freed[ends[over][0]] += program.values[value].bytes
    return freed


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
