"""Schedule: ops run in program order, except those that XLA's scheduler moves because that frees memory or takes none.

Results of the program (such as a weight's update) are computed as soon as their operands are available, so that
gradients do not wait for one another; so is the epilogue of a product, which is part of its kernel. A result that
reuses a donated argument's buffer waits until nothing else reads the argument.

The gradient of an output projection beside the backward loop over the layers is the last to read the gradient of the
logits. If it is after the loop and does not depend on it, as in programs from HLO text (MaxText's training steps), it
runs before it if it frees more than it writes; so do sums over logits that a step reports. (libtpu 0.0.42.1 schedules
so in scanned decoders; it keeps the gradient of the logits through the loop only where a look-up in f32 logits stands
behind it, which is not counted.)

In: a program and its written values. Out: a tick for each op; op n runs at 2n unless it is moved.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Program
from toast_cli.program.ops import ADD, ARGUMENT, REDUCE, RESULT

_NOBODY = (-1, -1)


def op_ticks(program: Program, stored: list[bool], free: tuple[bool, ...], profile: CompilerProfile) -> list[int]:
    """[ops] the tick at which each runs."""
    ops, loops = program.ops, program.loops
    times = [2 * number for number in range(len(ops))]
    returned, aliased = _returned(program)
    waits = _last_readers(program, stored)
    ready = [0] * len(program.values)  # [values] when each can be read or recomputed
    finishing = [False] * len(program.values)  # results of contractions that are not written yet
    sooner = before_loops(program, stored, waits, profile)
    early = "early-results" in profile.passes
    waiting: list[tuple[int, int, int]] = []  # (op, earliest time, op it waits for)
    for number, op in enumerate(ops):
        if op.name == ARGUMENT:
            continue
        known = [max(ready[v], _loop_over(program, v, number)) for v in op.operands if not free[v]]
        earliest = max(known, default=0)
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


def before_loops(
    program: Program, stored: list[bool], waits: list[tuple[int, int]], profile: CompilerProfile
) -> set[int]:
    """Ops after a loop that do not depend on it and free more bytes than they write.

    waits: [values] the last ops of the last two kernels that read each.
    """
    ends = sorted((loop.last, loop.first) for loop in program.loops if loop.parent < 0)
    if not ends or "loops-first" not in profile.passes:
        return set()
    behind = [0] * len(program.values)  # [values] end of the last loop each depends on
    over: dict[int, tuple[int, int]] = {}  # last op of a kernel -> first loop before it that it does not depend on
    begins: dict[int, int] = {}  # last op of such a kernel -> its contraction or reduction
    for number, op in enumerate(program.ops):
        latest = max((behind[v] for v in op.operands), default=0)
        if op.loop >= 0:
            latest = ends[bisect_right(ends, number, key=itemgetter(0))][0]
        elif op.results and op.kind.matrix_unit | (op.name == REDUCE):
            passed = bisect_left(ends, latest, key=itemgetter(1))
            if passed < len(ends) and ends[passed][0] <= number:
                end = _end_of_kernel(program, stored, number)
                over[end], begins[end] = ends[passed], number
        for value in op.results:
            behind[value] = latest
    over = {end: loop for end, loop in over.items() if behind[_added_to(program, end)] <= loop[1]}
    gains = dict.fromkeys(over, 0)
    for value, (reader, other) in enumerate(waits):
        made = program.producer[value]
        if not stored[value] or reader not in over or program.ops[made].name == ARGUMENT:
            continue
        if made < over[reader][1] and (other in over or other < over[reader][1]):
            gains[reader] += program.values[value].bytes
    sizes = [value.bytes for value in program.values]
    return {begins[end] for end, gain in gains.items() if gain > sum(sizes[v] for v in program.ops[end].results)}


def _end_of_kernel(program: Program, stored: list[bool], number: int) -> int:
    """The last op of the epilogue of op `number`: the one whose result is written."""
    while not stored[result := program.ops[number].results[0]] and len(program.users[result]) == 1:
        number = program.users[result][0][0]
    return number


def _added_to(program: Program, end: int) -> int:
    """The sum that the result of a kernel is a term of, if nothing else reads the result; else that result. XLA:TPU
    adds a tied embedding's two gradients in the kernel of the head's product (MaxText's Gemma 3).
    """
    value = program.ops[end].results[0]
    while len(program.users[value]) == 1:
        reader = program.ops[program.users[value][0][0]]
        if not (reader.kind.view_or_convert or reader.name == ADD):
            break
        value = reader.results[0]
        if reader.name == ADD:
            return value
    return program.ops[end].results[0]


def copy_made_at(program: Program, loop: int, home: int, first: int) -> int:
    """Half step at which a copy of an array of loop `home` (-1: outside of all loops) is made in `loop`, whose first
    read is at `first`: a loop gathers all loop-invariant arrays at the start of an iteration (libtpu 0.0.42.1 for v5e
    alone).
    """
    return min(first, 2 * program.loops[loop].first) if loop >= 0 and loop != home else first
