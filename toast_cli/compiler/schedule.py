"""Early results: ops run in program order, except those that XLA's scheduler moves up because they free memory or take
none.

Results of the program (such as a weight's update) are computed as soon as their operands are available, so that
gradients do not wait for one another; so is the epilogue of a product, which is part of its kernel. A result that
reuses a donated argument's buffer waits until nothing else reads the argument. For ops that wait for a loop see
`loops_first`. Without this pass everything runs in program order.

Enters: a program and its written values. Leaves: a half step for each op; op n runs at 2n unless it is moved.
"""

from __future__ import annotations

from toast_cli.compiler import loops_first
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program
from toast_cli.program.ops import ARGUMENT, RESULT

NAME = "early-results"
_NOBODY = (-1, -1)


def half_steps(program: Program, stored: list[bool], free: tuple[bool, ...], profile: CompilerProfile) -> list[int]:
    """[ops] the half step at which each runs."""
    ops, loops = program.ops, program.loops
    times = [2 * number for number in range(len(ops))]
    returned, aliased = _returned(program)
    waits = _last_readers(program, stored)
    ready = [0] * len(program.values)  # [values] when each can be read or recomputed
    finishing = [False] * len(program.values)  # results of contractions that are not written yet
    after = loops_first.after_loops(program, stored, profile)
    sooner = loops_first.before_loops(program, stored, waits, profile)
    early = NAME in profile.passes
    waiting: list[tuple[int, int, int]] = []  # (op, earliest time, op it waits for)
    for number, op in enumerate(ops):
        if op.name == ARGUMENT:
            continue
        known = [max(ready[v], _loop_over(program, v, number)) for v in op.operands if not free[v]]
        earliest = max(known, default=0)
        if after[number]:
            times[number] = max(times[number], after[number])
        if op.loop >= 0:
            earliest = max(earliest, 2 * loops[op.loop].first)
        moves = op.kind.elementwise or op.kind.view_or_convert
        if len(op.results) != 1 or not early:
            moves = False
        if number in sooner:
            times[number] = earliest
        for value in op.results:
            finishes = moves and any(finishing[v] for v in op.operands)
            if not stored[value] and not op.kind.matrix_unit:
                ready[value] = earliest
                finishing[value] = finishes
                continue
            scalar = op.loop < 0 and not program.values[value].shape
            if moves and (scalar or (earliest > 0 and (finishes or value in returned))):
                reader = _other_reader(aliased.get(value, -1), number, waits)
                if reader > number:  # whose time is not known yet
                    waiting.append((number, earliest, reader))
                times[number] = min(times[number], max(earliest, _argument_free(reader, times)))
            ready[value] = times[number]
            finishing[value] = op.kind.matrix_unit and not stored[value]
    for number, earliest, reader in reversed(waiting):
        times[number] = min(times[number], max(earliest, _argument_free(reader, times)))
    return times


def _loop_over(program: Program, value: int, reader: int) -> int:
    """End of the outermost loop around a value that does not contain its reader; 0 if there is none."""
    loop, over = program.ops[program.producer[value]].loop, 0
    while loop >= 0 and not program.loops[loop].first <= reader < program.loops[loop].last:
        loop, over = program.loops[loop].parent, 2 * program.loops[loop].last
    return over


def _returned(program: Program) -> tuple[set[int], dict[int, int]]:
    """(values that are results, result -> value of the argument whose buffer it reuses)."""
    aliased = {
        program.results[a.aliased_result].value: a.value for a in program.arguments if a.aliased_result >= 0
    }  # fmt: skip
    return {result.value for result in program.results}, aliased


def _other_reader(argument: int, number: int, waits: list[tuple[int, int]]) -> int:
    """Last op of the last other kernel that reads `argument`; -1 for none."""
    return -1 if argument < 0 else next((end for end in waits[argument] if end not in (number, -1)), -1)


def _argument_free(reader: int, times: list[int]) -> int:
    """When an argument's buffer may be overwritten; reader: last op of the last kernel that reads it."""
    return times[reader] + 1 if reader >= 0 else 0


def _last_readers(program: Program, stored: list[bool]) -> list[tuple[int, int]]:
    """[values] last ops of the last two kernels that read each value, the later one first; -1 for none."""
    found = [_NOBODY] * len(program.values)
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        ends = found[op.results[0]] if len(op.results) == 1 and not stored[op.results[0]] else _NOBODY
        if ends is _NOBODY:
            ends = (number, -1)
        if op.name == RESULT:
            continue
        for value in op.operands:
            known = found[value]
            if known is _NOBODY:
                found[value] = ends
            elif known != ends:
                first, second, *_ = (*sorted({*known, *ends} - {-1}, reverse=True), -1)
                found[value] = (first, second)
    return found
