"""Groups ops into kernels: one kernel for each value that is materialised.

A kernel belongs to the op that writes its result or, with output fusion, to the contraction whose epilogue writes it.
An operand that is not in memory is computed in the kernel, so its flops and reads count for that operand, which
determines its local shape. A value read twice by one kernel is read once. `merged_kernels` merges kernels further.

In: a program, which values are stored and which are free. Out: per op a `Kernel`, or None for ops inside
another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from toast_cli.compiler.arithmetic import op_arithmetic, scatter_start_bytes
from toast_cli.compiler.fusion_rules import expansions
from toast_cli.compiler.kernel import Kernel, Rows, Side
from toast_cli.compiler.layouts import Tiling
from toast_cli.compiler.merged_kernels import Hosts, join_rows, let_reductions_ride
from toast_cli.compiler.on_chip import is_scalar, loop_residency, reuse_widths
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ARGUMENT, CARRY, DYNAMIC_UPDATE_SLICE, RESHAPE, RESULT, SCATTER
from toast_cli.program.rematerialised import expands_scalar


class MemoryForm(NamedTuple):
    """How values lie in memory.

    Attributes:
        padding: [values] padded elements over elements, see `layouts`; scales bytes, elements and flops.
        parts: [values] fraction of bits that is stored, see `written_parts`; scales bytes.
        rows: tilings by value, see `Side.rows`.
    """

    padding: list[float]
    parts: list[float]
    rows: Mapping[int, Tiling]


def kernels(
    program: Program,
    stored: list[bool],
    free: tuple[bool, ...],
    profile: CompilerProfile,
    form: MemoryForm | None = None,
) -> list[Kernel | None]:
    """[ops] the kernels of a program. Arguments, carries, results and collectives have none; manual regions are priced
    separately.

    form: of the values in memory; default: as they are.
    """
    ones = [1.0] * len(program.values)
    grouping = _Grouping(program, stored, free, profile, form or MemoryForm(ones, ones, {}))
    scalars_free, unfilled = "resident-kernels" in profile.passes, unfilled_stacks(program, profile)
    for number, op in enumerate(program.ops):
        if op.name in (ARGUMENT, CARRY, RESULT) or op.kind.per_device or op.region is not None or number in unfilled:
            continue
        if any(stored[v] for v in op.results) and not (scalars_free and is_scalar(program, op)):
            grouping.add_kernels(number)
    if "reduction-fusion" in profile.passes:
        let_reductions_ride(program, grouping.found, grouping.reads, profile)
    if "normalization-fusion" in profile.passes:
        join_rows(program, grouping.found, grouping.reads, stored)
    return grouping.found


def unfilled_stacks(program: Program, profile: CompilerProfile) -> set[int]:
    """Op numbers of broadcasts that fill arrays of which a loop then writes every slice, in the order of its counter.

    XLA:TPU allocates the buffer only (`AllocateBuffer`), for the residuals and results of a scan; what a reverse scan
    stacks, it fills (libtpu 0.0.42.1 for v5p). A stack that replaces a donated argument is copied into the argument's
    buffer after the loop, which takes about as long as filling it, and is counted as that.
    """
    if "unfilled-stacks" not in profile.passes:
        return set()
    donated = {argument.aliased_result for argument in program.arguments}
    returned = {result.value for number, result in enumerate(program.results) if number in donated}
    stacks = {op.results[0] for op in program.ops if op.name == CARRY and _is_stacked(program, op)} - returned
    return {
        number
        for number, op in enumerate(program.ops)
        if expands_scalar(op, program)
        and all(
            program.ops[user].results[:1] and program.ops[user].results[0] in stacks
            for user, _ in program.users[op.results[0]]
        )
    }


def _is_stacked(program: Program, carry: Op) -> bool:
    loop, update = program.loops[carry.loop], program.producer[carry.operands[1]]
    op = program.ops[update]
    if op.name != DYNAMIC_UPDATE_SLICE or op.operands[0] != carry.results[0]:
        return False
    if any(loop.first <= user < loop.last and user != update for user, _ in program.users[carry.results[0]]):
        return False
    whole, part = (program.values[value].shape for value in op.operands[:2])
    return any(
        program.ops[program.producer[start]].name == CARRY and whole[dim] == part[dim] * loop.trips
        for dim, start in enumerate(op.operands[2:])
    )


@dataclass(slots=True)
class _Walk:
    """What one kernel has so far. read: (value, op that takes a part of it or -1) already counted. members: ops in it.
    product: the contraction it contains; others: further ones."""

    read: set[tuple[int, int]] = field(default_factory=set)
    members: set[int] = field(default_factory=set)
    product: int = -1
    others: list[int] = field(default_factory=list)


class _Grouping:
    """Collects kernels. found: [ops] the kernels. reads: last op of a kernel -> values it reads from memory."""

    def __init__(
        self, program: Program, stored: list[bool], free: tuple[bool, ...], profile: CompilerProfile, form: MemoryForm
    ) -> None:
        self._program, self._free = program, free
        self._padding, self._parts, self._rows = padding, parts, _ = form
        self._taken = list(stored)  # and contractions that are written because a kernel can contain only one
        self._joins = "multi-output-fusion" in profile.passes
        self._hosts = Hosts(program, alone="library-products" in profile.passes)
        self._cost, self._atomic = expansions(profile), "atomic-scatters" in profile.passes
        sizes = [it.bytes * wasted * part for it, wasted, part in zip(program.values, padding, parts, strict=True)]
        self._residency = loop_residency(program, stored, sizes, free, profile)
        self._widths = reuse_widths(program, stored, sizes, profile)
        self._kept = {argument.value for argument in program.arguments if not argument.donated}
        self.found: list[Kernel | None] = [None] * len(program.ops)
        self.reads: dict[int, set[int]] = {}

    def add_kernels(self, number: int) -> None:
        """Adds the kernel that writes the results of op `number`, and those of contractions that it cannot contain."""
        pending = [number]
        while pending:
            end, walk = pending.pop(), _Walk()
            self._add(end, walk)
            self.reads[end] = {value for value, _ in walk.read}
            pending.extend(walk.others)
            joined = self._hosts.of(end, walk.read) if self._joins and walk.product < 0 else []
            if joined:
                self._join(end, joined)
            self._hosts.enter(joined[-1] if joined else walk.product if walk.product >= 0 else end, end, walk.read)

    def _add(self, number: int, walk: _Walk) -> None:
        """Adds the kernel of op `number`, or adds the op to the epilogue of a contraction."""
        operands, results = self._sides(number, walk)
        if walk.product < 0:
            self.found[number] = Kernel(operands, results)
            return
        known = self.found[walk.product]
        if known is None:
            product = self._program.ops[walk.product]
            ways_in = [self._side(product, position, walk) for position in range(len(product.operands))]
            size = self._program.values[product.results[0]].bytes
            known = self.found[walk.product] = Kernel(ways_in, [Side()], size)
        self._finish(self._program.ops[number], known.results[0], operands, results)

    def _join(self, end: int, joined: list[int]) -> None:
        """Merges op `end` into the kernels `joined`: it does not read again what they hold."""
        walk, host = _Walk(), self.found[joined[-1]]
        walk.read.update(*(self._hosts.holds[kernel] for kernel in joined))
        operands, results = self._sides(end, walk)
        if self._program.ops[joined[-1]].kind.matrix_unit and host is not None:
            self.found[end] = None
            self._finish(self._program.ops[end], host.results[0], operands, results)
        else:
            self.found[end] = Kernel(operands, results, rides=True)

    def _finish(self, op: Op, finish: Side, operands: list[Side], results: list[Side]) -> None:
        """Adds an op's work to the epilogue of a contraction."""
        finish.bytes += sum(s.bytes for s in results)
        finish.elements += sum(s.elements for s in results)
        finish.flops += self._arithmetic(op) * self._padding[op.results[0]] + sum(s.flops for s in operands)
        finish.read += sum(s.bytes for s in operands)
        for side in (*operands, *results):
            finish.passing += side.passing
            finish.staying += side.staying
            finish.widest, finish.beside = max(finish.widest, side.widest), max(finish.beside, side.beside)
            for array, size in side.rows.items():
                finish.rows[array] = finish.rows.get(array, 0) + size

    def _arithmetic(self, op: Op) -> float:
        return op_arithmetic(self._program, op, self._cost, self._atomic)

    def _sides(self, number: int, walk: _Walk) -> tuple[list[Side], list[Side]]:
        """The sides of an op's operands and of its results."""
        op = self._program.ops[number]
        operands = [self._side(op, position, walk) for position in range(len(op.operands))]
        return operands, [self._written(op, k) for k in range(len(op.results))]

    def _side(self, op: Op, position: int, walk: _Walk) -> Side:
        """Reads and fused arithmetic of one operand of an op."""
        side, program = Side(), self._program
        pending = [(op.operands[position], op, position)]
        while pending:
            value, reader, at = pending.pop()
            maker = program.producer[value]
            if self._free[value]:
                continue
            if self._taken[value]:
                self._read(value, reader, at, walk, side)
            elif maker not in walk.members:
                walk.members.add(maker)
                made = program.ops[maker]
                if not made.kind.matrix_unit:
                    side.flops += self._arithmetic(made) * self._padding[value]
                    pending.extend((v, made, k) for k, v in enumerate(made.operands))
                elif walk.product < 0:
                    walk.product = maker
                else:
                    self._taken[value] = True
                    walk.others.append(maker)
                    self._read(value, reader, at, walk, side)
        return side

    def _read(self, value: int, reader: Op, position: int, walk: _Walk, side: Side) -> None:
        takes = reader.kind.takes_part and position == 0
        key = (value, reader.results[0] if takes else -1)
        if (position == 0 and reader.kind.updates) or key in walk.read:
            return
        walk.read.add(key)
        it, padding = self._program.values[value], self._padding[value]
        part = self._program.values[reader.results[0]] if takes else it
        size = round(min(it.bytes, part.bytes) * padding * self._parts[value])
        stays, beside = (0.0, 0.0) if takes else self._residency.of_read(value, reader)
        size = round(size * stays) if stays else size
        side.bytes += size
        if value in self._rows:
            array = it.shape, self._rows[value]
            side.rows[array] = side.rows.get(array, 0) + size
        maker = self._program.ops[self._program.producer[value]].name
        if stays:
            side.staying, side.beside = side.staying + size, beside
        elif maker not in (ARGUMENT, CARRY):
            side.passing += size
            side.widest = max(side.widest, min(size, self._widths[value]))
        elif takes and maker == CARRY:  # of a sequence, on the chip as a whole or not at all
            side.passing += size
            side.widest = max(side.widest, it.bytes * padding)
        elements = round(min(it.elements, part.elements) * padding)
        side.elements, side.largest = side.elements + elements, max(side.largest, elements)

    def _written(self, op: Op, k: int) -> Side:
        program, value = self._program, op.results[k]
        it, padding = program.values[value], self._padding[value]
        if not self._taken[value]:
            return Side()
        if op.kind.updates:
            update = program.values[op.operands[-1 if op.name == SCATTER else 1]]
            size, elements = min(it.bytes, update.bytes), min(it.elements, update.elements)
            if self._keeps_argument(op):  # which is copied, and the copy updated
                whole = round(it.bytes * padding)
                return Side(size + whole, elements, read=whole)
            if op.name == SCATTER:
                return Side(size + (scatter_start_bytes(program, op, self._free) if self._atomic else 0), elements)
            return Side(size, elements, passing=size, widest=it.bytes * padding, rows=self._rows_in(value, size))
        size, elements = round(it.bytes * padding * self._parts[value]), round(it.elements * padding)
        stays, beside = self._residency.of_yield(program, value)
        if stays:
            return Side(size, elements, staying=size, beside=beside)
        rows = self._rows_in(value, size)
        if any(program.ops[user].name == RESULT for user, _ in program.users[value]):
            return Side(size, elements, rows=rows)
        return Side(size, elements, passing=size, widest=min(size, self._widths[value]), rows=rows)

    def _keeps_argument(self, op: Op) -> bool:
        """Whether an op updates an argument that is not donated."""
        maker = self._program.ops[self._program.producer[op.operands[0]]]
        while maker.name == RESHAPE:
            maker = self._program.ops[self._program.producer[maker.operands[0]]]
        return maker.name == ARGUMENT and maker.results[0] in self._kept

    def _rows_in(self, value: int, size: int) -> dict[Rows, int]:
        return {(self._program.values[value].shape, self._rows[value]): size} if value in self._rows else {}


class Making(NamedTuple):
    """Work to compute an array from stored ones, in one kernel. flops: elementwise. read: bytes."""

    flops: float = 0.0
    read: float = 0.0


def making_whole(
    program: Program, stored: list[bool], free: tuple[bool, ...], profile: CompilerProfile, value: int
) -> Making | None:
    """Work to compute a value that is not stored; None if a product makes it, or each reader computes its own shard.

    XLA recomputes a fused array in each kernel that reads it, and only the part that the kernel needs: the slice that
    selects a device's shard moves up through the fusion. If kernels take different shards, or one takes a shard and
    another the whole array, no slice moves, and each device computes and writes the array in the sharding in which it
    is made (libtpu 0.0.42.1 for v5e and v4, `python benchmarks/unsliced.py`: two products that read a quarter of
    bf16[4,12,512,512] each take 133 us where they take different quarters, 92 where they take the same).

    Args:
        stored: [values] whether each is written. free: [values] derived from constants alone.
    """
    first = program.ops[program.producer[value]]
    if "unsliced-fusions" not in profile.passes or stored[value] or free[value] or first.kind.matrix_unit:
        return None
    cost, flops, read = expansions(profile), 0.0, 0.0
    pending, seen = [value], {value}
    while pending:
        at = pending.pop()
        op = program.ops[program.producer[at]]
        if stored[at] or op.kind.matrix_unit:
            read += program.values[at].bytes
            continue
        flops += cost.get(op.name, 0.0) * program.values[at].elements or op.flops
        for operand in op.operands:
            if operand not in seen and not free[operand]:
                seen.add(operand)
                pending.append(operand)
    return Making(flops, read)
