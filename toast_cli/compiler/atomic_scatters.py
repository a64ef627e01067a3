"""Atomic scatters: a scatter adds each element with an atomic operation to an array in memory.

XLA:GPU's kernel for scatters has one thread for each element of the updates. Adding f32 takes as long as 65 f32
operations; 16-bit types use compare-and-swap loops, ten times as long with few additions per row. The array that is
added to is first written if it is made of constants, and copied if it is a non-donated argument or has other readers.
Gathers also have one thread per element, which takes 50 operations to find its row, whatever the type. Measured by
`benchmarks/gpu_timer.py` on an H200: 0.4 to 0.6 elements of f32 added in a picosecond (8,192 rows of 64 to 1,024
elements, 16,384 and 80,000 edges), 0.02 to 0.15 of bf16, 0.8 looked up. Without this pass only the bytes of updates and
rows count.

Enters: a scatter. Leaves: its cost in f32 operations, and the bytes moved before it.
"""

from __future__ import annotations

from toast_cli.program.model import DTYPE_BITS, Op, Program
from toast_cli.program.ops import ARGUMENT, SCATTER

NAME = "atomic-scatters"
FOUND, ADDED, SWAPPED = 50.0, 65.0, 650.0


def operations(program: Program, op: Op) -> float:
    """Vector-unit operations of a gather or scatter."""
    if op.name != SCATTER:
        return FOUND * program.values[op.results[0]].elements
    updates = program.values[op.operands[-1]]
    return (ADDED if DTYPE_BITS.get(updates.dtype, 32) >= 32 else SWAPPED) * updates.elements


def begun(program: Program, op: Op, free: tuple[bool, ...]) -> int:
    """Bytes moved to initialise the array that a scatter adds to, and to read the rows it adds to."""
    source = op.operands[0]
    size, rows = program.values[source].bytes, min(program.values[source].bytes, program.values[op.operands[-1]].bytes)
    if free[source]:
        return size + rows
    given = program.ops[program.producer[source]].name == ARGUMENT
    kept = given and not any(it.value == source and it.aliased_result >= 0 for it in program.arguments)
    return rows + (2 * size if kept or len(program.users[source]) > 1 else 0)
