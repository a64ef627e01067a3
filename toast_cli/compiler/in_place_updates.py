"""In-place updates: results reuse the buffers of operands without later readers.

Updates of slices, scatters, loop carries and elementwise ops write into the buffer of their first operand; the result
for a donated argument reuses the argument's buffer. A chain of in-place updates (a cache carried through a loop) starts
at the argument, as long as nothing reads the older contents afterwards. This is XLA's buffer sharing and its copy
elision, seen in every program that libtpu 0.0.42.1 compiled. Without this pass every array has a buffer of its own,
except arrays that scans stack (`scan_unification`).

Only arrays of one size share a buffer: an array written in fewer bits than its operands (the gradient of f32 logits,
for products that multiply bf16) has one of its own.

Enters: a program, and the times of its reads. Leaves: the values that share a buffer that is counted already.
"""

from __future__ import annotations

from toast_cli.compiler.loop_copies import copied_carries
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.compiler.scan_unification import unified_carries
from toast_cli.program.model import DTYPE_BITS, Program
from toast_cli.program.ops import ARGUMENT, CARRY

NAME = "in-place-updates"


def borrowed(
    program: Program, read_at: dict[tuple[int, int], int], times: list[int], profile: CompilerProfile
) -> list[bool]:
    """[values] whether a value shares a buffer that is counted already.

    read_at: (op, position) -> last half step at which that use needs its operand. times: [ops] half step at
    which each runs.
    """
    donated = {a.value for a in program.arguments if a.aliased_result >= 0}
    borrowed = [False] * len(program.values)
    copied, unified = copied_carries(program, profile), unified_carries(program, profile)
    in_place = NAME in profile.passes

    def last_read(value: int) -> int:
        """The last read of a value in the same iteration; reads of a carry after its loop do not count."""
        maker = program.ops[program.producer[value]]
        uses = program.users[value]
        if maker.name == CARRY:
            uses = [use for use in uses if is_within(program, use[0], maker.loop)]
        return max((read_at[use] for use in uses), default=0)

    for number, op in enumerate(program.ops):
        if number in unified:
            borrowed[op.results[0]] = True
            borrowed[op.operands[0]] = all(reader in unified for reader, _ in program.users[op.operands[0]])
        elif in_place and op.kind.in_place and op.operands and number not in copied:
            source = op.operands[0]
            if (source in donated or borrowed[source]) and last_read(source) < times[number]:
                borrowed[op.results[0]] = True
                if op.name == CARRY:  # the yield reuses the carry's buffer, once that is no longer read
                    made = program.producer[op.operands[1]]
                    anew = made > number and program.ops[made].name != CARRY
                    borrowed[op.operands[1]] |= anew and last_read(op.results[0]) < times[made]
    for argument in program.arguments:
        if in_place and argument.aliased_result >= 0:
            result = program.results[argument.aliased_result].value
            maker = program.producer[result]
            if maker not in copied and last_read(argument.value) < times[maker] and program.ops[maker].name != ARGUMENT:
                borrowed[result] = True
    return borrowed


def shrinking(program: Program, stored: list[bool], parts: list[float]) -> list[bool]:
    """[ops] whether an op's written result has fewer bits an element than some array, at least as large, that it
    depends on.

    parts: [values] fraction of its bits that is written.
    """
    bits = [DTYPE_BITS.get(value.dtype, 32) * part for value, part in zip(program.values, parts, strict=True)]
    widest = [0.0] * len(program.values)  # [values] bits of the stored arrays each depends on
    found = [False] * len(program.ops)
    elements = [value.elements for value in program.values]
    for number, op in enumerate(program.ops):
        for value in op.results:
            most = 0.0
            for source in op.operands:
                if widest[source] > most and elements[source] >= elements[value]:
                    most = widest[source]
            found[number] = stored[value] and most > bits[value]
            widest[value] = bits[value] if stored[value] else most
    return found


def is_within(program: Program, op: int, loop: int) -> bool:
    """Whether an op is in a loop."""
    return program.loops[loop].first <= op < program.loops[loop].last
