"""Resident kernels: a kernel that neither reads nor writes device memory has less start and end overhead.

It waits for no transfer before its first element, or after its last. Loops over time consist of such kernels: their
weights, states and sequence steps are in on-chip memory. Loop counters and other scalars run on the scalar unit, which
takes no additional time. Halos of a split dimension that is sliced in a loop are extracted and inserted by kernels of
their own.

Seen in loops of products of 4 to 512 rows, in f32 and bf16, and of elementwise work on 8,192 to 8 million elements,
compiled by libtpu 0.0.42.1 for v4, v5e, v5p and v6e (`python -m benchmarks.resident`), and in small LSTMs and GRUs.
Without this pass every kernel has the overhead of one that reads device memory, each scalar is a kernel, and halo
exchanges have no kernels.

Enters: a profile. Leaves: the overhead of a kernel, and the ops without kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Op, Program

NAME = "resident-kernels"


@dataclass(frozen=True, slots=True)
class Starts:
    """Start and end overhead in seconds of a kernel that does not touch device memory.

    vector: without a contraction. product: with one. narrow: with one whose result has fewer rows than a tile, or whose
    operands are narrower than f32.
    """

    vector: float
    product: float
    narrow: float


def starts(profile: CompilerProfile) -> Starts:
    """The overheads of the profile's compiler."""
    given, others = profile.on_chip, profile.attained.kernel_seconds
    if NAME not in profile.passes or not given.vector_seconds:
        return Starts(others, others, others)
    return Starts(given.vector_seconds, given.product_seconds, given.product_seconds + given.narrow_seconds)


def is_scalar(program: Program, op: Op) -> bool:
    """Whether an op computes a scalar from scalars."""
    values = program.values
    return op.kind.elementwise and not any(values[v].shape for v in (*op.operands, *op.results))
