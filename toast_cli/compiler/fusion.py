"""Which values reach memory: what XLA's fusion makes of a program. Static, before any plan is known.

What arguments, loops, reductions, gathers, scatters and results hold lies in memory. Everything elementwise, and what only moves data,
is computed where it is read: in a reduction, in a kernel of its own, or in a product, whose kernel computes its operands as it reads
them and finishes its result before it writes it (XLA:TPU's input and output fusion, as seen in its compiled programs). A value that
several kernels read is either computed again in each of them or written once and read; whichever moves fewer bytes. With n readers, a
value of v bytes that is computed from i bytes in memory:

    computed again: n i          written: i + v + n v

(transcendental functions are no dearer than additions on units that have them in hardware; those that are not in hardware, such as the
error function, become polynomials of dozens of steps, and no product computes its operands with these, once for each tile). What comes straight out of a product is
not computed again; its bytes are in registers when the value is written, so they count in `n i` but not in `i`.

Where two products read exponentials and the like of one array (the probabilities of an attention), XLA:TPU writes them in some programs and
has both products compute them in others. Memory is counted as if they were written, time as if they were not.
Convolutions compute them.
"""

from __future__ import annotations

from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ARGUMENT, CARRY, CONVERT, JOIN, RESHAPE, RESULT

NONE = -1
ROUNDS = 2
MOST_READERS = 8  # beyond so many, how many there are no longer matters
MOST_SOURCES = 12  # arrays that one kernel reads
RECOMPUTED_STEPS = 32  # ops in a row that are computed again
MOST_FINISHED = 4  # results that one product's kernel writes


# Without an instruction of their own: XLA expands them into polynomials. Operations of one, in those of the vector unit: erf and erfc as
# libtpu 0.0.42.1 estimates arrays of 4096^2 on v4 (15, 52) and v6e (15, 48); the others are taken for as long as erfc.
POLYNOMIALS = {"chlo.erf": 15.0} | {
    f"chlo.{name}": 50.0 for name in ("erfc", "erf_inv", "lgamma", "digamma", "polygamma", "zeta", "bessel_i1e")
}
_KEEPING = frozenset({CARRY, JOIN, RESULT})


def materialised(program: Program, free: tuple[bool, ...], *, most: bool = True) -> list[bool]:
    """[values] whether each value is written to memory; `most`: also what only some programs write, see above."""
    fusion = _Fusion(program, free, most)
    for _ in range(ROUNDS):  # what is written depends on who reads it, and that on what is written further down
        readers = _kernels_reading(program, fusion.stored)
        fusion.decide(readers)
    fusion.leave_to_readers(_kernels_reading(program, fusion.stored))
    return fusion.stored


def _kernels_reading(program: Program, stored: list[bool]) -> list[frozenset[int]]:
    """[values] ops that end the kernels which read each value, about `MOST_READERS` at most."""
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
            elif len(known) < MOST_READERS and known is not ends:
                few = (
                    ends if len(ends) <= MOST_READERS else sorted(ends)[:MOST_READERS]
                )  # chains would gather more and more
                found[value] = known.union(few)
    return found


class _Fusion:
    """stored: [values] what is written so far. sources: [values] what is read from memory to compute each: value -> bytes."""

    def __init__(self, program: Program, free: tuple[bool, ...], most: bool) -> None:
        self._program = program
        self._most = most
        self._free = free
        self._sizes = [value.bytes for value in program.values]
        self._settled = [self._settle(value) for value in range(len(program.values))]
        self.stored = [bool(known) for known in self._settled]
        self.sources: list[dict[int, int]] = [{}] * len(program.values)
        self._latest = self._latest_kernels()

    def _latest_kernels(self) -> list[int]:
        """[values] the last op that must have a kernel of its own among all that a value is made from, -1 for none."""
        latest = [-1] * len(self._program.values)
        for number, op in enumerate(self._program.ops):
            own = number if not (op.name == ARGUMENT or op.kind.view_or_convert or op.kind.fusible) else -1
            found = max([own, *[latest[v] for v in op.operands]])
            for value in op.results:
                latest[value] = found
        return latest

    def _settle(self, value: int) -> bool | None:
        """True or False where it does not depend on what else is written, None where it does."""
        program = self._program
        maker = program.producer[value]
        if maker < 0:
            return False
        ops, producer = program.ops, program.ops[maker]
        name = producer.name
        if name in (ARGUMENT, CARRY, JOIN):
            return True
        kept = crosses = False
        for user, _ in program.users[value]:
            reader = ops[user]
            kept = kept or reader.name in _KEEPING
            crosses = crosses or reader.loop != producer.loop
        if self._free[value]:
            return kept and self._sizes[value] > 1024
        if kept or crosses:  # nothing is fused across a loop's boundary
            return True
        return None if producer.kind.matrix_unit or producer.kind.fusible else True

    def decide(self, readers: list[frozenset[int]]) -> None:
        """Which values are written, given the kernels that read each (`readers` [values])."""
        stored, settled = self.stored, self._settled
        product = [NONE] * len(stored)  # the one whose result a value is, in registers
        effort = [0] * len(
            stored
        )  # 2 where polynomials are evaluated to compute it, 1 where transcendental functions are
        steps = [0] * len(stored)  # ops between a value and what is read to compute it
        for number, op in enumerate(self._program.ops):
            made = number if op.kind.matrix_unit else max([NONE, *[product[v] for v in op.operands]])
            for value in op.results:
                known = settled[value]
                if known is not None:
                    stored[value] = known
                elif made != NONE:
                    stored[value] = not self._finished_by_reader(made, value)
                    product[value] = NONE if stored[value] else made
                    self.sources[value] = {value: self._sizes[value]} if made == number else self._read_by(op, value)
                    if stored[value] and (views := self._widened(value)):
                        stored[views[-1]], stored[value], product[value] = True, False, NONE
                        for view in (value, *views):
                            self.sources[view] = {views[-1]: self._sizes[views[-1]]}
                else:
                    self.sources[value] = self._read_by(op, value)
                    unwritten = [v for v in op.operands if not stored[v]]
                    steps[value] = 1 + max((steps[v] for v in unwritten), default=0)
                    own = 2 if op.kind.polynomial else 1 if op.kind.transcendental else 0
                    large = (effort[v] for v in unwritten if self._sizes[v] * 2 >= self._sizes[value])
                    effort[value] = max(own, *large, 0)
                    stored[value] = self._worth_writing(op, value, readers[value], steps[value], effort[value])

    def _widened(self, value: int) -> list[int]:
        """What a value that comes out of a product is a wider view of, the narrowest last: that is written before it is widened."""
        ops, producer = self._program.ops, self._program.producer
        found: list[int] = []
        views: list[int] = []
        source = value
        while (op := ops[producer[source]]).name in (CONVERT, RESHAPE):
            source = op.operands[0]
            views.append(source)
            if self.stored[source] or self._sizes[source] > self._sizes[value]:
                break
            if self._sizes[source] < self._sizes[value]:
                found = views.copy()
        return found

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
        products = [kind for u, _ in self._program.users[value] if (kind := ops[u].kind).matrix_unit] if effort else []
        if products and (effort > 1 or (sum(kind.contraction for kind in products) > 1 and self._most)):
            return True
        if any(not ops[r].kind.fuses_operands for r in readers):
            return not (op.kind.view_or_convert and steps <= 1)
        count = len(readers)
        if count < 2:
            return False
        if steps > RECOMPUTED_STEPS or len(read) > MOST_SOURCES:
            return True
        size, whole = self._sizes[value], sum(read.values())
        fresh = max((size for v, size in read.items() if ops[producer[v]].kind.matrix_unit), default=0)
        return count * whole >= whole - fresh + size + count * size

    def _finished_by_reader(self, product: int, value: int) -> bool:
        """Whether one op, in the kernel of the product that makes the value, is all that reads it."""
        readers = {u for u, _ in self._program.users[value]}
        return len(readers) == 1 and self._finishes(min(readers), product, value)

    def _finishes(self, reader: int, product: int, value: int) -> bool:
        """An elementwise op of the value's size, all of whose other operands are there when the product is made."""
        op = self._program.ops[reader]
        if not (op.kind.elementwise or op.kind.view_or_convert) or self._latest[op.results[0]] > product:
            return False
        return self._program.values[op.results[0]].elements == self._program.values[value].elements

    def leave_to_readers(self, readers: list[frozenset[int]]) -> None:
        """What comes out of a product is not written itself where the product's kernel can finish and write all that is made of it."""
        for number, op in enumerate(self._program.ops):
            if not op.kind.matrix_unit:
                continue
            value = op.results[0]
            while not self.stored[value]:
                value = self._program.ops[self._program.users[value][0][0]].results[0]
            ends = readers[value]
            several = self._settled[value] is None and 1 < len(ends) <= MOST_FINISHED
            if several and all(self._made_at_once(number, value, end) for end in ends):
                self.stored[value] = False

    def _made_at_once(self, product: int, value: int, end: int) -> bool:
        """Whether what op `end` writes can be written by the kernel of `product`."""
        return self._finishes(end, product, value) and self.stored[self._program.ops[end].results[0]]
