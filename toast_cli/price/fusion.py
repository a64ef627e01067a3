"""Fusion: decides which values are materialised, before any plan is known.

Arguments, loop carries, reductions, gathers, scatters and results are materialised. Elementwise ops, and ops that only
move data, are fused into their readers: in a reduction, in a kernel of its own, or in a contraction, whose kernel
computes its operands as it reads them (XLA:TPU's input fusion, as seen in its compiled programs). No kernel crosses
the boundary of a loop. The operand of an optimization barrier is written, and its result is the same array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from toast_cli.price.gpu_libraries import (
    is_fused_lookup,
    is_read_by_convolution,
    library_computes,
    library_finishes,
    reorders,
)
from toast_cli.price.liveness import slice_writer, starts_empty
from toast_cli.price.profile import CompilerProfile
from toast_cli.program.model import Op, Program, factors_of
from toast_cli.program.ops import (
    ARGUMENT,
    BARRIER,
    CARRY,
    CONCATENATE,
    CONVERT,
    DIVIDE,
    DYNAMIC_SLICE,
    EXPONENTIAL,
    JOIN,
    MULTIPLY,
    PAD,
    REDUCE,
    RESHAPE,
    RESULT,
    REVERSE,
    SCATTER,
    SELECT,
    SLICE,
    OpKind,
)

NONE = -1
ROUNDS = 2  # whether a value is written depends on its readers, which depend on what is written later
_KEEPING = frozenset({CARRY, JOIN, RESULT})


def materialised(program: Program, free: tuple[bool, ...], profile: CompilerProfile) -> tuple[list[bool], list[bool]]:
    """[values] whether each value is written to memory, as memory is counted and as time is; one list if they are
    equal. Memory includes values that only some programs write, see `exponentials_are_written`."""
    if "fusion" not in profile.passes:
        every = [maker >= 0 and not free[value] for value, maker in enumerate(program.producer)]
        return every, every
    fusion = _Fusion(program, free, profile)
    stored = fusion.run(most=True)
    return stored, fusion.run(most=False) if fusion.most_matters else stored


def _sums_nothing_up(program: Program, op: Op) -> bool:
    """Whether a reduction is only over dimensions of size 1, which XLA turns into a reshape."""
    values = program.values
    return op.name == REDUCE and values[op.operands[0]].elements == values[op.results[0]].elements


def _kernels_reading(program: Program, stored: list[bool], limit: int) -> list[frozenset[int]]:
    """[values] last ops of the kernels that read each value, about `limit` at most."""
    nobody: frozenset[int] = frozenset()
    readers = [nobody] * len(program.values)
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        results = op.results
        passes_on = len(results) == 1 and not stored[results[0]] and not op.kind.matrix_unit
        ends = readers[results[0]] if passes_on else nobody
        ends = ends or frozenset((number,))
        for value in op.operands:
            before = readers[value]
            if not before:
                readers[value] = ends
            elif len(before) < limit and before is not ends:
                # Chains would gather more and more.
                few = ends if len(ends) <= limit else sorted(ends)[:limit]
                readers[value] = before.union(few)
    return readers


class _Fusion:
    """Decides which values are written. stored: [values] the decisions so far. sources: [values] memory reads needed to
    compute each: value -> bytes. most_matters: whether memory and time may be counted differently."""

    def __init__(self, program: Program, free: tuple[bool, ...], profile: CompilerProfile) -> None:
        self._program = program
        self._limits, self._passes = profile.fusion, profile.passes
        self._library = "library-convolutions" in profile.passes
        self.most_matters = "library-products" in profile.passes
        self._fused_lookups = "fused-lookups" in profile.passes
        self._polynomials = expansions(profile)
        self._moved = moved_operands(program) if "moved-operands" in profile.passes else frozenset()
        self._free = free
        self._one_hot = one_hot_scatters(program, free, profile)
        self._sizes = [value.bytes for value in program.values]
        self._bits = [value.bits for value in program.values]
        self._settled = [self._settle(value) for value in range(len(program.values))]
        self._latest = self._latest_kernels()

    def run(self, *, most: bool) -> list[bool]:
        """[values] whether each value is written. most: as memory is counted; else as time is."""
        program, limit = self._program, self._limits.readers
        self._most, self._library_products = most, "library-products" in self._passes and not most
        self.stored = [bool(written) for written in self._settled]
        self.sources: list[dict[int, int]] = [{}] * len(program.values)
        for _ in range(ROUNDS):
            self.decide(_kernels_reading(program, self.stored, limit))
        if "multi-output-fusion" in self._passes:
            self.leave_to_readers(_kernels_reading(program, self.stored, limit))
        return self.stored

    def _latest_kernels(self) -> list[float]:
        """[values] the last unfused op that a value depends on, -1 for none. A reduction counts as placed right after
        the last op that it depends on."""
        latest: list[float] = [NONE] * len(self._program.values)
        for number, op in enumerate(self._program.ops):
            fused = op.name == ARGUMENT or op.kind.view_or_convert or op.kind.fusible or number in self._one_hot
            fused = fused or _sums_nothing_up(self._program, op) or self._is_fused_lookup(op)
            last = max([NONE, *[latest[v] for v in op.operands]])
            if not fused:
                last = last + 0.5 if op.name == REDUCE else max(number, last)
            for value in op.results:
                latest[value] = last
        return latest

    def _settle(self, value: int) -> bool | None:
        """Whether a value is written, if that is independent of which other values are; else None."""
        program = self._program
        maker = program.producer[value]
        if maker < 0:
            return False
        ops, producer = program.ops, program.ops[maker]
        name = producer.name
        if name in (ARGUMENT, CARRY, JOIN):
            return True
        kept = crosses = held = False
        for user, _ in program.users[value]:
            reader = ops[user]
            kept = kept or reader.name in _KEEPING
            crosses = crosses or reader.loop != producer.loop
            held = held or reader.name == BARRIER
        if self._free[value]:
            return kept and self._sizes[value] > self._limits.constant_bytes
        if kept and not crosses and name == RESHAPE and ops[program.producer[producer.operands[0]]].kernel is not None:
            return False  # the kernel's array is passed on
        if kept or crosses or (held and name != BARRIER):  # no fusion across loop boundaries or barriers
            return True
        if name == BARRIER:  # it forwards its operand
            return False
        if self._library and producer.kind.convolution:
            return True
        fused = producer.kind.fusible or maker in self._one_hot or _sums_nothing_up(program, producer)
        fused = fused or self._is_fused_lookup(producer)
        return None if fused or producer.kind.matrix_unit else True

    def decide(self, readers: list[frozenset[int]]) -> None:
        """Decides which values are written. readers: [values] last ops of the kernels that read each."""
        stored, settled = self.stored, self._settled
        product = [NONE] * len(stored)  # contraction whose result it is, in registers
        effort = [0] * len(stored)  # 2 where polynomials are evaluated to compute it, 1 where other functions are
        steps = [0] * len(stored)  # ops between a value and its memory reads
        looked_up = [False] * len(stored)  # a look-up is fused into it
        for number, op in enumerate(self._program.ops):
            contraction = number if op.kind.matrix_unit else max(map(product.__getitem__, op.operands), default=NONE)
            for value in op.results:
                written = settled[value]
                if written is not None:
                    stored[value] = written
                elif contraction != NONE:
                    users = {user for user, _ in self._program.users[value]}
                    # Its only reader is fused into the epilogue of the contraction that makes it.
                    finished = "output-fusion" in self._passes and len(users) == 1
                    finished = finished and self._finishes(min(users), contraction, value)
                    sliced = "sliced-products" in self._passes and contraction == number
                    stored[value] = not (finished or (sliced and is_sliced_product(self._program, value)))
                    product[value] = NONE if stored[value] else contraction
                    self.sources[value] = (
                        {value: self._sizes[value]} if contraction == number else self._read_by(op, value)
                    )
                    narrows = "narrow-stores" in self._passes and stored[value]
                    if narrows and (views := narrower_views(self._program, self._sizes, self.stored, value)):
                        stored[views[-1]], stored[value], product[value] = True, False, NONE
                        for view in (value, *views):
                            self.sources[view] = {views[-1]: self._sizes[views[-1]]}
                else:
                    self.sources[value] = self._read_by(op, value)
                    deepest, size, looked = 0, self._sizes[value], self._is_fused_lookup(op)
                    hardest = 2 if op.kind.polynomial and self._polynomials else int(op.kind.transcendental)
                    for v in op.operands:
                        if not stored[v]:
                            deepest, looked = max(deepest, steps[v]), looked or looked_up[v]
                            hardest = max(hardest, effort[v]) if self._sizes[v] * 2 >= size else hardest
                    steps[value], effort[value], looked_up[value] = 1 + deepest, hardest, looked
                    stored[value] = looked_up[value] and self._goes_into_product(readers[value])
                    if not stored[value]:
                        stored[value] = self._worth_writing(op, value, readers[value], steps[value], effort[value])

    def _is_fused_lookup(self, op: Op) -> bool:
        return self._fused_lookups and is_fused_lookup(op)

    def _goes_into_product(self, readers: frozenset[int]) -> bool:
        return any(self._program.ops[reader].kind.matrix_unit for reader in readers)

    def _computes(self, reader: Op) -> bool:
        """Whether an op fuses the computation of its operands."""
        return reader.kind.fuses_operands or (self._fused_lookups and reader.name == SCATTER)

    def _read_by(self, op: Op, value: int) -> dict[int, int]:
        read: dict[int, int] = {}
        for v in op.operands:
            if self.stored[v]:
                read[v] = self._sizes[v]
            elif not self._free[v]:
                read.update(self.sources[v])
        if op.kind.takes_part:
            most = self._sizes[value]
            read = {v: min(size, most) for v, size in read.items()}
        return read

    def _worth_writing(self, op: Op, value: int, readers: frozenset[int], steps: int, effort: int) -> bool:
        ops, producer, read = self._program.ops, self._program.producer, self.sources[value]
        if self._library_products and self._goes_into_product(readers):
            direct = any(ops[user].kind.contraction for user, _ in self._program.users[value])
            if reorders(op) or (direct and not library_computes(effort, read.values())):
                return True
        if effort and self._written_for_products(value, effort):
            return True
        if self._library and is_read_by_convolution(self._program, readers):
            return not (op.kind.view or op.name == REVERSE)  # a library reverses kernels as it reads them
        if value in self._moved or not all(self._computes(ops[r]) for r in readers):
            in_place = op.kind.view_or_convert and steps <= 1
            # A slice that a concatenation reads is copied, see `moved_operands`.
            joined = op.name == SLICE and any(ops[user].name == CONCATENATE for user, _ in self._program.users[value])
            return not in_place or (value in self._moved and joined)
        count = len(readers)
        if count < 2:  # slices read different parts: a kernel would compute the parts that overlap twice
            users = {user for user, _ in self._program.users[value]}
            cut_twice = len(users) > 1 and any(ops[user].name == SLICE for user in users)
            return "moved-operands" in self._passes and not op.kind.view and cut_twice
        # Recomputing a 16-bit result in f32 costs more than reading two bytes (a gelu's erfc in bf16, next to its
        # argument); an f32 one is recomputed.
        narrow = self._program.values[value].bits <= 16
        if self._polynomials and op.kind.polynomial and narrow:
            return True
        if "recomputation" not in self._passes or steps > self._limits.steps or len(read) > self._limits.sources:
            return True
        fresh = max((size for v, size in read.items() if ops[producer[v]].kind.matrix_unit), default=0)
        return not recomputing_pays(count, self._sizes[value], sum(read.values()), fresh)

    def _written_for_products(self, value: int, effort: int) -> bool:
        """Whether a value of costly functions is written because the contractions that read it do not fuse it."""
        ops = self._program.ops
        readers = [kind for user, _ in self._program.users[value] if (kind := ops[user].kind).matrix_unit]
        wide = self._bits[value] > self._limits.shared_bits
        if not readers or wide or "shared-exponentials" not in self._passes:
            return False
        if effort > 1:
            return True
        shared = exponentials_are_written(readers)
        self.most_matters = self.most_matters or shared
        return shared and self._most

    def _finishes(self, reader: int, product: int, value: int) -> bool:
        if not finishes_product(self._program, self._latest, reader, product, value):
            return False
        op = self._program.ops[reader]
        ranks = (self._ranks_behind(v) for v in op.operands if v != value)
        return not self._library_products or library_finishes(op, self._sizes[value], self._sizes[op.results[0]], ranks)

    def _ranks_behind(self, value: int) -> int:
        """The highest rank, without dimensions of size 1, of the arrays that a value is computed from."""
        program = self._program
        while self._free[value] and program.ops[program.producer[value]].kind.view:
            value = program.ops[program.producer[value]].operands[0]
        arrays = [value] if self.stored[value] or self._free[value] else self.sources[value]
        return max((sum(size > 1 for size in program.values[v].shape) for v in arrays), default=0)

    def leave_to_readers(self, readers: list[frozenset[int]]) -> None:
        """Leaves a contraction's result unwritten where its kernel computes and writes everything derived from it."""
        for number, op in enumerate(self._program.ops):
            if not op.kind.matrix_unit:
                continue
            value = op.results[0]
            while not self.stored[value]:
                value = self._program.ops[self._program.users[value][0][0]].results[0]
            ends = readers[value]
            several = self._settled[value] is None and 1 < len(ends) <= self._limits.results
            # The contraction's kernel can write the result of each end.
            if (
                several
                and not self._library_products
                and all(
                    self._finishes(end, number, value) and self.stored[self._program.ops[end].results[0]]
                    for end in ends
                )
            ):
                self.stored[value] = False


# ---------------------------------------------------------------- rules for single values
# Rules of fusion for single ops and for values with several readers: which are fused, written or recomputed.
#
# Seen in programs compiled by libtpu 0.0.42.1 for v4 to v6e unless said otherwise.


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
    narrower: list[int] = []
    views: list[int] = []
    source = value
    while (op := ops[producer[source]]).name in (CONVERT, RESHAPE):
        source = op.operands[0]
        views.append(source)
        if stored[source] or sizes[source] > sizes[value]:
            break
        if sizes[source] < sizes[value]:
            narrower = views.copy()
    return narrower


@dataclass(frozen=True, slots=True)
class MaskedSoftmax:
    """A softmax of masked scores.

    Attributes:
        batch, free: dimensions of the scores that both operands of the product that makes them have, and that one has.
        spread: bytes per element of the arrays that its kernel reads beside the scores.
    """

    batch: tuple[int, ...]
    free: tuple[int, ...]
    spread: int

    def applies(self, shape: tuple[int, ...]) -> bool:
        """Whether the kernel reads arrays in memory. shape: of the scores on one device."""
        batches, rows = (sum(shape[d] > 1 for d in dims) for dims in (self.batch, self.free))
        return 2560 < shape[-1] < 8192 and (batches > 1 or rows < 3)


def masked_softmaxes(program: Program, profile: CompilerProfile) -> dict[int, MaskedSoftmax]:
    """Masked scores -> the softmax that reads them.

    XLA:TPU computes a softmax in one kernel if no gradient reads its exponentials, and on v6e and tpu7x that kernel
    masks and scales the scores as well. It reads the mask, what replaces masked scores, and the scale as arrays of the
    size of the scores, and writes exponentials in f32. Rows of up to 2,560 elements are part of the product's kernel,
    and the maxima of longer ones than 8,192, or of one batch of grouped queries (libtpu 0.0.42.1: products of bf16; 1
    to 8 sequences, 1 to 32 heads).
    """
    softmaxes: dict[int, MaskedSoftmax] = {}
    ops, producer, users = program.ops, program.producer, program.users
    for op in ops if "masked-softmaxes" in profile.passes else ():
        names = {ops[user].name for user, _ in users[op.results[0]]} if op.name == EXPONENTIAL else set()
        scores = ops[producer[op.operands[0]]].operands[0] if names == {REDUCE, DIVIDE} else -1
        if scores < 0 or ops[producer[scores]].name != SELECT or program.values[scores].dtype != "f32":
            continue
        value = ops[producer[scores]].operands[1]
        dims, spread = tuple(range(len(program.values[scores].shape))), 1 + 4
        while (maker := ops[producer[value]]).rule.operands and (maker.kind.elementwise or maker.kind.view):
            source, result_dims = maker.rule.operands[0], maker.rule.results[0]
            if any(result_dims[d] not in source for d in dims):
                break
            dims, value = tuple([source.index(result_dims[d]) for d in dims]), maker.operands[0]
            spread += 4 * (maker.name == MULTIPLY)
        if maker.kind.contraction and program.values[maker.operands[0]].dtype == "bf16":
            left, right = factors_of(*maker.rule.operands)
            batch = tuple([n for n, d in enumerate(dims) if left.intersection(right, maker.rule.results[0][d])])
            softmaxes[scores] = MaskedSoftmax(batch, tuple([n for n in range(len(dims)) if n not in batch]), spread)
    return softmaxes


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
    bits = [value.bits for value in program.values]
    return [n / b if there and b else 1.0 for n, b, there in zip(needed, bits, stored, strict=True)]


def _bits_needed(program: Program, product_bits: int, stacks: frozenset[int]) -> list[int]:
    """[values] bits of each element that are read. stacks: values that are stacks of operands."""
    bits = [value.bits for value in program.values]
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
    stacks: set[int] = set()
    for number, op in enumerate(program.ops):
        if op.name == CARRY and program.values[op.results[0]].dtype == "f32":
            only_stacked = starts_empty(program, op) and program.users[op.operands[1]] == [(number, 1)]
            if only_stacked and slice_writer(program, op) and _is_sliced_for_operands(program, op, needed):
                stacks |= {*op.results, *op.operands}
    return frozenset(stacks)


def _is_sliced_for_operands(program: Program, carry: Op, needed: list[int]) -> bool:
    loop = program.loops[carry.loop]
    after = [use for use in program.users[carry.results[0]] if use[0] not in loop]
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
    (shared,) = factors_of(op.rule.operands[1])
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


def moved_operands(program: Program) -> frozenset[int]:
    """Values that a pad or a concatenation moves, which are written if they are computed.

    XLA:TPU fuses pads at edges and concatenations (as a maximum of two pads) into their readers, products included, but
    not the computation of what they move: the halves that rotary embeddings turn and join again, what a stencil on a
    torus rolls (a roll is two pads), the gradient of logits if a loss leaves out their last position. It copies slices
    that are joined, but pads them in place. Seen on v4, v5e, v5p and v6e in bf16 and f32, along every dimension,
    aligned with tiles or not; the halves of an array that a program returns joined are an exception.
    """
    moving = [op for op in program.ops if op.name in (CONCATENATE, PAD)]
    return frozenset(value for op in moving for value in (op.operands if op.name == CONCATENATE else op.operands[:1]))


def visible_part(op: Op) -> float:
    """Fraction of its operand that an op reads where it pads: a roll by 3 of 64 elements is a pad that shows 61 of them
    and one that shows 3. XLA:TPU reads an array once for each pad and slice of it, five times for a stencil."""
    ends = [(w.low + (w.inputs - 1) * w.dilation + 1, w) for w in op.windows] if op.name == PAD else []
    return prod(max(0.0, min(end, w.outputs) - max(w.low, 0)) / max(1, end - w.low) for end, w in ends)
