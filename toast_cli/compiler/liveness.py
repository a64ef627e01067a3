"""Liveness of each stored value.

Time runs in half steps: op n reads and writes at 2n, or sooner where the scheduler moves it, see `schedule`; an operand
that an in-place op (elementwise, update of a slice) reads for the last time is freed at 2n - 1, so that its result can
reuse the buffer; for an update, only the updated operand. A value that is fused into its readers is read when they are.
A value read inside a loop but made outside stays until the loop ends; a carried value is live from the loop's start to
its last read in the body, then the body's yield reuses its buffer, and after the loop it is live until its last read.

Enters: a program and which values are stored. Leaves: `Lives`.
"""

from __future__ import annotations

from dataclasses import dataclass

from toast_cli.compiler import in_place_updates
from toast_cli.compiler.in_place_updates import is_within
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.schedule import half_steps
from toast_cli.program.host_memory import TO_HOST, is_transfer
from toast_cli.program.model import Program
from toast_cli.program.ops import ARGUMENT, CARRY, RESULT

Interval = tuple[int, int]  # first and last half step, both included


@dataclass(frozen=True)
class Lives:
    """When each value is alive, in half steps.

    Attributes:
        intervals: [values] when each stored value is alive; empty for values that are not stored.
        times: [ops] when each runs. deaths: [ops] when each last needs its operands.
        program_deaths: [ops] the same if all ops ran in program order.
        read_at: (op, position) -> when that use last needs its operand. It is later than `deaths` where an op in a loop
            reads a value from outside.
        end: last half step of the program.
        into_arguments: `toast.result` ops whose array reuses a donated argument's buffer, in any sharding.
    """

    intervals: list[list[Interval]]
    times: list[int]
    deaths: list[int]
    program_deaths: list[int]
    read_at: dict[tuple[int, int], int]
    end: int
    into_arguments: frozenset[int]


def find_lives(
    program: Program, stored: list[bool], free: tuple[bool, ...], profile: CompilerProfile, parts: list[float]
) -> Lives:
    """The lives of all values. parts: [values] fraction of its bits that is written, see `product_operands`."""
    end = 2 * len(program.ops)
    times = half_steps(program, stored, free, profile)
    takes_over = _takes_over(program, stored, parts, profile)
    deaths = _deaths(program, stored, times, takes_over)
    read_at = _reads(program, times, deaths)
    borrowed = in_place_updates.borrowed(program, read_at, times, profile)
    intervals: list[list[Interval]] = [[] for _ in program.values]
    producer = program.producer
    for value, uses in enumerate(program.users):
        if stored[value] and not borrowed[value]:
            intervals[value] = _intervals(program, producer[value], uses, read_at, times, end)
    _widen_transfers(program, intervals, end)
    program_deaths = _deaths(program, stored, [2 * number for number in range(len(program.ops))], takes_over)
    return Lives(intervals, times, deaths, program_deaths, read_at, end, _into_arguments(program))


def _widen_transfers(program: Program, intervals: list[list[Interval]], end: int) -> None:
    """Transfers outside loops overlap with other work: XLA:TPU starts those to the device before the loop in front of
    them, and finishes those to the host at the end of the program."""
    for number, op in enumerate(program.ops):
        if op.loop >= 0 or not is_transfer(op):
            continue
        value = op.operands[0] if op.detail == TO_HOST else op.results[0]
        first = max((one.first for one in program.loops if one.parent < 0 and one.last < number), default=number)
        if intervals[value]:
            begin, last = intervals[value][0][0], intervals[value][-1][1]
            wide = (begin, end) if op.detail == TO_HOST else (min(begin, 2 * first), last)
            intervals[value] = [wide]


def _reads(program: Program, times: list[int], death: list[int]) -> dict[tuple[int, int], int]:
    """(op, position) -> last half step at which that use needs its operand; for a loop's yield, the end of the
    iteration."""
    ops, loops, producer = program.ops, program.loops, program.producer
    read_at: dict[tuple[int, int], int] = {}
    for value, uses in enumerate(program.users):
        maker = producer[value]
        for op, position in uses:
            loop, at = ops[op].loop, death[op]
            if ops[op].name == CARRY and position == 0:
                loop = loops[loop].parent
            elif ops[op].name == CARRY:
                at = 2 * loops[loop].last - 1
            elif position and ops[op].kind.updates:
                at = max(at, times[op])
            home = ops[maker].loop
            if ops[maker].name == CARRY and not is_within(program, op, home):  # read after the loop
                home = loops[home].parent
            read_at[op, position] = _leave_loops(program, at, loop, home)
    return read_at


def _into_arguments(program: Program) -> frozenset[int]:
    first = len(program.ops) - len(program.results)
    returned = {result.value for result in program.results}
    return frozenset(
        first + a.aliased_result for a in program.arguments if a.aliased_result >= 0 and a.value not in returned
    )


def _takes_over(program: Program, stored: list[bool], parts: list[float], profile: CompilerProfile) -> list[bool]:
    """[ops] whether an op's result can reuse an operand's buffer."""
    if in_place_updates.NAME not in profile.passes:
        return [False] * len(program.ops)
    shrinks = in_place_updates.shrinking(program, stored, parts)
    return [(op.kind.fusible or op.kind.in_place) and not less for op, less in zip(program.ops, shrinks, strict=True)]


def _deaths(program: Program, stored: list[bool], times: list[int], takes_over: list[bool]) -> list[int]:
    """[ops] last half step at which an op needs its operands: when it runs, or when the op it is fused into runs."""
    death = [0] * len(program.ops)
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        at = times[number]
        if op.name == RESULT:
            at = 2 * len(program.ops)
        elif takes_over[number]:
            at -= 1
        if op.results and not stored[op.results[0]]:  # fused into its readers
            readers = [death[u] for u, _ in program.users[op.results[0]]]
            at = max(readers if readers and op.kind.fusible else [at, *readers])
        death[number] = at
    return death


def _leave_loops(program: Program, at: int, loop: int, home: int) -> int:
    """The end of a read: a read within loops inside the value's own loop lasts to the end of the outermost of them."""
    while loop not in (home, -1):
        at = max(at, 2 * program.loops[loop].last - 1)
        loop = program.loops[loop].parent
    return at


def _intervals(
    program: Program,
    maker: int,
    uses: list[tuple[int, int]],
    read_at: dict[tuple[int, int], int],
    times: list[int],
    end: int,
) -> list[Interval]:
    born, loop = times[maker], program.ops[maker].loop
    if program.ops[maker].name == ARGUMENT:
        return [(0, end)]
    if program.ops[maker].name != CARRY:
        return [(born, max([born, *(read_at[u] for u in uses)]))]
    inside = [read_at[u] for u in uses if is_within(program, u[0], loop)]
    outside = [read_at[u] for u in uses if not is_within(program, u[0], loop)]
    body = (born, max(inside, default=born))
    # The body's yield counts at the loop's last half step; right after it, the carry has taken it over.
    return [body, (2 * program.loops[loop].last, max(outside))] if outside else [body]
