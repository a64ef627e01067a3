"""Rules of fusion for single ops and for values with several readers: which are fused, written or recomputed.

Seen in programs compiled by libtpu 0.0.42.1 for v4 to v6e unless said otherwise.

In: a program and a value. Out: whether it is written, or what is written instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import DTYPE_BITS, Op, Program, Value
from toast_cli.program.ops import (
    ARGUMENT,
    CARRY,
    CONVERT,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    JOIN,
    PAD,
    REDUCE,
    RESHAPE,
    SCATTER,
    SLICE,
    OpKind,
)
from toast_cli.program.rematerialised import expands_scalar


def finishes_product(program: Program, latest: list[float], reader: int, product: int, value: int) -> bool:
    """Whether op `reader` can be part of the kernel of `product`, whose result `value` is or becomes.

    An elementwise op that is the only reader of a contraction's result (a bias, an activation, a conversion) runs in
    the contraction's kernel, if its other operands are available by then; the result itself is never materialised.

    latest: [values] the last unfused op that a value depends on, -1 for none; a reduction counts as placed right after
    the last op that it depends on.
    """
    op = program.ops[reader]
    if not (op.kind.elementwise or op.kind.view_or_convert) or latest[op.results[0]] > product:
        return False
    return program.values[op.results[0]].elements == program.values[value].elements


def recomputing_pays(readers: int, size: int, read: int, fresh: int) -> bool:
    """Whether `readers` kernels recompute a value of `size` bytes from `read` bytes, of which `fresh` are results of
    contractions.

    With n readers, a value of v bytes that is computed from i bytes in memory moves n i bytes if it is computed again,
    and i + v + n v if it is written (transcendental functions are no dearer than additions on units that have them in
    hardware). Results of contractions are in registers when the value is written: they count in `n i`, but not in `i`.
    """
    return readers * read < read - fresh + size + readers * size


def expansions(profile: CompilerProfile) -> Mapping[str, float]:
    """Name of a function without an instruction of its own -> operations of the vector unit for one element: those of
    the error function and its kin, from the cycles that libtpu 0.0.42.1 estimates for arrays of 4096 x 4096.
    """
    return profile.fusion.polynomials if "polynomials" in profile.passes else {}


def polynomial_is_written(op: Op, result: Value) -> bool:
    """Whether an op's result is written where several kernels read it: a 16-bit one, since recomputing it in f32 costs
    more than reading two bytes (a gelu's erfc in bf16, next to its argument); an f32 one is recomputed.
    """
    return op.kind.polynomial and DTYPE_BITS.get(result.dtype, 32) <= 16


def exponentials_are_written(readers: list[OpKind]) -> bool:
    """Whether a value of exponentials counts as written; readers: kinds of its readers, one per use.

    Where two contractions read exponentials and the like of one array (the probabilities of an attention), memory is
    counted as if they were written and time as if they were not; convolutions fuse them. Values of polynomials are
    always written before a contraction reads them. XLA:TPU computes both in the kernels of the contractions: those of
    f32 are counted so (`FusionLimits.shared_bits`). Those of 16 bits count as written, on the safe side: a softmax in
    bf16 writes its exponentials beside the scores, and deferred gradients of weights keep their operands alive, which
    nothing else here counts.
    """
    return sum(kind.contraction for kind in readers) > 1


def narrower_views(program: Program, sizes: list[int], stored: list[bool], value: int) -> list[int]:
    """The values that a contraction's result is a widening view of, the narrowest last; empty if it widens none.

    A bf16 result that is converted to f32 (and perhaps reshaped) for its readers is stored as bf16, since each reader
    can fuse the conversion.

    sizes: [values] bytes. stored: [values] whether it is written, as decided so far.
    """
    ops, producer = program.ops, program.producer
    found: list[int] = []
    views: list[int] = []
    source = value
    while (op := ops[producer[source]]).name in (CONVERT, RESHAPE):
        source = op.operands[0]
        views.append(source)
        if stored[source] or sizes[source] > sizes[value]:
            break
        if sizes[source] < sizes[value]:
            found = views.copy()
    return found


_GIVEN = frozenset({ARGUMENT, CARRY, JOIN})


def written_parts(program: Program, stored: list[bool], profile: CompilerProfile) -> list[float]:
    """[values] fraction of a value's bits that is stored: below 1 for operands of contractions.

    A TPU multiplies matrices of f32 in one bf16 pass unless told otherwise, so XLA:TPU converts a contraction's
    operands to bf16. It fuses the conversion into the kernel that makes the array if nothing else reads it from memory:
    queries, keys and values, the gradient of an activation. A sum over the array (a bias' gradient) runs in that kernel
    and does not count; ops that only rearrange it propagate the conversion, also into loops: the copy of stacked
    weights that a scan transposes is written in bf16 where the loop converts or multiplies its slices. An array that a
    scan stacks only for contractions of a later loop is stacked in bf16. Seen in training and decoding steps in f32 on
    v4 and v5e.
    """
    if "product-operands" not in profile.passes:
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


def one_hot_scatters(program: Program, free: tuple[bool, ...], profile: CompilerProfile) -> frozenset[int]:
    """Op numbers of the scatters of one element into each row of zeros, which are fused into their readers.

    XLA:TPU turns the gradient of a look-up of one element in each row (the loss of a classifier: `take_along_axis` of
    log-probabilities by label) into select(iota == index, update, 0), where the rows are batching dimensions of the
    scatter and each has one index; where indices count the rows themselves (`x[arange(n), labels]`), or a row has
    several, it scatters into memory.
    """
    if "one-hot-scatters" not in profile.passes:
        return frozenset()
    scatters = [number for number, op in enumerate(program.ops) if op.name == SCATTER and len(op.operands) == 3]
    return frozenset(number for number in scatters if _is_one_hot(program, program.ops[number], free))


def _is_one_hot(program: Program, op: Op, free: tuple[bool, ...]) -> bool:
    rows, indices, updates = op.operands
    if not free[rows]:
        return False
    shared = {factor for dim in op.rule.operands[1] for factor in dim}
    # Rows are along the factors that the operand has in common with the indices.
    batch = [n for n, dim in zip(program.values[rows].shape, op.rule.operands[0], strict=True) if shared & set(dim)]
    others = len(program.values[rows].shape) - len(batch)
    one_each = program.values[indices].elements == program.values[updates].elements == prod(batch)
    return others == 1 and one_each


def is_sliced_product(program: Program, value: int) -> bool:
    """Whether a slice in the same loop is the only reader of a contraction's result, so that only the slice is
    computed.

    XLA puts the slice before the contraction, on the operand that has the dimension (`AlgebraicSimplifier`, slice of a
    dot): a prefill that returns the logits of the last position multiplies that position alone (GPT-2 on v5e: 0.85 GiB
    without this pass, 0.48 needed). XLA:GPU hands the whole product to its library first.
    """
    users, maker = program.users[value], program.ops[program.producer[value]]
    if len(users) != 1 or not maker.kind.contraction:
        return False
    reader = program.ops[users[0][0]]
    return reader.name == SLICE and reader.loop == maker.loop


def part_made(program: Program, op: Op) -> float:
    """Fraction of a contraction's result that is computed."""
    if not op.kind.contraction or not is_sliced_product(program, op.results[0]):
        return 1.0
    read = program.ops[program.users[op.results[0]][0][0]].results[0]
    return program.values[read].elements / max(program.values[op.results[0]].elements, 1)


def pads_inside(op: Op) -> bool:
    """Whether an op pads between elements: the gradient of a strided slice, as in the levels of an associative scan.

    XLA:TPU gives each a kernel of its own, which reads an array in memory and writes one; it fuses pads at edges. Seen
    in the gradient of `associative_scan` in f32 and complex numbers on v4: 312 such pads, none of them fused.
    """
    return op.name == PAD and any(window.dilation > 1 for window in op.windows)


def padded_operands(program: Program) -> frozenset[int]:
    """Values that a contraction reads padded, directly or through a view, which are materialised.

    The kernel of a product fuses the pad, but not the computation of the padded array. So the gradient of logits is
    written if a loss leaves out their last position (`logits[:, :-1]`), and otherwise fused into the products that read
    it. Seen in classifiers' heads and token shifts in f32 on v5e.
    """
    pads = (op for op in program.ops if op.name == PAD)
    return frozenset(op.operands[0] for op in pads if _is_multiplied(program, op.results[0]))


def _is_multiplied(program: Program, value: int) -> bool:
    """Whether a contraction reads a value or a view of it."""
    kinds = [(program.ops[user].kind, program.ops[user].results) for user, _ in program.users[value]]
    return any(
        kind.matrix_unit or (kind.view_or_convert and len(results) == 1 and _is_multiplied(program, results[0]))
        for kind, results in kinds
    )
