"""When each stored value is alive, in program order.

Time runs in half steps: op n reads and writes at 2n; what an in-place op (elementwise, update of a slice) reads for the last
time is gone at 2n - 1, so that its result can take over the buffer. A value that is fused into its readers is read when they
are. A value read inside a loop but made outside stays until the loop ends; a carried value is held from the loop's start to
its last read in the body, then what the body yields takes over, and after the loop it is there until its last read.

Enters: a program and which values are stored. Leaves: `Lives`.
"""

from __future__ import annotations

from dataclasses import dataclass

from toast_cli.cost.fusion import is_fusible
from toast_cli.program.model import ARGUMENT, CARRY, RESULT, Program

Interval = tuple[int, int]  # first and last half step, both included

_IN_PLACE = frozenset({"stablehlo.dynamic_update_slice", "stablehlo.scatter", CARRY, "stablehlo.optimization_barrier"})


@dataclass(frozen=True)
class Lives:
    """intervals: [values] half steps at which each stored value is alive ([] for values that are not stored).
    read_at: (op, position) -> half step until which that use needs its operand. end: last half step of the program."""

    intervals: list[list[Interval]]
    read_at: dict[tuple[int, int], int]
    end: int


def find_lives(program: Program, stored: list[bool]) -> Lives:
    ops = program.ops
    end = 2 * len(ops)
    death = _deaths(program, stored)
    borrowed = _borrowed(program, death)
    intervals: list[list[Interval]] = [[] for _ in program.values]
    read_at: dict[tuple[int, int], int] = {}
    producer = program.producer
    for value, uses in enumerate(program.users):
        maker = producer[value]
        home = ops[maker].loop if ops[maker].name != CARRY else program.loops[ops[maker].loop].parent
        for op, position in uses:
            read_at[op, position] = _leave_loops(program, death[op], ops[op].loop if ops[op].name != CARRY else _carry_loop(program, op, position), home)
        if stored[value] and not borrowed[value]:
            intervals[value] = _intervals(program, value, maker, uses, read_at, end)
    return Lives(intervals, read_at, end)


def _borrowed(program: Program, death: list[int]) -> list[bool]:
    """[values] whether a value lies in a donated argument's buffer: the results that take it over, and what leads there in place.

    A chain of in-place updates (a cache carried through a loop) starts at the argument, as long as nothing reads the older
    contents afterwards.
    """
    donated = {a.value for a in program.arguments if a.aliased_result >= 0}
    borrowed = [False] * len(program.values)

    def last_read(value: int) -> int:
        return max((death[u] for u, _ in program.users[value]), default=0)

    for number, op in enumerate(program.ops):
        if op.name in _IN_PLACE and op.operands:
            source = op.operands[0]
            if (source in donated or borrowed[source]) and last_read(source) <= 2 * number:
                borrowed[op.results[0]] = True
    for argument in program.arguments:
        if argument.aliased_result >= 0:
            result = program.results[argument.aliased_result].value
            maker = program.producer[result]
            if last_read(argument.value) <= 2 * maker and program.ops[maker].name != ARGUMENT:
                borrowed[result] = True
    return borrowed


def _carry_loop(program: Program, op: int, position: int) -> int:
    loop = program.ops[op].loop
    return program.loops[loop].parent if position == 0 else loop


def _deaths(program: Program, stored: list[bool]) -> list[int]:
    """[ops] half step until which an op needs its operands: when it runs, or when whatever it is fused into runs."""
    death = [0] * len(program.ops)
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        at = 2 * number
        if op.name == RESULT:
            at = 2 * len(program.ops)
        elif is_fusible(op.name) or op.name in _IN_PLACE:
            at -= 1
            if not stored[op.results[0]]:
                at = max([at, *(death[u] for u, _ in program.users[op.results[0]])])
        elif op.results and not stored[op.results[0]]:
            at = max([at, *(death[u] for u, _ in program.users[op.results[0]])])
        death[number] = at
    return death


def _leave_loops(program: Program, at: int, loop: int, home: int) -> int:
    """A read inside loops that the value's own loop contains lasts to the end of the outermost of them."""
    while loop not in (home, -1):
        at = max(at, 2 * program.loops[loop].last - 1)
        loop = program.loops[loop].parent
    return at


def _intervals(
    program: Program, value: int, maker: int, uses: list[tuple[int, int]], read_at: dict[tuple[int, int], int], end: int
) -> list[Interval]:
    ops = program.ops
    born = 2 * maker
    if ops[maker].name == ARGUMENT:
        return [(0, end)]
    if ops[maker].name == CARRY:
        last = 2 * program.loops[ops[maker].loop].last - 1
        inside = [read_at[u] for u in uses if maker < u[0] and 2 * u[0] <= last]
        outside = [read_at[u] for u in uses if 2 * u[0] > last]
        body = (born, min(max(inside, default=born), last))
        return [body, (last, max(outside))] if outside else [body]
    for op, position in uses:
        if ops[op].name == CARRY and position == 1:  # held to the end of the iteration
            return [(born, max(2 * program.loops[ops[op].loop].last - 1, max(read_at[u] for u in uses)))]
    return [(born, max((read_at[u] for u in uses), default=born))]
