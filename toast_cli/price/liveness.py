"""Liveness of each stored value, along the schedule of the program's ops.

Time runs in ticks, two per op: op n reads and writes at 2n, or sooner where the scheduler moves it; an operand that an
in-place op (elementwise, update of a slice) reads for the last time is freed at 2n - 1, so that its result can reuse
the buffer; for an update, only the updated operand. A value that is fused into its readers is read when they are. A
value read inside a loop but made outside stays until the loop ends; a carried value is live from the loop's start to
its last read in the body, then the body's yield reuses its buffer, and after the loop it is live until its last read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from toast_cli.price.profile import CompilerProfile
from toast_cli.program.model import Loop, Op, Program, factors_of
from toast_cli.program.ops import ARGUMENT, CARRY, CONVOLUTION, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, RESULT
from toast_cli.program.values import TO_HOST, behind_reshapes, expands_scalar, is_transfer

Interval = tuple[int, int]  # first and last tick, both included


@dataclass(frozen=True)
class Lives:
    """When each value is alive, in ticks.

    Attributes:
        intervals: [values] when each stored value is alive; empty for values that are not stored.
        times: [ops] when each runs. deaths: [ops] when each last needs its operands.
        read_at: (op, position) -> when that use last needs its operand. It is later than `deaths` where an op in a loop
            reads a value from outside.
        end: last tick of the program.
        into_arguments: `toast.result` ops whose array reuses a donated argument's buffer, in any sharding.
    """

    intervals: list[list[Interval]]
    times: list[int]
    deaths: list[int]
    read_at: dict[tuple[int, int], int]
    end: int
    into_arguments: frozenset[int]


def find_lives(
    program: Program, stored: list[bool], free: tuple[bool, ...], profile: CompilerProfile, parts: list[float]
) -> Lives:
    """The lives of all values. parts: [values] fraction of its bits that is written, see `written_parts`."""
    end = 2 * len(program.ops)
    times = op_ticks(program, stored, free, profile)
    takes_over = [False] * len(program.ops)  # [ops] whether an op's result can reuse an operand's buffer
    if "in-place-updates" in profile.passes:
        shrinks = zip(program.ops, shrinking(program, stored, parts), strict=True)
        takes_over = [(op.kind.fusible or bool(op.in_place)) and not less for op, less in shrinks]
    deaths = _deaths(program, stored, times, takes_over)
    read_at = _reads(program, times, deaths)
    borrowed = borrowed_buffers(program, read_at, times, profile)
    intervals: list[list[Interval]] = [[] for _ in program.values]
    producer = program.producer
    for value, uses in enumerate(program.users):
        if stored[value] and not borrowed[value]:
            intervals[value] = _intervals(program, producer[value], uses, read_at, times, end)
    _widen_transfers(program, intervals, end)
    returned, first = {result.value for result in program.results}, len(program.ops) - len(program.results)
    donated = [a for a in program.arguments if a.aliased_result >= 0 and a.value not in returned]
    return Lives(intervals, times, deaths, read_at, end, frozenset(first + a.aliased_result for a in donated))


def _widen_transfers(program: Program, intervals: list[list[Interval]], end: int) -> None:
    """Transfers outside loops overlap with other work: XLA:TPU starts those to the device before the loop in front of
    them, and finishes those to the host at the end of the program."""
    for number, op in enumerate(program.ops):
        if op.loop >= 0 or not is_transfer(op):
            continue
        value = op.operands[0] if op.detail == TO_HOST else op.results[0]
        first = max((loop.first for loop in program.loops if loop.parent < 0 and loop.last < number), default=number)
        if intervals[value]:
            begin, last = intervals[value][0][0], intervals[value][-1][1]
            wide = (begin, end) if op.detail == TO_HOST else (min(begin, 2 * first), last)
            intervals[value] = [wide]


def _reads(program: Program, times: list[int], death: list[int]) -> dict[tuple[int, int], int]:
    """(op, position) -> last tick at which that use needs its operand; for a loop's yield, the end of the
    iteration."""
    ops, loops, producer = program.ops, program.loops, program.producer
    read_at: dict[tuple[int, int], int] = {}
    for value, uses in enumerate(program.users):
        maker = producer[value]
        for op, position in uses:
            loop, tick = ops[op].loop, death[op]
            if ops[op].name == CARRY and position == 0:
                loop = loops[loop].parent
            elif ops[op].name == CARRY:
                tick = 2 * loops[loop].last - 1
            elif ops[op].in_place and all(position != operand for _, operand in ops[op].in_place):
                tick = max(tick, times[op])
            home = ops[maker].loop
            if ops[maker].name == CARRY and op not in loops[home]:  # read after the loop
                home = loops[home].parent
            # A read within loops inside the value's own loop lasts to the end of the outermost of them.
            while loop not in (home, -1):
                tick = max(tick, 2 * program.loops[loop].last - 1)
                loop = program.loops[loop].parent
            read_at[op, position] = tick
    return read_at


def _deaths(program: Program, stored: list[bool], times: list[int], takes_over: list[bool]) -> list[int]:
    """[ops] last tick at which an op needs its operands: when it runs, or when the op it is fused into runs."""
    death = [0] * len(program.ops)
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        tick = times[number]
        if op.name == RESULT:
            tick = 2 * len(program.ops)
        elif takes_over[number]:
            tick -= 1
        if op.results and not stored[op.results[0]]:  # fused into its readers
            readers = [death[u] for u, _ in program.users[op.results[0]]]
            tick = max(readers if readers and op.kind.fusible else [tick, *readers])
        death[number] = tick
    return death


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
    inside = [read_at[u] for u in uses if u[0] in program.loops[loop]]
    outside = [read_at[u] for u in uses if u[0] not in program.loops[loop]]
    body = (born, max(inside, default=born))
    # The body's yield counts at the loop's last tick; right after it, the carry has taken it over.
    return [body, (2 * program.loops[loop].last, max(outside))] if outside else [body]


def borrowed_buffers(
    program: Program, read_at: dict[tuple[int, int], int], times: list[int], profile: CompilerProfile
) -> list[bool]:
    """[values] whether a value shares a buffer that is counted already.

    Updates of slices, scatters, loop carries and elementwise ops write into the buffer of their first operand; the
    result for a donated argument reuses the argument's buffer. A chain of in-place updates (a cache carried through a
    loop) starts at the argument, as long as nothing reads the older contents afterwards. This is XLA's buffer sharing
    and its copy elision. Only arrays of one size share a buffer: an array written in fewer bits than its operands (the
    gradient of f32 logits, for products that multiply bf16) has one of its own.

    read_at: (op, position) -> last tick at which that use needs its operand. times: [ops] tick at which each
    runs.
    """
    donated = {a.value for a in program.arguments if a.aliased_result >= 0}
    borrowed = [False] * len(program.values)
    copied, unified = copied_carries(program, profile), unified_carries(program, profile)
    in_place = "in-place-updates" in profile.passes

    def last_read(value: int) -> int:
        """The last read of a value in the same iteration; reads of a carry after its loop do not count."""
        maker = program.ops[program.producer[value]]
        uses = program.users[value]
        if maker.name == CARRY:
            uses = [use for use in uses if use[0] in program.loops[maker.loop]]
        return max((read_at[use] for use in uses), default=0)

    for number, op in enumerate(program.ops):
        if number in unified:
            borrowed[op.results[0]] = True
            borrowed[op.operands[0]] = all(reader in unified for reader, _ in program.users[op.operands[0]])
        elif in_place and number not in copied:
            for result, operand in op.in_place:
                source = op.operands[operand]
                if not op.kind.updates:  # a table that was reshaped is copied into tiles of its own
                    source = behind_reshapes(program, source)
                if not (source in donated or borrowed[source]) or last_read(source) >= times[number]:
                    continue
                borrowed[op.results[result]] = True
                if op.name == CARRY:  # the yield reuses the carry's buffer, once that is no longer read
                    yielding = program.producer[op.operands[1]]
                    anew = yielding > number and program.ops[yielding].name != CARRY
                    borrowed[op.operands[1]] |= anew and last_read(op.results[0]) < times[yielding]
    for argument in program.arguments:
        if in_place and argument.aliased_result >= 0:
            result = program.results[argument.aliased_result].value
            maker = program.producer[result]
            if maker not in copied and last_read(argument.value) < times[maker] and program.ops[maker].name != ARGUMENT:
                borrowed[result] = True
    return borrowed


def waiting_results(program: Program, lives: Lives, profile: CompilerProfile) -> dict[int, int]:
    """Result -> last tick at which its buffer is there and not in use.

    XLA allocates a result that replaces no argument for the whole program, apart from the temporaries. Until the result
    is made, its buffer serves one temporary after another that fits: see `typical_bytes`. An array in whose place the
    result is written, such as a gradient, is there already.
    """
    if "held-results" not in profile.passes:
        return {}
    first = len(program.ops) - len(program.results)
    returned = {program.ops[n].operands[0] for n in range(first, len(program.ops)) if n not in lives.into_arguments}
    ends = {value: _first_in_place(program, lives, value) - 1 for value in returned if lives.intervals[value]}
    return {value: end for value, end in ends.items() if end >= 0}


def _first_in_place(program: Program, lives: Lives, result: int) -> int:
    """When the buffer of a result is first in use: from when the result is made, or the array that it replaces."""
    born, size = lives.intervals[result][0][0], program.values[result].bytes
    first, seen, waiting = born, {result}, [result]
    while waiting:
        for value in program.ops[program.producer[waiting.pop()]].operands:
            maker = program.ops[program.producer[value]]
            if value in seen or maker.name == ARGUMENT:
                continue
            seen.add(value)
            if not lives.intervals[value] and maker.kind.fusible:
                waiting.append(value)
            elif lives.intervals[value] and lives.intervals[value][-1][1] == born - 1:
                first = min(first, lives.intervals[value][0][0] if program.values[value].bytes == size else born)
    return first


def typical_bytes(program: Program, lives: Lives) -> float:
    """Bytes of a whole temporary in the mean, weighted by their bytes. The buffer of a larger result has a temporary in
    it at nearly all times; smaller ones are too small for most."""
    arrays = zip(program.values, lives.intervals, program.producer, strict=True)
    sizes = [value.bytes for value, alive, maker in arrays if alive and program.ops[maker].name != ARGUMENT]
    return sum(size * size for size in sizes) / max(sum(sizes), 1)


def shrinking(program: Program, stored: list[bool], parts: list[float]) -> list[bool]:
    """[ops] whether an op's written result has fewer bits an element than some array, at least as large, that it
    depends on.

    parts: [values] fraction of its bits that is written.
    """
    bits = [value.bits * part for value, part in zip(program.values, parts, strict=True)]
    widest = [0.0] * len(program.values)  # [values] bits of the stored arrays each depends on
    shrinks = [False] * len(program.ops)
    elements = [value.elements for value in program.values]
    for number, op in enumerate(program.ops):
        for value in op.results:
            most = 0.0
            for source in op.operands:
                if widest[source] > most and elements[source] >= elements[value]:
                    most = widest[source]
            shrinks[number] = stored[value] and most > bits[value]
            widest[value] = bits[value] if stored[value] else most
    return shrinks


def unified_carries(program: Program, profile: CompilerProfile) -> frozenset[int]:
    """Op numbers of `toast.carry` ops that share the buffer of the outer loop's carry.

    A decoding loop carries a cache of all layers; its body scans over the layers, reads one slice of the cache in each
    iteration and stacks the new slices to the next cache. XLA writes them in place
    (`ScanLoopAccumulatorInputUnification`) if the outer loop yields the stack as the next value of the scanned array,
    and only the scan reads that.
    """
    if "scan-unification" not in profile.passes:
        return frozenset()
    return frozenset(
        number for number, op in enumerate(program.ops) if op.name == CARRY and _is_unified(program, number)
    )


def _is_unified(program: Program, number: int) -> bool:
    op = program.ops[number]
    (stack,), loop = op.results, program.loops[op.loop]
    after = [use for use in program.users[stack] if use[0] not in loop]
    if loop.parent < 0 or len(after) != 1 or not (starts_empty(program, op) and slice_writer(program, op)):
        return False
    (around, position) = after[0]
    if program.ops[around].name != CARRY or position != 1 or program.ops[around].loop != loop.parent:
        return False
    (scanned,), outer = program.ops[around].results, program.loops[loop.parent]
    reads = [use for use in program.users[scanned] if use[0] in outer]
    return program.values[scanned] == program.values[stack] and all(
        reader in loop and program.ops[reader].name == DYNAMIC_SLICE and place == 0 for reader, place in reads
    )


def _wanted_outermost(program: Program, array: int, loop: Loop) -> frozenset[int] | None:
    """The batch dimensions, counted from the last, of a reader of an array in a loop, nested loops included, that
    requires another dimension order; None if no reader does."""
    reached, waiting = {array}, [(array, frozenset[str]())]
    while waiting:
        value, passed = waiting.pop()
        for number, position in program.users[value]:
            op = program.ops[number]
            if number not in loop:
                continue
            if op.kind.matrix_unit and position < 2:
                batch, is_wanted = _batch_dims(program, op, position)
                if is_wanted or (DYNAMIC_UPDATE_SLICE in passed and DYNAMIC_SLICE in passed):
                    return _same_dims(program, batch, value, array)
                continue
            followed = op.kind.view_or_convert or op.name in (DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, CARRY)
            if position == 0 and followed and op.results[0] not in reached:
                reached.add(op.results[0])
                # An update after the slice belongs to the slice and does not count.
                counts = op.name != DYNAMIC_UPDATE_SLICE or DYNAMIC_SLICE not in passed
                waiting.append((op.results[0], passed | {op.name} if counts else passed))
    return None


def _same_dims(program: Program, dims: Iterable[int], value: int, other: int) -> frozenset[int]:
    """Those of the dimensions, counted from the last, that no reshape between the two arrays moves."""
    shape, target = program.values[value].shape, program.values[other].shape
    return frozenset(dim for dim in dims if shape[dim:] == target[dim:])


def _batch_dims(program: Program, op: Op, position: int) -> tuple[list[int], bool]:
    """An operand's batch dimensions (those in both operands and in the result), counted from the last, and whether they
    are not its outermost, or the other operand has only a vector for each."""
    operands = op.rule.operands
    if op.name == CONVOLUTION or len(operands) < 2:
        return [], False
    mine, other, result = factors_of(operands[position], operands[1 - position], op.rule.results[0])
    numbering = [bool(dim) and all(f in other and f in result for f in dim) for dim in operands[position]]
    shape = program.values[op.operands[1 - position]].shape
    is_vector = all(size == 1 or set(dim) <= mine for dim, size in zip(operands[1 - position], shape, strict=True))
    batch = [dim for dim, numbers in enumerate(numbering, -len(numbering)) if numbers]
    return batch, numbering != sorted(numbering, reverse=True) or (bool(batch) and is_vector)


def copied_carries(program: Program, profile: CompilerProfile) -> set[int]:
    """Op numbers of the carries that are copied from arguments and to results.

    XLA lays an array out for its readers, but arguments and results of a program have the dimension order of their
    shapes; so a carry that starts from an argument is copied before and after the loop if its readers require another
    order. Seen in compiled decoding loops (a cache [batch, position, head, width] or [batch, head, position, width]): a
    batched product requires its batch dimensions outermost; a batched matrix-vector product is elementwise work, and
    requires them in the tiles; where a dynamic slice is read directly from an array that was updated before, the array
    is laid out for the update, whose one position would fill a small part of each tile.
    """
    if "loop-copies" not in profile.passes:
        return set()

    def wanted(op: Op) -> bool:
        return _wanted_outermost(program, op.results[0], program.loops[op.loop]) is not None

    return {number for number, op in enumerate(program.ops) if op.name == CARRY and wanted(op)}


@dataclass(frozen=True)
class Relaid:
    """Copies of a carry around its loop.

    Attributes:
        copied, turned: bytes that are copied, and bytes of which copies rearrange the tiles; of the whole machine, in
            one run.
        outermost: dimensions, counted from the last, that the loop's readers of a slice require outermost. If the
            argument's tiles have one of them (heads, where a device has several), each slice is copied, too; and in
            each trip the whole stack is, if a dimension of `updated` (positions) is split. Seen on v5e and v6e.
    """

    copied: float
    turned: float
    outermost: frozenset[int] = frozenset()
    updated: frozenset[int] = frozenset()


def relaid_bytes(program: Program, profile: CompilerProfile) -> dict[int, Relaid]:
    """Carry -> what is copied of it.

    Those are a carry that is copied for its readers (see `copied_carries`), whose slices that the loop reads after an
    update are laid out anew in each trip too; and a stack that replaces a donated argument, which is copied into the
    argument's buffer after the loop, and has another dimension order if the loop's readers of a slice require it.
    """
    arguments, returned = {a.value for a in program.arguments}, {result.value for result in program.results}
    relaid: dict[int, Relaid] = {}
    for number in copied_carries(program, profile):
        op = program.ops[number]
        (carried,) = op.results
        copied = ((op.operands[0] in arguments) + (carried in returned)) * program.values[carried].bytes
        updates = [program.ops[use] for use, place in program.users[carried] if place == 0]
        updated = [value for update in updates if update.name == DYNAMIC_UPDATE_SLICE for value in update.results]
        readers = [program.ops[use] for value in updated for use, place in program.users[value] if place == 0]
        slices = [
            reader.trips * program.values[reader.results[0]].bytes for reader in readers if reader.name == DYNAMIC_SLICE
        ]
        relaid[carried] = Relaid(copied, copied + sum(slices))
    for number in returned_stacks(program, profile):
        op = program.ops[number]
        piece = program.ops[program.producer[op.operands[1]]].operands[1]
        while (maker := program.ops[program.producer[piece]]).kind.view_or_convert:
            piece = maker.operands[0]
        copied = program.values[op.results[0]].bytes
        outermost = _wanted_outermost(program, piece, program.loops[op.loop])
        positions: list[int] = []
        if maker.name == DYNAMIC_UPDATE_SLICE:
            stack_shape, slice_shape = (program.values[value].shape for value in maker.operands[:2])
            positions = [dim for dim in range(-len(stack_shape), 0) if slice_shape[dim] < stack_shape[dim]]
        kept = [_same_dims(program, dims, piece, op.results[0]) for dims in (outermost or (), positions)]
        relaid[op.results[0]] = Relaid(copied, 0.0 if outermost is None else copied, *kept)
    return relaid


def returned_stacks(program: Program, profile: CompilerProfile) -> list[int]:
    """Op numbers of the carries that are stacks of slices and replace donated arguments."""
    if "unfilled-stacks" not in profile.passes:
        return []
    replacing = {program.results[a.aliased_result].value for a in program.arguments if a.aliased_result >= 0}
    return [
        n
        for n, op in enumerate(program.ops)
        if op.name == CARRY and op.results[0] in replacing and is_stacked(program, op)
    ]


def is_stacked(program: Program, carry: Op) -> bool:
    """Whether a loop writes every slice of a carry, in the order of its counter, and reads none."""
    update = slice_writer(program, carry)
    if update is None:
        return False
    stack_shape, slice_shape = (program.values[value].shape for value in update.operands[:2])
    return any(
        program.ops[program.producer[start]].name == CARRY
        and stack_shape[dim] == slice_shape[dim] * program.loops[carry.loop].trips
        for dim, start in enumerate(update.operands[2:])
    )


def slice_writer(program: Program, carry: Op) -> Op | None:
    """The op that writes a slice of a carry in each iteration, if it is the only one in the loop that reads it."""
    number = program.producer[carry.operands[1]]
    inside = [use for use in program.users[carry.results[0]] if use[0] in program.loops[carry.loop]]
    writes = program.ops[number].name == DYNAMIC_UPDATE_SLICE and inside == [(number, 0)]
    return program.ops[number] if writes else None


def starts_empty(program: Program, carry: Op) -> bool:
    """Whether the initial value of a carry is a constant."""
    start = program.ops[program.producer[carry.operands[0]]]
    return start.kind.source or expands_scalar(start, program)


# ---------------------------------------------------------------- the schedule
# Schedule: ops run in program order, except those that XLA's scheduler moves because that frees memory or takes none.
#
# Results of the program (such as a weight's update) are computed as soon as their operands are available, so that
# gradients do not wait for one another; so is the epilogue of a product, which is part of its kernel. A result that
# reuses a donated argument's buffer waits until nothing else reads the argument.
#
# The gradient of an output projection beside the backward loop over the layers is the last to read the gradient of the
# logits. If it is before the loop, it waits for the loop if that frees more memory: libtpu 0.0.42.1 does so in some
# scanned decoders, and in others (8B on v5p, one array of logits) holds 14 % less.

_NOBODY = (-1, -1)


def op_ticks(program: Program, stored: list[bool], free: tuple[bool, ...], profile: CompilerProfile) -> list[int]:
    """[ops] the tick at which each runs."""
    ops, loops = program.ops, program.loops
    times = [2 * number for number in range(len(ops))]
    returned, donated = {r.value for r in program.results}, [a for a in program.arguments if a.aliased_result >= 0]
    aliased = {program.results[a.aliased_result].value: a.value for a in donated}  # -> whose buffer it reuses
    waits = _last_readers(program, stored)
    ready = [0] * len(program.values)  # [values] when each can be read or recomputed
    finishing = [False] * len(program.values)  # results of contractions that are not written yet
    after = after_loops(program, stored, profile)
    early = "early-results" in profile.passes
    waiting: list[tuple[int, int, int]] = []  # (op, earliest time, op it waits for)
    for number, op in enumerate(ops):
        if op.name == ARGUMENT:
            continue
        available = [max(ready[v], _loop_over(program, v, number)) for v in op.operands if not free[v]]
        earliest = max(available, default=0)
        if after[number]:
            times[number] = max(times[number], after[number])
        if op.loop >= 0:
            earliest = max(earliest, 2 * loops[op.loop].first)
        moves = op.kind.elementwise or op.kind.view_or_convert
        if len(op.results) != 1 or not early:
            moves = False
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
    while loop >= 0 and reader not in program.loops[loop]:
        loop, over = program.loops[loop].parent, 2 * program.loops[loop].last
    return over


def _other_reader(argument: int, number: int, waits: list[tuple[int, int]]) -> int:
    """Last op of the last other kernel that reads `argument`; -1 for none."""
    return -1 if argument < 0 else next((end for end in waits[argument] if end not in (number, -1)), -1)


def _argument_free(reader: int, times: list[int]) -> int:
    """When an argument's buffer may be overwritten; reader: last op of the last kernel that reads it."""
    return times[reader] + 1 if reader >= 0 else 0


def _last_readers(program: Program, stored: list[bool]) -> list[tuple[int, int]]:
    """[values] last ops of the last two kernels that read each value, the later one first; -1 for none."""
    last_two = [_NOBODY] * len(program.values)
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        ends = last_two[op.results[0]] if len(op.results) == 1 and not stored[op.results[0]] else _NOBODY
        if ends is _NOBODY:
            ends = (number, -1)
        if op.name == RESULT:
            continue
        for value in op.operands:
            later = last_two[value]
            if later is _NOBODY:
                last_two[value] = ends
            elif later != ends:
                first, second, *_ = (*sorted({*later, *ends} - {-1}, reverse=True), -1)
                last_two[value] = (first, second)
    return last_two


def after_loops(program: Program, stored: list[bool], profile: CompilerProfile) -> list[int]:
    """[ops] tick at which the last loop that a contraction waits for ends; 0 if there is none."""
    ticks = [0] * len(program.ops)
    if not program.loops or "loops-first" not in profile.passes:
        return ticks
    first, freed = _first_readers(program, stored), _freed_by(program, stored)
    for number, op in enumerate(program.ops):
        if op.kind.matrix_unit and len(op.results) == 1:
            kept = {v for v in op.operands if stored[v]}
            waits = [
                loop.last
                for loop in program.loops
                if loop.parent == op.loop and number < loop.first and loop.last <= first[op.results[0]]
                if freed[loop.last]
                >= sum(program.values[v].bytes for v in kept if program.users[v][-1][0] < loop.first)
            ]
            ticks[number] = 2 * max(waits, default=0)
    return ticks


def _freed_by(program: Program, stored: list[bool]) -> dict[int, int]:
    """End of a loop -> bytes of values that are made before it and last read in it, its carries excepted."""
    freed = dict.fromkeys((loop.last for loop in program.loops), 0)
    arguments = {argument.value for argument in program.arguments}
    for value, users in enumerate(program.users):
        readers = [number for number, _ in users]
        if not readers or not stored[value] or value in arguments or program.ops[readers[0]].name == CARRY:
            continue
        loop = program.ops[max(readers)].loop
        while loop >= 0 and program.producer[value] < program.loops[loop].first:
            freed[program.loops[loop].last] += program.values[value].bytes
            loop = program.loops[loop].parent
    return freed


def _first_readers(program: Program, stored: list[bool]) -> list[int]:
    """[values] last op of the first kernel that reads each value."""
    first = [len(program.ops)] * len(program.values)
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        end = number
        if len(op.results) == 1 and (op.kind.view_or_convert or not stored[op.results[0]]):
            end = first[op.results[0]]
        for value in op.operands:
            first[value] = min(first[value], end)
    return first


def copy_made_at(program: Program, loop: int, home: int, first: int) -> int:
    """Half step at which a copy of an array of loop `home` (-1: outside of all loops) is made in `loop`, whose first
    read is at `first`: a loop gathers all loop-invariant arrays at the start of an iteration (libtpu 0.0.42.1 for v5e
    alone).
    """
    return min(first, 2 * program.loops[loop].first) if loop >= 0 and loop != home else first
