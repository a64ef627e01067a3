"""Fusion: decides which values are materialised, before any plan is known.

Arguments, loop carries, reductions, gathers, scatters and results are materialised. Elementwise ops, and ops that only
move data, are fused into their readers: in a reduction, in a kernel of its own, or in a contraction, whose kernel
computes its operands as it reads them (XLA:TPU's input fusion, as seen in its compiled programs). No kernel crosses the
boundary of a loop. The operand of an optimization barrier is written, and its result is the same array.

Rules for single ops and for values with several readers are in `fusion_rules`.

In: a program and a profile. Out: for each value whether it is stored.
"""

from __future__ import annotations

from toast_cli.compiler.fusion_rules import (
    expansions,
    exponentials_are_written,
    finishes_product,
    is_sliced_product,
    narrower_views,
    one_hot_scatters,
    padded_operands,
    pads_inside,
    polynomial_is_written,
    recomputing_pays,
)
from toast_cli.compiler.gpu_libraries import (
    fuses_updates,
    is_fused_lookup,
    is_read_by_convolution,
    library_computes,
    library_finishes,
    reorders,
)
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import DTYPE_BITS, Op, Program
from toast_cli.program.ops import ARGUMENT, BARRIER, CARRY, JOIN, REDUCE, RESULT, REVERSE

NONE = -1
ROUNDS = 2  # whether a value is written depends on its readers, which depend on what is written later
_KEEPING = frozenset({CARRY, JOIN, RESULT})


def materialised(
    program: Program, free: tuple[bool, ...], profile: CompilerProfile, *, most: bool = True
) -> list[bool]:
    """[values] whether each value is written to memory; most: including those that only some programs write, see
    `exponentials_are_written`."""
    if "fusion" not in profile.passes:
        return [maker >= 0 and not free[value] for value, maker in enumerate(program.producer)]
    fusion = _Fusion(program, free, profile, most)
    limit = profile.fusion.readers
    for _ in range(ROUNDS):
        fusion.decide(_kernels_reading(program, fusion.stored, limit))
    if "multi-output-fusion" in profile.passes:
        fusion.leave_to_readers(_kernels_reading(program, fusion.stored, limit))
    return fusion.stored


def _sums_nothing_up(program: Program, op: Op) -> bool:
    """Whether a reduction is only over dimensions of size 1, which XLA turns into a reshape."""
    values = program.values
    return op.name == REDUCE and values[op.operands[0]].elements == values[op.results[0]].elements


def _kernels_reading(program: Program, stored: list[bool], limit: int) -> list[frozenset[int]]:
    """[values] last ops of the kernels that read each value, about `limit` at most."""
    nobody: frozenset[int] = frozenset()
    found = [nobody] * len(program.values)
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        results = op.results
        passes_on = len(results) == 1 and not stored[results[0]] and not op.kind.matrix_unit
        ends = found[results[0]] if passes_on else nobody
        ends = ends or frozenset((number,))
        for value in op.operands:
            known = found[value]
            if not known:
                found[value] = ends
            elif len(known) < limit and known is not ends:
                # Chains would gather more and more.
                few = ends if len(ends) <= limit else sorted(ends)[:limit]
                found[value] = known.union(few)
    return found


class _Fusion:
    """Decides which values are written. stored: [values] the decisions so far. sources: [values] memory reads needed to
    compute each: value -> bytes."""

    def __init__(self, program: Program, free: tuple[bool, ...], profile: CompilerProfile, most: bool) -> None:
        self._program = program
        self._limits, self._passes, self._most = profile.fusion, profile.passes, most
        self._library = "library-convolutions" in profile.passes
        self._library_products = "library-products" in profile.passes and not most
        self._fused_lookups = "fused-lookups" in profile.passes
        self._polynomials = expansions(profile)
        self._padded = padded_operands(program) if "padded-operands" in profile.passes else frozenset()
        self._free = free
        self._one_hot = one_hot_scatters(program, free, profile)
        self._sizes = [value.bytes for value in program.values]
        self._bits = [DTYPE_BITS.get(value.dtype, 32) for value in program.values]
        self._settled = [self._settle(value) for value in range(len(program.values))]
        self.stored = [bool(known) for known in self._settled]
        self.sources: list[dict[int, int]] = [{}] * len(program.values)
        self._latest = self._latest_kernels()

    def _latest_kernels(self) -> list[float]:
        """[values] the last unfused op that a value depends on, -1 for none. A reduction counts as placed right after
        the last op that it depends on."""
        latest: list[float] = [NONE] * len(self._program.values)
        for number, op in enumerate(self._program.ops):
            fused = op.name == ARGUMENT or op.kind.view_or_convert or op.kind.fusible or number in self._one_hot
            fused = fused or _sums_nothing_up(self._program, op) or self._is_fused_lookup(op)
            found = max([NONE, *[latest[v] for v in op.operands]])
            if not fused:
                found = found + 0.5 if op.name == REDUCE else max(number, found)
            for value in op.results:
                latest[value] = found
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
        if kept or crosses or (held and name != BARRIER):  # no fusion across loop boundaries or barriers
            return True
        if name == BARRIER:  # it forwards its operand
            return False
        if (self._library and producer.kind.convolution) or self._is_spreading(producer):
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
            made = number if op.kind.matrix_unit else max([NONE, *[product[v] for v in op.operands]])
            for value in op.results:
                known = settled[value]
                if known is not None:
                    stored[value] = known
                elif made != NONE:
                    finished = "output-fusion" in self._passes and self._finished_by_reader(made, value)
                    stored[value] = not (finished or (made == number and self._is_sliced(value)))
                    product[value] = NONE if stored[value] else made
                    self.sources[value] = {value: self._sizes[value]} if made == number else self._read_by(op, value)
                    if "narrow-stores" in self._passes and stored[value] and (views := self._narrower(value)):
                        stored[views[-1]], stored[value], product[value] = True, False, NONE
                        for view in (value, *views):
                            self.sources[view] = {views[-1]: self._sizes[views[-1]]}
                else:
                    self.sources[value] = self._read_by(op, value)
                    unwritten = [v for v in op.operands if not stored[v]]
                    steps[value] = 1 + max((steps[v] for v in unwritten), default=0)
                    own = 2 if op.kind.polynomial and self._polynomials else 1 if op.kind.transcendental else 0
                    large = (effort[v] for v in unwritten if self._sizes[v] * 2 >= self._sizes[value])
                    effort[value] = max(own, *large, 0)
                    looked_up[value] = self._is_fused_lookup(op) or any(looked_up[v] for v in unwritten)
                    stored[value] = looked_up[value] and self._goes_into_product(readers[value])
                    if not stored[value]:
                        stored[value] = self._worth_writing(op, value, readers[value], steps[value], effort[value])

    def _is_fused_lookup(self, op: Op) -> bool:
        return self._fused_lookups and is_fused_lookup(op)

    def _goes_into_product(self, readers: frozenset[int]) -> bool:
        return any(self._program.ops[reader].kind.matrix_unit for reader in readers)

    def _is_spreading(self, op: Op) -> bool:
        return "interior-pads" in self._passes and pads_inside(op)

    def _computes(self, reader: Op) -> bool:
        """Whether an op fuses the computation of its operands."""
        if self._is_spreading(reader):
            return False
        return reader.kind.fuses_operands or (self._fused_lookups and fuses_updates(reader))

    def _is_sliced(self, value: int) -> bool:
        return "sliced-products" in self._passes and is_sliced_product(self._program, value)

    def _narrower(self, value: int) -> list[int]:
        return narrower_views(self._program, self._sizes, self.stored, value)

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
        if value in self._padded or not all(self._computes(ops[r]) for r in readers):
            return not (op.kind.view_or_convert and steps <= 1)
        count = len(readers)
        if count < 2:
            return False
        if self._polynomials and polynomial_is_written(op, self._program.values[value]):
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
        return effort > 1 or (self._most and exponentials_are_written(readers))

    def _finished_by_reader(self, product: int, value: int) -> bool:
        """Whether the only reader of a value is fused into the epilogue of the contraction that makes it."""
        readers = {u for u, _ in self._program.users[value]}
        return len(readers) == 1 and self._finishes(min(readers), product, value)

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
            if several and not self._library_products and all(self._made_at_once(number, value, end) for end in ends):
                self.stored[value] = False

    def _made_at_once(self, product: int, value: int, end: int) -> bool:
        """Whether the kernel of `product` can write the result of op `end`."""
        return self._finishes(end, product, value) and self.stored[self._program.ops[end].results[0]]
