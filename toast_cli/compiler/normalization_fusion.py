"""Normalization fusion: reductions of rows are merged into the kernel that reads the rows again.

A softmax or a norm reduces its rows and computes each element from the row's statistics and the element itself. XLA:GPU
does that in one Triton kernel, which reads the rows once, as long as a row fits into a block's registers (XLA's
"softmax rewriter"): rows of 16,384 elements do, rows of 20,000 do not, in f32 and bf16 (compiled by jaxlib 0.10.2 for
H100, and run by jax 0.11.2 on an H200). Longer rows are read by each reduction, and once more, and so are rows whose
sums several kernels read (a norm and its gradient). Without this pass they always are; for XLA:TPU see
`reduction_fusion`.

A mask makes such a kernel slow: if it selects elements, or adds an array that is broadcast over heads (a causal
attention's softmax), it processes 0.22 to 0.28 elements a picosecond, in bf16 and f32, rows of 512 to 2,048 elements,
whatever the memory bandwidth.

Enters: the kernels of a program. Leaves: the same without those of such reductions.
"""

from __future__ import annotations

from math import prod

from toast_cli.compiler.kernel import Kernel
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import REDUCE, SELECT

NAME = "normalization-fusion"
LONGEST_ROW = 16_384
MASKED = 130.0  # operations of the vector unit for each element that is masked


def join_rows(program: Program, found: list[Kernel | None], reads: dict[int, set[int]], stored: list[bool]) -> None:
    """Removes the kernels of reductions that are merged into a later kernel. found: [ops] the kernels. reads: last op
    of a kernel -> values it reads from memory. stored: [values] whether it is in memory."""
    readers: dict[int, list[int]] = {}
    for end, values in reads.items():
        for value in values:
            readers.setdefault(value, []).append(end)
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
