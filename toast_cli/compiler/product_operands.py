"""Product operands: what only contractions read is written in the type that they multiply.

A TPU multiplies f32 in one bf16 pass unless told otherwise, so XLA:TPU converts what a contraction reads to bf16. It
moves the conversion into the kernel that makes the array where nothing else reads it from memory: queries, keys and
values, the gradient of an activation. A sum over the array (a bias' gradient) runs in that kernel and does not count;
what only rearranges it passes the conversion on. Seen in training steps and single layers in f32 compiled by libtpu
0.0.42.1 for v4 and v5e. Without this pass an array is written in its own type.

Enters: a program and which of its values are written. Leaves: for each value the part of its bits that is written.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import DTYPE_BITS, Program
from toast_cli.program.ops import ARGUMENT, CARRY, CONVERT, JOIN, REDUCE

NAME = "product-operands"
_GIVEN = frozenset({ARGUMENT, CARRY, JOIN})


def written_parts(program: Program, stored: list[bool], profile: CompilerProfile) -> list[float]:
    """[values] the part of its bits with which a value lies in memory: below 1 for operands of contractions."""
    parts = [1.0] * len(program.values)
    if NAME not in profile.passes:
        return parts
    bits = [DTYPE_BITS.get(value.dtype, 32) for value in program.values]
    needed = list(bits)
    for value in range(len(program.values) - 1, -1, -1):
        maker = program.producer[value]
        if maker < 0 or program.ops[maker].name in _GIVEN or program.values[value].dtype != "f32":
            continue
        reads = [_bits_read(program, value, user, needed, profile.product_bits) for user, _ in program.users[value]]
        needed[value] = max(reads, default=0) or bits[value]
        if stored[value]:
            parts[value] = needed[value] / bits[value]
    return parts


def _bits_read(program: Program, value: int, user: int, needed: list[int], product_bits: int) -> int:
    """How many bits of an element of an f32 value an op takes from memory; 0 where it needs nothing there."""
    op, maker = program.ops[user], program.ops[program.producer[value]]
    if op.loop != maker.loop:  # a conversion stays on its side of a loop's boundary
        return 32
    if op.kind.matrix_unit:
        return product_bits
    if op.name == REDUCE and maker.kind.fusible | maker.kind.matrix_unit:
        return 0
    if op.name == CONVERT or op.kind.rearranges:
        return max((needed[v] for v in op.results), default=32)
    return 32
