"""Multi-output fusion: elementwise ops are merged into the kernel that writes their operand, which then writes several
results.

Ops whose other operands are available when that kernel runs are merged into it: an optimiser's new weights and new
moments are written by the kernel of the contraction that makes the gradient, or by one of their own. A contraction's
kernel thus computes up to `FusionLimits.results` arrays from its result, and does not write the result itself. Seen in
programs compiled by libtpu 0.0.42.1 for v4 to v6e. Without this pass each kernel writes one result.

Enters: a program, kernel by kernel. Leaves: the kernels that the next op can be merged into.
"""

from __future__ import annotations

from collections.abc import Iterable

from toast_cli.program.model import Op, Program
from toast_cli.program.ops import DYNAMIC_UPDATE_SLICE

NAME = "multi-output-fusion"


class Hosts:
    """The arrays that each kernel writes and holds in registers. A kernel is identified by its contraction or its last
    op. alone: contractions are merged with nothing else, see `library_products`."""

    def __init__(self, program: Program, *, alone: bool) -> None:
        self._program = program
        self._alone = alone
        self.writes: dict[int, int] = {}  # value -> kernel
        self._updates: dict[tuple[int, int], list[int]] = {}  # (loop, elements) -> kernels of single updates
        self.holds: dict[
            int, set[tuple[int, int]]
        ] = {}  # kernel -> what it has read or made, (value, op that takes a part of it or -1)

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
