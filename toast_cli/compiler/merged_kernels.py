"""Merged kernels: elementwise ops and reductions join the kernel that has their operands in registers.

In: the kernels of a program. Out: the same kernels, with those that are merged into others marked or removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from toast_cli.compiler.kernel import Kernel
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import DYNAMIC_UPDATE_SLICE, REDUCE, SELECT


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
        found = {
            self.writes[v]
            for v in read
            if v in self.writes and values[v].elements == size and self._takes(ops[self.writes[v]], op)
        }
        if op.name == DYNAMIC_UPDATE_SLICE and not found:
            found = self._beside(op, size, read)
        last = max(found, default=-1)
        waits = any(self.writes.get(v) not in found and self._program.producer[v] > last for v in read)
        return [] if waits else sorted(found)

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
        made = self._program.ops[end].results
        self.holds.setdefault(kernel, set()).update(reads, ((v, -1) for v in made))
        op = self._program.ops[end]
        if op.name == DYNAMIC_UPDATE_SLICE and kernel == end:
            size = self._program.values[op.operands[1]].elements
            self._updates.setdefault((op.loop, size), []).append(kernel)
        self.writes.update(dict.fromkeys(made, kernel))


FAR = 300  # ops after which one array is assumed to depend on the other


def let_reductions_ride(
    program: Program, found: list[Kernel | None], reads: dict[int, set[int]], profile: CompilerProfile
) -> None:
    """Marks the kernels of reductions that are merged into others, and then read nothing themselves.

    That is the kernel that makes the operand, if the reduction's other operands are available by then (unlike a
    variance that needs the mean, or a softmax's sum that needs the largest element), or one that reads the operand
    together with the reduction's result, the largest element. Seen in programs compiled by libtpu 0.0.42.1.

    found: [ops] the kernels. reads: last op of a kernel -> values it reads from memory.
    """
    alone = "library-products" in profile.passes
    with_largest = "normalization-fusion" not in profile.passes
    readers = _readers(reads)
    for number, values in reads.items():
        op, kernel = program.ops[number], found[number]
        if kernel is None or op.name != REDUCE or not values:
            continue
        largest = max(values, key=lambda v: (program.values[v].bytes, v))
        maker = program.ops[program.producer[largest]]
        made_here = program.producer[largest] in reads and maker.loop == op.loop and maker.name != REDUCE
        made_here = made_here and not (alone and maker.kind.matrix_unit)
        at_once = made_here and not any(_follows(program, value, largest) for value in values - {largest})
        largest_found = with_largest and op.detail == "maximum"
        if at_once or (largest_found and any(op.results[0] in reads[r] for r in readers[largest])):
            kernel.rides = True
            for side in kernel.operands:
                side.bytes = side.elements = side.largest = side.passing = 0
                side.staying = 0.0


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


LONGEST_ROW = 16_384
MASKED = 130.0  # operations of the vector unit for each element that is masked


def join_rows(program: Program, found: list[Kernel | None], reads: dict[int, set[int]], stored: list[bool]) -> None:
    """Removes the kernels of reductions of rows that are merged into the kernel that reads the rows again.

    A softmax or a norm reduces its rows and computes each element from the row's statistics and the element itself.
    XLA:GPU does that in one Triton kernel, which reads the rows once, as long as a row fits into a block's registers
    ("softmax rewriter"): rows of 16,384 elements do, of 20,000 do not, in f32 and bf16 (jaxlib 0.10.2 for H100). Longer
    rows are read by each reduction, and once more, and so are rows whose sums several kernels read (a norm and its
    gradient). A mask makes such a kernel slow: if it selects elements, or adds an array that is broadcast over heads,
    it processes 0.22 to 0.28 elements a picosecond on an H200, rows of 512 to 2,048 elements.

    found: [ops] the kernels. reads: last op of a kernel -> values it reads from memory. stored: [values] whether it is
    in memory.
    """
    readers = _readers(reads)
    hosts: dict[int, int] = {}  # reduction -> last op of the kernel it is merged into
    for number in sorted(reads, reverse=True):
        values = reads[number]
        if found[number] is None or not values or not _reduces_short_rows(program, program.ops[number]):
            continue
        longest = max(program.values[v].elements for v in values)
        rows = {value for value in values if program.values[value].elements == longest}
        ends = {hosts.get(reader, reader) for reader in readers.get(program.ops[number].results[0], ())}
        if len(ends) != 1:
            continue
        (host,) = ends
        if rows <= reads[host] and found[host] is not None and _goes_through_rows(program, program.ops[host]):
            hosts[number], found[number] = host, None
    for host in set(hosts.values()):
        kernel, made = found[host], program.values[program.ops[host].results[0]]
        if kernel is not None and kernel.operands and _is_masked(program, program.ops[host], reads[host], stored):
            kernel.operands[0].flops += MASKED * made.elements


def _is_masked(program: Program, op: Op, read: set[int], stored: list[bool]) -> bool:
    """Whether a kernel that ends in an op selects elements of its rows, or reads rows that it broadcasts."""
    made = program.values[op.results[0]]
    for array in map(program.values.__getitem__, read):
        if len(array.shape) > 1 and array.shape[-2:] == made.shape[-2:] and array.elements < made.elements:
            return True
    pending, seen = [op], {op.results[0]}
    while pending:
        op = pending.pop()
        if op.name == SELECT and program.values[op.results[0]].shape[-1:] == made.shape[-1:]:
            return True
        for value in op.operands:
            if not stored[value] and value not in seen and program.producer[value] >= 0:
                seen.add(value)
                pending.append(program.ops[program.producer[value]])
    return False


def _goes_through_rows(program: Program, op: Op) -> bool:
    """Whether a kernel that ends in an op can hold rows in registers."""
    return op.kind.fusible or _reduces_short_rows(program, op)


def _reduces_short_rows(program: Program, op: Op) -> bool:
    """Whether an op reduces only the innermost dimensions of its operand, and these are short enough."""
    if op.name != REDUCE:
        return False
    made, taken = program.values[op.results[0]].shape, program.values[op.operands[0]].shape
    return made == taken[: len(made)] and prod(taken[len(made) :]) <= LONGEST_ROW
