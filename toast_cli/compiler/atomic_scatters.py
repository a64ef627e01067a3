"""Atomic scatters: a scatter adds each element with an atomic operation to an array that lies in memory before.

XLA:GPU's kernel for scatters has one thread for each element of the updates. Adding f32 takes as long as 65 f32
operations; 16 bits are compared and swapped until nobody else has changed the word, ten times as
long where few add to one row. The array that
is added to is written first where it is made of constants, and copied where it is an argument that is not given away or
that others read, too. Gathers, too, have one thread for each element, which finds its row: as long as 50 operations,
whatever the type. Measured by `benchmarks/gpu_timer.py` on an H200: 0.4 to 0.6 elements of f32 added in a picosecond
(8,192 rows of 64 to 1,024 elements, 16,384 and 80,000 edges), 0.02 to 0.15 of bf16, 0.8 looked up. Without this pass
only the bytes of updates and rows count.

Enters: a scatter. Leaves: what it takes in f32 operations, and how many bytes are moved before it.
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
