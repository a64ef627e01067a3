"""Unsliced fusions: a fused array is materialised whole where readers take different shards of it.

XLA recomputes a fused array in each kernel that reads it, and only the part that the kernel needs: the slice that
selects a device's shard moves up through the fusion. If kernels take different shards, or one takes a shard and another
the whole array, no slice moves, and each device computes and writes the array in the sharding in which it is made,
however little of it each reader takes. Seen in programs compiled by libtpu 0.0.42.1 for v5e and v4: two products that
read a quarter of bf16[4,12,512,512] each, and the elementwise work that makes it, take 133 us on v5e where they take
different quarters, 92 where they take the same, whether it is an exponential or a sum (`python
benchmarks/unsliced.py`). Without this pass every reader computes its own shard.

Enters: a program, its stored values, and a value. Leaves: the work of a kernel that computes all of it.
"""

from __future__ import annotations

from typing import NamedTuple

from toast_cli.compiler.compilation import Compilation
from toast_cli.compiler.polynomials import expansions
from toast_cli.program.model import Program

NAME = "unsliced-fusions"


class Making(NamedTuple):
    """Work to compute an array from stored ones, in one kernel. flops: elementwise. read: bytes."""

    flops: float = 0.0
    read: float = 0.0


def making(program: Program, made: Compilation, free: tuple[bool, ...], value: int) -> Making | None:
    """Work to compute a value that is not stored; None if a product makes it, or each reader computes its own shard.

    Args:
        made: of the program. free: [values] derived from constants alone.
    """
    stored, first = made.stored, program.ops[program.producer[value]]
    if NAME not in made.profile.passes or stored[value] or free[value] or first.kind.matrix_unit:
        return None
    cost, flops, read = expansions(made.profile), 0.0, 0.0
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
