"""What the compiler's rules say of a program before any sharding: which values are written to memory, which ops form
kernels, when values are alive. Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toast_cli.hardware.model import Chip
from toast_cli.price.compiled_collectives import Narrowing, early_values, late_values
from toast_cli.price.convolutions import ConvolvedArgument, Images, convolved_arguments, space_to_batch
from toast_cli.price.fusion import (
    MaskedSoftmax,
    expansions,
    masked_softmaxes,
    materialised,
    visible_part,
    written_parts,
)
from toast_cli.price.gpu_libraries import ScatterStart, scatter_starts
from toast_cli.price.kernel import Kernel, KernelSide, Rows, op_arithmetic, scatter_start_bytes
from toast_cli.price.layouts import (
    RowCopy,
    Tiling,
    default_layouts,
    dims_of_rows,
    paddings,
    row_copies,
    tile_of,
    tilings,
)
from toast_cli.price.liveness import Lives, find_lives, is_stacked
from toast_cli.price.on_chip import drop_early_fetches, elapsed_seconds, loop_residency, reuse_widths
from toast_cli.price.profile import CompilerProfile
from toast_cli.program.model import Op, Program, once
from toast_cli.program.ops import (
    ARGUMENT,
    CARRY,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    PAD,
    RAGGED_ALL_TO_ALL,
    REDUCE,
    RESULT,
    SCATTER,
    SELECT,
)
from toast_cli.program.values import behind_reshapes, expands_scalar, updated_in_place


@dataclass(frozen=True)
class Compilation:
    """What is known of a program before any sharding.

    Attributes:
        stored, tiled: [values] whether each is written to memory, and its possible tilings. parts: [values] fraction of
            its bits that is written, see `written_parts`.
        early, late: [values] see `early_values`. images: [values] see `space_to_batch`. started: by value, see
            `scatter_starts`. convolved: by value, see `convolved_arguments`. row_copies: by value, see there.
        needs: see `Narrowing`.
        kernels: [ops] None for ops inside another's kernel. elapsed: [ticks] see `on_chip`.
    """

    profile: CompilerProfile
    stored: list[bool]
    parts: list[float]
    tiled: list[Tiling]
    early: list[bool]
    late: list[bool]
    images: list[Images | None]
    started: dict[int, ScatterStart]
    convolved: dict[int, ConvolvedArgument]
    row_copies: dict[int, tuple[RowCopy, ...]]
    softmaxes: dict[int, MaskedSoftmax]
    needs: Narrowing
    kernels: list[Kernel | None]
    lives: Lives
    elapsed: NDArray[np.float64]


@once
def compile_program(program: Program, free: tuple[bool, ...], chip: Chip, profile: CompilerProfile) -> Compilation:
    """The plan-independent result of compiling a program by that profile. free: [values] derived from constants
    alone."""
    tile = tile_of(profile)
    rows = dims_of_rows(program, profile)
    copied = row_copies(program, profile)
    gathered = {value: copy.rows for value, (copy, *_) in copied.items() if copy.gathered}
    tiled = tilings(program, tile, chosen="tile-dimensions" in profile.passes, rows=rows, gathered=gathered)
    stored, written = materialised(program, free, profile)
    parts = written_parts(program, stored, profile)
    tiled_rows = default_layouts(program, tile) if "tile-dimensions" in profile.passes else {}
    tiled_rows |= {value: tiled[value] for value in {**rows, **gathered} if not tiled[value].copies}
    read_parts = parts if written is stored else written_parts(program, written, profile)
    form = MemoryForm(paddings(program, tiled, tile), read_parts, tiled_rows)
    done = kernels(program, written, free, profile, form)
    lives = find_lives(program, stored, free, profile, parts)
    elapsed = elapsed_seconds(program, chip, profile, done, lives.times)
    drop_early_fetches(done, lives.times, elapsed, chip)
    return Compilation(
        profile=profile,
        stored=stored,
        parts=parts,
        tiled=tiled,
        early=early_values(program, free, profile),
        late=late_values(program, profile),
        images=space_to_batch(program, stored, profile),
        started=scatter_starts(program, free, lives, profile),
        convolved=convolved_arguments(program, stored, lives, profile),
        row_copies=copied,
        softmaxes=masked_softmaxes(program, profile),
        needs=Narrowing(program, profile),
        kernels=done,
        lives=lives,
        elapsed=elapsed,
    )


# ---------------------------------------------------------------- kernels
# Groups ops into kernels: one kernel for each value that is materialised.
#
# A kernel belongs to the op that writes its result or, with output fusion, to the contraction whose epilogue writes
# it. An operand that is not in memory is computed in the kernel, so its flops and reads count for that operand, which
# determines its local shape. A value read twice by one kernel is read once. `join_rows` merges kernels further.

NONE = -1


class MemoryForm(NamedTuple):
    """How values lie in memory.

    Attributes:
        padding: [values] padded elements over elements, see `layouts`; scales bytes, elements and flops.
        parts: [values] fraction of bits that is stored, see `written_parts`; scales bytes.
        rows: tilings by value, see `KernelSide.rows`.
    """

    padding: list[float]
    parts: list[float]
    rows: Mapping[int, Tiling]


def kernels(
    program: Program, stored: list[bool], free: tuple[bool, ...], profile: CompilerProfile, form: MemoryForm
) -> list[Kernel | None]:
    """[ops] the kernels of a program. Arguments, carries, results and collectives have none; manual regions are priced
    separately."""
    grouping = _Grouping(program, stored, free, profile, form)
    merged = "common-subexpressions" in profile.passes
    scalars_free, unfilled = "scalar-unit" in profile.passes, unfilled_stacks(program, profile)
    for number, op in enumerate(program.ops):
        if op.name in (ARGUMENT, CARRY, RESULT) or op.region is not None or number in unfilled:
            continue
        if op.kind.per_device or op.detail == RAGGED_ALL_TO_ALL:
            continue
        if merged and op.repeats and not expands_scalar(op, program):  # an array that is filled, to be updated in place
            continue
        # Such as a loop's counter.
        scalar = op.kind.elementwise and not any(program.values[v].shape for v in (*op.operands, *op.results))
        if any(stored[v] for v in op.results) and not (scalars_free and scalar):
            grouping.add_kernels(number)
    if "reduction-fusion" in profile.passes:
        merge_reductions(program, grouping.kernels, grouping.reads, grouping.products, profile)
    if "normalization-fusion" in profile.passes:
        join_rows(program, grouping.kernels, grouping.reads, stored)
    return grouping.kernels


def unfilled_stacks(program: Program, profile: CompilerProfile) -> set[int]:
    """Op numbers of broadcasts that fill arrays of which a loop then writes every slice, in the order of its counter.

    XLA:TPU allocates the buffer only (`AllocateBuffer`), for the residuals and results of a scan; what a reverse scan
    stacks, it fills (libtpu 0.0.42.1 for v5p).
    """
    if "unfilled-stacks" not in profile.passes:
        return set()
    stacks = {op.results[0] for op in program.ops if op.name == CARRY and is_stacked(program, op)}
    return {
        number
        for number, op in enumerate(program.ops)
        if expands_scalar(op, program)
        and all(
            program.ops[user].results[:1] and program.ops[user].results[0] in stacks
            for user, _ in program.users[op.results[0]]
        )
    }


@dataclass(slots=True)
class _Walk:
    """What one kernel has so far. read: (value, pad or slice that moves it or NONE) already counted. members: ops in
    it. product: the contraction it contains; others: further ones."""

    read: set[tuple[int, int]] = field(default_factory=set)
    members: set[int] = field(default_factory=set)
    product: int = -1
    others: list[int] = field(default_factory=list)


class _Grouping:
    """Collects the kernels of all ops. reads: last op of a kernel -> values it reads from memory. products: last op of
    a kernel -> the contraction in it."""

    def __init__(
        self, program: Program, stored: list[bool], free: tuple[bool, ...], profile: CompilerProfile, form: MemoryForm
    ) -> None:
        self._program, self._free = program, free
        self._padding, self._parts, self._rows = padding, parts, _ = form
        self._in_memory = list(stored)  # and contractions that are written because a kernel can contain only one
        self._moves = "moved-operands" in profile.passes
        self._joins = "multi-output-fusion" in profile.passes
        self._fetches = "memory-space-assignment" in profile.passes
        self._hosts = Hosts(program, alone="library-products" in profile.passes)
        self._cost, self._atomic = expansions(profile), "atomic-scatters" in profile.passes
        sizes = [v.bytes * wasted * part for v, wasted, part in zip(program.values, padding, parts, strict=True)]
        self._residency = loop_residency(program, stored, sizes, free, profile)
        self._widths = reuse_widths(program, stored, sizes, profile)
        self._kept = {argument.value for argument in program.arguments if not argument.donated}
        self.kernels: list[Kernel | None] = [None] * len(program.ops)
        self.reads: dict[int, set[int]] = {}
        self.products: dict[int, int] = {}

    def add_kernels(self, number: int) -> None:
        """Adds the kernel that writes the results of op `number`, and those of contractions that it cannot contain."""
        pending = [number]
        while pending:
            end, walk = pending.pop(), _Walk()
            self._add(end, walk)
            self.reads[end] = {value for value, _ in walk.read}
            if walk.product >= 0 or self._program.ops[end].kind.matrix_unit:
                self.products[end] = walk.product if walk.product >= 0 else end
            pending.extend(walk.others)
            joined = self._hosts.of(end, walk.read) if self._joins and walk.product < 0 else []
            if joined:
                self._join(end, joined)
            self._hosts.enter(joined[-1] if joined else walk.product if walk.product >= 0 else end, end, walk.read)

    def _add(self, number: int, walk: _Walk) -> None:
        """Adds the kernel of op `number`, or adds the op to the epilogue of a contraction."""
        operands, results = self._sides(number, walk)
        if walk.product < 0:
            self.kernels[number] = Kernel(operands, results)
            return
        kernel = self.kernels[walk.product]
        if kernel is None:
            product = self._program.ops[walk.product]
            ways_in = [self._side(product, position, walk) for position in range(len(product.operands))]
            size = self._program.values[product.results[0]].bytes
            kernel = self.kernels[walk.product] = Kernel(ways_in, [KernelSide()], size)
        self._finish(self._program.ops[number], kernel.results[0], operands, results)

    def _join(self, end: int, joined: list[int]) -> None:
        """Merges op `end` into the kernels `joined`: it does not read again what they hold."""
        walk, host = _Walk(), self.kernels[joined[-1]]
        walk.read.update(*(self._hosts.holds[kernel] for kernel in joined))
        operands, results = self._sides(end, walk)
        if self._program.ops[joined[-1]].kind.matrix_unit and host is not None:
            self.kernels[end] = None
            self._finish(self._program.ops[end], host.results[0], operands, results)
        else:
            self.kernels[end] = Kernel(operands, results, rides=True)

    def _finish(self, op: Op, finish: KernelSide, operands: list[KernelSide], results: list[KernelSide]) -> None:
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

    def _sides(self, number: int, walk: _Walk) -> tuple[list[KernelSide], list[KernelSide]]:
        """The sides of an op's operands and of its results."""
        op = self._program.ops[number]
        operands = [self._side(op, position, walk) for position in range(len(op.operands))]
        return operands, [self._written(op, k) for k in range(len(op.results))]

    def _side(self, op: Op, position: int, walk: _Walk) -> KernelSide:
        """Reads and fused arithmetic of one operand of an op."""
        side, program = KernelSide(), self._program
        pending = [(op.operands[position], op, position, NONE)]  # and the pad or slice through which it is read
        while pending:
            value, reader, place, moved = pending.pop()
            maker = program.producer[value]
            if self._free[value]:
                continue
            if place == 0 and moved == NONE and (reader.kind.takes_part or (reader.name == PAD and self._moves)):
                moved = reader.results[0]
            if self._in_memory[value]:
                self._read(value, reader, place, walk, side, moved)
            elif maker not in walk.members or (program.ops[maker].name == PAD and self._moves):
                walk.members.add(maker)
                maker_op = program.ops[maker]
                if not maker_op.kind.matrix_unit:
                    side.flops += self._arithmetic(maker_op) * self._padding[value]
                    pending.extend((v, maker_op, k, moved) for k, v in enumerate(maker_op.operands))
                elif walk.product < 0:
                    walk.product = maker
                else:
                    self._in_memory[value] = True
                    walk.others.append(maker)
                    self._read(value, reader, place, walk, side, moved)
        return side

    def _read(self, value: int, reader: Op, position: int, walk: _Walk, side: KernelSide, moved: int) -> None:
        takes = reader.kind.takes_part and position == 0
        key = (value, moved)
        if (position == 0 and reader.kind.updates) or key in walk.read:
            return
        walk.read.add(key)
        array, padding = self._program.values[value], self._padding[value]
        part = self._program.values[reader.results[0]] if takes else array
        seen = visible_part(reader) if self._moves and position == 0 else 1.0
        size = round(min(array.bytes, part.bytes) * seen * padding * self._parts[value])
        stays, beside = (0.0, 0.0) if takes else self._residency.of_read(value, reader)
        size = round(size * stays) if stays else size
        side.bytes += size
        if value in self._rows:
            rows = array.shape, self._rows[value]
            side.rows[rows] = side.rows.get(rows, 0) + size
        maker = self._program.ops[self._program.producer[value]].name
        if stays:
            side.staying, side.beside = side.staying + size, beside
        elif self._is_given(value):
            side.fetched += size if self._fetches and reader.loop < 0 and not takes else 0
        elif maker != CARRY:
            side.passing += size
            side.widest = max(side.widest, min(size, self._widths[value]))
        elif takes and maker == CARRY:  # of a sequence, on the chip as a whole or not at all
            side.passing += size
            side.widest = max(side.widest, array.bytes * padding)
        elements = round(min(array.elements, part.elements) * seen * padding)
        side.elements, side.largest = side.elements + elements, max(side.largest, elements)

    def _is_given(self, value: int) -> bool:
        """Whether a value is an argument, perhaps updated in place."""
        value = updated_in_place(self._program, value)
        return self._program.ops[self._program.producer[value]].name == ARGUMENT

    def _written(self, op: Op, k: int) -> KernelSide:
        program, value = self._program, op.results[k]
        array, padding = program.values[value], self._padding[value]
        if not self._in_memory[value]:
            return KernelSide()
        if op.kind.updates:
            update = program.values[op.operands[-1 if op.name == SCATTER else 1]]
            size, elements = min(array.bytes, update.bytes), min(array.elements, update.elements)
            if self._copies_first(op):  # which is copied, and the copy updated
                whole_bytes = round(array.bytes * padding)
                return KernelSide(size + whole_bytes, elements, read=whole_bytes, passing=size, widest=whole_bytes)
            if op.name == SCATTER:
                return KernelSide(
                    size + (scatter_start_bytes(program, op, self._free) if self._atomic else 0), elements
                )
            return KernelSide(
                size, elements, passing=size, widest=array.bytes * padding, rows=self._rows_in(value, size)
            )
        size, elements = round(array.bytes * padding * self._parts[value]), round(array.elements * padding)
        stays, beside = self._residency.of_yield(program, value)
        if stays:
            return KernelSide(size, elements, staying=size, beside=beside)
        rows = self._rows_in(value, size)
        if any(program.ops[user].name == RESULT for user, _ in program.users[value]):
            return KernelSide(size, elements, rows=rows)
        return KernelSide(size, elements, passing=size, widest=min(size, self._widths[value]), rows=rows)

    def _copies_first(self, op: Op) -> bool:
        """Whether an op updates an argument that is not donated, or a slice of another array."""
        maker = self._program.ops[self._program.producer[behind_reshapes(self._program, op.operands[0])]]
        return maker.name == DYNAMIC_SLICE or (maker.name == ARGUMENT and maker.results[0] in self._kept)

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
    is made (libtpu 0.0.42.1 for v5e and v4, `python -m benchmarks.singles`: two products that read a quarter of
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
        source = pending.pop()
        op = program.ops[program.producer[source]]
        if stored[source] or op.kind.matrix_unit:
            read += program.values[source].bytes
            continue
        flops += cost.get(op.name, 0.0) * program.values[source].elements or op.flops
        for operand in op.operands:
            if operand not in seen and not free[operand]:
                seen.add(operand)
                pending.append(operand)
    return Making(flops, read)


# ---------------------------------------------------------------- merged kernels
# Merged kernels: elementwise ops and reductions join the kernel that has their operands in registers.


class Hosts:
    """The arrays that each kernel writes and holds in registers. A kernel is identified by its contraction or its last
    op.

    Elementwise ops whose other operands are available when the kernel that writes one of their operands runs are merged
    into it: an optimiser's new weights and new moments are written by the kernel of the contraction that makes the
    gradient, or by one of their own. A contraction's kernel thus computes up to `FusionLimits.results` arrays from its
    result, and does not write the result itself. Seen in programs compiled by libtpu 0.0.42.1 for v4 to v6e.

    alone: contractions are merged with nothing else, see `library_finishes`.
    """

    def __init__(self, program: Program, *, alone: bool) -> None:
        self._program = program
        self._alone = alone
        self.writes: dict[int, int] = {}  # value -> kernel
        self._updates: dict[tuple[int, int], list[int]] = {}  # (loop, elements) -> kernels of single updates
        # Kernel -> what it has read or made: (value, op that takes a part of it or -1).
        self.holds: dict[int, set[tuple[int, int]]] = {}

    def of(self, end: int, reads: Iterable[tuple[int, int]]) -> list[int]:
        """Kernels that op `end`, which reads their results, can be merged into; empty if it needs its own kernel.
        reads: as in `holds`."""
        op, values, ops = self._program.ops[end], self._program.values, self._program.ops
        if op.name == DYNAMIC_UPDATE_SLICE:
            written = op.operands[1]
        elif op.kind.elementwise and len(op.results) == 1:
            written = op.results[0]
        else:
            return []
        size, read = values[written].elements, [value for value, _ in reads]
        hosts = {
            self.writes[v]
            for v in read
            if v in self.writes and values[v].elements == size and self._takes(ops[self.writes[v]], op)
        }
        if op.name == DYNAMIC_UPDATE_SLICE and not hosts:
            hosts = self._beside(op, size, read)
        last = max(hosts, default=-1)
        waits = any(self.writes.get(v) not in hosts and self._program.producer[v] > last for v in read)
        return [] if waits else sorted(hosts)

    def _beside(self, op: Op, size: int, read: list[int]) -> set[int]:
        """The kernel of another update of the same size that reads one of the same arrays."""
        values = self._program.values
        arrays = {v for v in read if values[v].shape}
        for kernel in reversed(self._updates.get((op.loop, size), ())):
            if arrays.intersection(v for v, _ in self.holds[kernel]):
                return {kernel}
        return set()

    def _takes(self, host: Op, op: Op) -> bool:
        return host.loop == op.loop and (host.kind.elementwise or (host.kind.matrix_unit and not self._alone))

    def enter(self, kernel: int, end: int, reads: Iterable[tuple[int, int]]) -> None:
        """Records that a kernel has these reads and writes the results of op `end`."""
        results = self._program.ops[end].results
        self.holds.setdefault(kernel, set()).update(reads, ((v, -1) for v in results))
        op = self._program.ops[end]
        if op.name == DYNAMIC_UPDATE_SLICE and kernel == end:
            size = self._program.values[op.operands[1]].elements
            self._updates.setdefault((op.loop, size), []).append(kernel)
        self.writes.update(dict.fromkeys(results, kernel))


FAR = 300  # ops after which one array is assumed to depend on the other


def merge_reductions(
    program: Program,
    kernels: list[Kernel | None],
    reads: dict[int, set[int]],
    products: dict[int, int],
    profile: CompilerProfile,
) -> None:
    """Marks the kernels of reductions that are merged into others, and then read nothing themselves, or removes them.

    That is the kernel that makes the operand, if the reduction's other operands are available by then (unlike a
    variance that needs the mean, or a softmax's sum that needs the largest element), or one that reads the operand
    together with the reduction's result, the largest element. Seen in programs compiled by libtpu 0.0.42.1.

    reads: last op of a kernel -> values it reads from memory. products: last op of a kernel -> the contraction in it; a
    reduction of rows that is merged into a contraction's kernel is added.
    """
    alone = "library-products" in profile.passes
    with_largest = "normalization-fusion" not in profile.passes
    readers = _readers(reads)
    for number, values in reads.items():
        op, kernel = program.ops[number], kernels[number]
        if kernel is None or op.name != REDUCE or not values:
            continue
        largest = max(values, key=lambda v: (program.values[v].bytes, v))
        maker = program.ops[program.producer[largest]]
        made_here = program.producer[largest] in reads and maker.loop == op.loop and maker.name != REDUCE
        made_here = made_here and not (alone and maker.kind.matrix_unit)
        at_once = made_here and not any(_follows(program, value, largest) for value in values - {largest})
        largest_found = with_largest and op.detail == "maximum"
        product = _product_of_rows(program, op, values, products) if "product-rows" in profile.passes else -1
        host = kernels[product] if product >= 0 else None
        if host is not None:
            # The contraction's epilogue computes it.
            products[number], kernels[number] = product, None
            host.results[0].flops += op.flops + sum(side.flops for side in kernel.operands)
        elif at_once or (largest_found and any(op.results[0] in reads[r] for r in readers[largest])):
            kernel.rides = True
            for side in kernel.operands:
                side.bytes = side.elements = side.largest = side.passing = 0
                side.staying = 0.0


def _product_of_rows(program: Program, op: Op, values: set[int], products: Mapping[int, int]) -> int:
    """The contraction that has a reduction of its rows in its kernel, or -1.

    XLA:TPU has whole rows of 512 to 2,560 elements in the kernel of a contraction of bf16 on v6e and tpu7x: attention's
    scores leave it as exponentials, with their sums, and the sums of a softmax's gradient come with the gradient of the
    probabilities. On v5e, and for rows of 197, kernels of their own read the scores (libtpu 0.0.42.1).

    values: those that the reduction reads from memory. products: last op of a kernel -> the contraction in it.
    """
    most = max(program.values[v].elements for v in values)
    product = products.get(max(program.producer[v] for v in values if program.values[v].elements == most), -1)
    if product < 0 or program.ops[product].loop != op.loop or not _reduces_rows(program, op, PRODUCT_ROWS):
        return -1
    if program.values[program.ops[product].operands[0]].dtype != "bf16":
        return -1
    # What it reads beside the rows is there before them, or is a statistic of them.
    others = [value for value in values if products.get(program.producer[value]) != product]
    scores = program.ops[product].results[0]
    return -1 if any(_follows(program, value, scores) for value in others) else product


def _readers(reads: dict[int, set[int]]) -> dict[int, list[int]]:
    """Value -> last ops of the kernels that read it."""
    readers: dict[int, list[int]] = {}
    for end, values in reads.items():
        for value in values:
            readers.setdefault(value, []).append(end)
    return readers


def _follows(program: Program, value: int, first: int) -> bool:
    """Whether an array depends on another one, `first`."""
    seen: set[int] = set()
    maker, pending = program.producer[first], [value]
    while pending:
        number = program.producer[pending.pop()]
        if number == maker or len(seen) > FAR:
            return True
        if number > maker and number not in seen:
            seen.add(number)
            pending.extend(program.ops[number].operands)
    return False


SHORT_ROWS = range(16_384 + 1)
PRODUCT_ROWS = range(512, 2560 + 1)
MASKED = 130.0  # operations of the vector unit for each element that is masked


def join_rows(program: Program, kernels: list[Kernel | None], reads: dict[int, set[int]], stored: list[bool]) -> None:
    """Removes the kernels of reductions of rows that are merged into the kernel that reads the rows again.

    A softmax or a norm reduces its rows and computes each element from the row's statistics and the element itself.
    XLA:GPU does that in one Triton kernel, which reads the rows once, as long as a row fits into a block's registers
    ("softmax rewriter"): rows of 16,384 elements do, of 20,000 do not, in f32 and bf16 (jaxlib 0.10.2 for H100). Longer
    rows are read by each reduction, and once more, and so are rows whose sums several kernels read (a norm and its
    gradient). A mask makes such a kernel slow: if it selects elements, or adds an array that is broadcast over heads,
    it processes 0.22 to 0.28 elements a picosecond on an H200, rows of 512 to 2,048 elements.

    reads: last op of a kernel -> values it reads from memory. stored: [values] whether it is in memory.
    """
    readers = _readers(reads)
    hosts: dict[int, int] = {}  # reduction -> last op of the kernel it is merged into
    for number in sorted(reads, reverse=True):
        values = reads[number]
        if kernels[number] is None or not values or not _reduces_rows(program, program.ops[number], SHORT_ROWS):
            continue
        longest = max(program.values[v].elements for v in values)
        rows = {value for value in values if program.values[value].elements == longest}
        ends = {hosts.get(reader, reader) for reader in readers.get(program.ops[number].results[0], ())}
        if len(ends) != 1:
            continue
        (host,) = ends
        last = program.ops[host]
        in_rows = last.kind.fusible or _reduces_rows(program, last, SHORT_ROWS)  # can hold rows in registers
        if rows <= reads[host] and kernels[host] is not None and in_rows:
            hosts[number], kernels[number] = host, None
    for host in set(hosts.values()):
        kernel, written = kernels[host], program.values[program.ops[host].results[0]]
        if kernel is not None and kernel.operands and _is_masked(program, program.ops[host], reads[host], stored):
            kernel.operands[0].flops += MASKED * written.elements


def _is_masked(program: Program, op: Op, read: set[int], stored: list[bool]) -> bool:
    """Whether a kernel that ends in an op selects elements of its rows, or reads rows that it broadcasts."""
    result = program.values[op.results[0]]
    for array in map(program.values.__getitem__, read):
        if len(array.shape) > 1 and array.shape[-2:] == result.shape[-2:] and array.elements < result.elements:
            return True
    pending, seen = [op], {op.results[0]}
    while pending:
        op = pending.pop()
        if op.name == SELECT and program.values[op.results[0]].shape[-1:] == result.shape[-1:]:
            return True
        for value in op.operands:
            if not stored[value] and value not in seen and program.producer[value] >= 0:
                seen.add(value)
                pending.append(program.ops[program.producer[value]])
    return False


def _reduces_rows(program: Program, op: Op, lengths: range) -> bool:
    """Whether an op reduces only the innermost dimensions of its operand; lengths: of their elements together."""
    if op.name != REDUCE:
        return False
    result, operand = program.values[op.results[0]].shape, program.values[op.operands[0]].shape
    return result == operand[: len(result)] and prod(operand[len(result) :]) in lengths
