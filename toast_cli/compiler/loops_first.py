"""Loops first: moves ops that do not depend on a loop before it or after it.

XLA's schedulers do not keep the order of the program. The gradient of an output projection beside the backward loop
over the layers is the common case: it is the last to read the gradient of the logits. If it is before the loop, it
waits for the loop if that frees more memory: seen in schedules of libtpu 0.0.42.1 for scanned decoders. If it is after
the loop and does not depend on it, as in programs from HLO text (MaxText's training steps), it runs before it if it
frees more than it writes; so do sums over logits that a step reports. Without this pass everything runs in program
order.

Enters: a program and its written values. Leaves: for each op the end of the loops that it waits for, and the ops that
run as soon as their operands are available.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program
from toast_cli.program.ops import ARGUMENT, CARRY, REDUCE

NAME = "loops-first"


def after_loops(program: Program, stored: list[bool], profile: CompilerProfile) -> list[int]:
    """[ops] half step at which the last loop that a contraction waits for ends; 0 if there is none."""
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


def before_loops(
    program: Program, stored: list[bool], waits: list[tuple[int, int]], profile: CompilerProfile
) -> set[int]:
    """Ops after a loop that do not depend on it and free more bytes than they write.

    waits: [values] the last ops of the last two kernels that read each.
    """
    ends = sorted((loop.last, loop.first) for loop in program.loops if loop.parent < 0)
    if not ends or NAME not in profile.passes:
        return set()
    behind = [0] * len(program.values)  # [values] end of the last loop each depends on
    over: dict[int, tuple[int, int]] = {}  # op -> first loop before it that it does not depend on
    for number, op in enumerate(program.ops):
        latest = max((behind[v] for v in op.operands), default=0)
        if op.loop >= 0:
            latest = ends[bisect_right(ends, number, key=itemgetter(0))][0]
        elif op.results and op.kind.matrix_unit | (op.name == REDUCE):
            passed = bisect_left(ends, latest, key=itemgetter(1))
            if passed < len(ends) and ends[passed][0] <= number:
                over[number] = ends[passed]
        for value in op.results:
            behind[value] = latest
    gains = dict.fromkeys(over, 0)
    for value, (reader, other) in enumerate(waits):
        made = program.producer[value]
        if not stored[value] or reader not in over or program.ops[made].name == ARGUMENT:
            continue
        if made < over[reader][1] and (other in over or other < over[reader][1]):
            gains[reader] += program.values[value].bytes
    sizes = [value.bytes for value in program.values]
    return {op for op, gain in gains.items() if gain > sum(sizes[v] for v in program.ops[op].results)}


def _freed_by(program: Program, stored: list[bool], ends: list[tuple[int, int]]) -> dict[int, int]:
    """End of a loop -> bytes of values that are made before it and last read in it, its carries excepted."""
    freed = dict.fromkeys((last for last, _ in ends), 0)
    arguments = {argument.value for argument in program.arguments}
    for value, users in enumerate(program.users):
        readers = [number for number, _ in users]
        if not readers or not stored[value] or value in arguments or program.ops[readers[0]].name == CARRY:
            continue
        over = bisect_right(ends, max(readers), key=itemgetter(0))  # first loop that ends after the reader
        if over < len(ends) and program.producer[value] < ends[over][1] <= max(readers):
            freed[ends[over][0]] += program.values[value].bytes
    return freed


def _first_readers(program: Program, stored: list[bool]) -> list[int]:
    """[values] last op of the first kernel that reads each value."""
    found = [len(program.ops)] * len(program.values)
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        end = number
        if len(op.results) == 1 and (op.kind.view_or_convert or not stored[op.results[0]]):
            end = found[op.results[0]]
        for value in op.operands:
            found[value] = min(found[value], end)
    return found
