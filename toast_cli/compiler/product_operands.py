"""Product operands: arrays that only contractions read are written in the type that these multiply.

A TPU multiplies matrices of f32 in one bf16 pass unless told otherwise, so XLA:TPU converts a contraction's operands to
bf16. It fuses the conversion into the kernel that makes the array if nothing else reads it from memory: queries, keys
and values, the gradient of an activation. A sum over the array (a bias' gradient) runs in that kernel and does not
count; ops that only rearrange it propagate the conversion, also into loops: the copy of stacked weights that a scan
transposes is written in bf16 where the loop converts or multiplies its slices. An array that a scan stacks only for
contractions of a later loop (queries, keys, values and probabilities that a scan over layers keeps for the backward
pass) is stacked in bf16. Seen in training steps, decoding steps and single layers in f32 compiled by libtpu 0.0.42.1
for v4 and v5e. Without this pass an array is written in its own type.

Enters: a program and which of its values are written. Leaves: for each value the fraction of its bits that is written.
"""

from __future__ import annotations

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import DTYPE_BITS, Program
from toast_cli.program.ops import ARGUMENT, CARRY, CONVERT, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, JOIN, REDUCE
from toast_cli.program.rematerialised import expands_scalar

NAME = "product-operands"
_GIVEN = frozenset({ARGUMENT, CARRY, JOIN})


def written_parts(program: Program, stored: list[bool], profile: CompilerProfile) -> list[float]:
    """[values] fraction of a value's bits that is stored: below 1 for operands of contractions."""
    if NAME not in profile.passes:
        return [1.0] * len(program.values)
    needed = _bits_needed(program, profile.product_bits, frozenset())
    stacks = _stacks_of_operands(program, needed)
    if stacks:
        needed = _bits_needed(program, profile.product_bits, stacks)
    bits = [DTYPE_BITS.get(value.dtype, 32) for value in program.values]
    return [n / b if there and b else 1.0 for n, b, there in zip(needed, bits, stored, strict=True)]


def _bits_needed(program: Program, product_bits: int, stacks: frozenset[int]) -> list[int]:
    """[values] bits of each element that are read. stacks: values that are stacks of operands."""
    bits = [DTYPE_BITS.get(value.dtype, 32) for value in program.values]
    needed = list(bits)
    for value in range(len(program.values) - 1, -1, -1):
        maker = program.producer[value]
        if value in stacks:
            needed[value] = product_bits
        elif maker >= 0 and program.ops[maker].name not in _GIVEN and program.values[value].dtype == "f32":
            reads = [_bits_read(program, value, user, needed, product_bits, stacks) for user, _ in program.users[value]]
            needed[value] = max(reads, default=0) or bits[value]
    return needed


def _bits_read(
    program: Program, value: int, user: int, needed: list[int], product_bits: int, stacks: frozenset[int]
) -> int:
    """Bits per element of an f32 value that an op reads from memory; 0 if it does not read it there."""
    op, maker = program.ops[user], program.ops[program.producer[value]]
    if op.kind.matrix_unit:
        return 32 if op.multiplies_by_vector else product_bits
    if op.name == REDUCE and op.loop == maker.loop and maker.kind.fusible | maker.kind.matrix_unit:
        return 0
    if op.name == CONVERT or op.kind.rearranges or not stacks.isdisjoint(op.results):
        return max((needed[v] for v in op.results), default=32)
    return 32


def _stacks_of_operands(program: Program, needed: list[int]) -> frozenset[int]:
    """Carries that loops fill slice by slice, with their initial values and yields, if they are only read in slices
    that are operands of contractions. needed: see `_bits_needed`."""
    found: set[int] = set()
    for number, op in enumerate(program.ops):
        if op.name == CARRY and program.values[op.results[0]].dtype == "f32":
            (stack,), update = op.results, program.producer[op.operands[1]]
            if _is_filled(program, number, update) and _is_sliced_for_operands(program, number, needed):
                found |= {stack, *op.operands}
    return frozenset(found)


def _is_filled(program: Program, number: int, update: int) -> bool:
    """Whether a carry starts as a constant, and each iteration only writes a slice of it."""
    carry, writes = program.ops[number], program.ops[update]
    start, loop = program.ops[program.producer[carry.operands[0]]], program.loops[carry.loop]
    inside = [use for use in program.users[carry.results[0]] if loop.first <= use[0] < loop.last]
    starts_empty = start.kind.source or expands_scalar(start, program)
    handed_on = writes.name == DYNAMIC_UPDATE_SLICE and program.users[carry.operands[1]] == [(number, 1)]
    return starts_empty and handed_on and inside == [(update, 0)]


def _is_sliced_for_operands(program: Program, number: int, needed: list[int]) -> bool:
    carry = program.ops[number]
    loop = program.loops[carry.loop]
    after = [use for use in program.users[carry.results[0]] if not loop.first <= use[0] < loop.last]
    slices = [program.ops[op] for op, position in after if position == 0 and program.ops[op].name == DYNAMIC_SLICE]
    return 0 < len(slices) == len(after) and all(needed[op.results[0]] < 32 for op in slices)
