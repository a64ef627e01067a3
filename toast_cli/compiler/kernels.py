"""Which work is done together: one kernel for each value that reaches memory.

A kernel belongs to the op that writes its result, or, where a product is finished by elementwise work (output fusion), to the
product. What an op reads that is not in memory is computed on the way in, so its arithmetic and its reads belong to the kernel, on
the side of the operand it comes in by; that says on which local shape it runs. A value read twice by one kernel is read once.

A reduction rides on another kernel, which has what it sums up in registers, where that kernel makes the array, or where it reads it
together with the largest element the reduction found (a softmax in one pass). So does elementwise work on what another kernel writes, where all
else that it reads is there when that kernel runs (an optimiser's new weights beside its new moments, in the kernel of the product that makes
the gradient, or in one of their own). XLA calls this multi-output fusion.

Enters: a program, which values are stored and which are free. Leaves: per op a `Kernel`, or None for ops inside another's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from toast_cli.compiler.fusion import POLYNOMIALS
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ARGUMENT, CARRY, REDUCE, RESULT, SCATTER


@dataclass(slots=True)
class Side:
    """What a kernel does on one side of its op. bytes and elements: read on the side of an operand, written on that of a result;
    flops: elementwise. read: bytes read on the side of a result, by what finishes a product. passing: of all these bytes those of arrays
    that the program makes and does not keep."""

    bytes: int = 0
    elements: int = 0
    flops: float = 0.0
    read: int = 0
    passing: int = 0


@dataclass(slots=True)
class Kernel:
    """operands: [operands] one side each. results: [results]. The op's own arithmetic is not in them.

    unfinished: bytes of a product that elementwise work finishes before it is written. Where a reduction comes between, the
    product is written and read once more. rides: on another kernel, so that it reads nothing itself.
    """

    operands: list[Side]
    results: list[Side]
    unfinished: int = 0
    rides: bool = False


@dataclass(slots=True)
class _Walk:
    """One kernel being gathered. padding: [values]. read: (value, op that takes a part of it or -1) already counted. product: found on the way; others: more of them."""

    padding: list[float]
    read: set[tuple[int, int]] = field(default_factory=set)
    members: set[int] = field(default_factory=set)
    product: int = -1
    others: list[int] = field(default_factory=list)


def kernels(
    program: Program, stored: list[bool], free: tuple[bool, ...], padding: list[float] | None = None
) -> list[Kernel | None]:
    """[ops] the kernels of a program. Arguments, carries and results of the program have none.

    padding: [values] elements in memory over elements, see `tiling`; bytes, elements and flops count with it.
    """
    padded = padding or [1.0] * len(program.values)
    found: list[Kernel | None] = [None] * len(program.ops)
    # With the products that are written after all: a kernel finishes one.
    taken = list(stored)
    reads: dict[int, set[int]] = {}  # op that ends a kernel -> what it reads from memory
    hosts = _Hosts(program)
    for number, op in enumerate(program.ops):
        if op.name in (ARGUMENT, CARRY, RESULT) or not any(stored[v] for v in op.results):
            continue
        pending = [number]
        while pending:
            end = pending.pop()
            walk = _add(program, taken, free, end, found, _Walk(padded))
            reads[end] = {value for value, _ in walk.read}
            pending.extend(walk.others)
            joined = hosts.of(end, walk)
            if joined:
                _join(program, taken, free, end, found, hosts, joined, padded)
            hosts.enter(end, walk, joined)
    _let_reductions_ride(program, found, reads)
    return found


class _Hosts:
    """Which kernels write what, and have which arrays in registers. A kernel is known by its product, or by the op that ends it."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.writes: dict[int, int] = {}  # value -> kernel
        self.holds: dict[int, set[tuple[int, int]]] = {}  # kernel -> what it has read or made, as in `_Walk.read`

    def of(self, end: int, walk: _Walk) -> list[int]:
        """Kernels that can do what op `end` does on what they write; none where it has to be a kernel of its own, or is part of one."""
        op, values, ops = self._program.ops[end], self._program.values, self._program.ops
        if walk.product >= 0 or not op.kind.elementwise or len(op.results) != 1:
            return []
        size, read = values[op.results[0]].elements, [value for value, _ in walk.read]
        found = {
            self.writes[v]
            for v in read
            if v in self.writes and values[v].elements == size and self._takes(ops[self.writes[v]], op)
        }
        last = max(found, default=-1)
        waits = any(self.writes.get(v) not in found and self._program.producer[v] > last for v in read)
        return [] if waits else sorted(found)

    def _takes(self, host: Op, op: Op) -> bool:
        return host.loop == op.loop and (host.kind.matrix_unit or host.kind.elementwise)

    def enter(self, end: int, walk: _Walk, joined: list[int]) -> None:
        kernel = joined[-1] if joined else walk.product if walk.product >= 0 else end
        made = self._program.ops[end].results
        self.holds.setdefault(kernel, set()).update(walk.read, ((v, -1) for v in made))
        self.writes.update(dict.fromkeys(made, kernel))


def _join(
    program: Program, taken: list[bool], free: tuple[bool, ...], end: int, found: list[Kernel | None], hosts: _Hosts,
    joined: list[int], padding: list[float],
) -> None:  # fmt: skip
    """Makes what op `end` does part of the kernels `joined`: it reads nothing that they have."""
    walk = _Walk(padding, set().union(*(hosts.holds[kernel] for kernel in joined)))
    op, host = program.ops[end], found[joined[-1]]
    operands = [_side(program, taken, free, op, position, walk) for position in range(len(op.operands))]
    results = [_written(program, taken, op, k, walk.padding) for k in range(len(op.results))]
    if program.ops[joined[-1]].kind.matrix_unit and host is not None:
        found[end] = None
        _finish(program, op, host.results[0], operands, results, padding)
    else:
        found[end] = Kernel(operands, results, rides=True)


def _add(
    program: Program, taken: list[bool], free: tuple[bool, ...], number: int, found: list[Kernel | None], walk: _Walk
) -> _Walk:
    """Adds the kernel that writes the results of op `number`, or adds these to the kernel of the product they finish."""
    op = program.ops[number]
    operands = [_side(program, taken, free, op, position, walk) for position in range(len(op.operands))]
    results = [_written(program, taken, op, k, walk.padding) for k in range(len(op.results))]
    if walk.product < 0:
        found[number] = Kernel(operands, results)
        return walk
    product = program.ops[walk.product]
    known = found[walk.product]
    if known is None:
        ways_in = [_side(program, taken, free, product, position, walk) for position in range(len(product.operands))]
        known = found[walk.product] = Kernel(ways_in, [Side()], program.values[product.results[0]].bytes)
    _finish(program, op, known.results[0], operands, results, walk.padding)
    return walk


def _finish(
    program: Program, op: Op, finish: Side, operands: list[Side], results: list[Side], padding: list[float]
) -> None:
    """Adds what an op does, on all its sides, to the finishing of a product."""
    finish.bytes += sum(s.bytes for s in results)
    finish.elements += sum(s.elements for s in results)
    finish.flops += arithmetic(program, op) * padding[op.results[0]] + sum(s.flops for s in operands)
    finish.read += sum(s.bytes for s in operands)
    finish.passing += sum(s.passing for s in (*operands, *results))


def arithmetic(program: Program, op: Op) -> float:
    """Operations of the vector unit for one execution of an op, or of the matrix unit."""
    each = POLYNOMIALS.get(op.name)
    return op.flops if each is None else each * program.values[op.results[0]].elements


def _let_reductions_ride(program: Program, found: list[Kernel | None], reads: dict[int, set[int]]) -> None:
    readers: dict[int, list[int]] = {}
    for end, values in reads.items():
        for value in values:
            readers.setdefault(value, []).append(end)
    for number, values in reads.items():
        op, kernel = program.ops[number], found[number]
        if kernel is None or op.name != REDUCE or not values:
            continue
        largest = max(values, key=lambda v: (program.values[v].bytes, v))
        maker = program.ops[program.producer[largest]]
        made_here = program.producer[largest] in reads and maker.loop == op.loop and maker.name != REDUCE
        if made_here or (op.detail == "maximum" and any(op.results[0] in reads[r] for r in readers[largest])):
            kernel.rides = True
            for side in kernel.operands:
                side.bytes = side.elements = side.passing = 0


def _side(program: Program, taken: list[bool], free: tuple[bool, ...], op: Op, position: int, walk: _Walk) -> Side:
    """What comes in by one operand of an op: reads, and arithmetic on the way."""
    side = Side()
    pending = [(op.operands[position], op, position)]
    while pending:
        value, reader, at = pending.pop()
        if free[value]:
            continue
        if taken[value]:
            _read(program, value, reader, at, walk, side)
            continue
        maker = program.producer[value]
        if maker in walk.members:
            continue
        walk.members.add(maker)
        made = program.ops[maker]
        if made.kind.matrix_unit:
            if walk.product < 0:
                walk.product = maker
            else:
                taken[value] = True
                walk.others.append(maker)
                _read(program, value, reader, at, walk, side)
            continue
        side.flops += arithmetic(program, made) * walk.padding[value]
        pending.extend((v, made, k) for k, v in enumerate(made.operands))
    return side


def _read(program: Program, value: int, reader: Op, position: int, walk: _Walk, side: Side) -> None:
    takes = reader.kind.takes_part and position == 0
    if position == 0 and reader.kind.updates:
        return
    key = (value, reader.results[0] if takes else -1)
    if key in walk.read:
        return
    walk.read.add(key)
    it = program.values[value]
    part = program.values[reader.results[0]] if takes else it
    padding = walk.padding[value]
    size = round(min(it.bytes, part.bytes) * padding)
    side.bytes += size
    if program.ops[program.producer[value]].name not in (ARGUMENT, CARRY):
        side.passing += size
    side.elements += round(min(it.elements, part.elements) * padding)


def _written(program: Program, taken: list[bool], op: Op, k: int, padding: list[float]) -> Side:
    value = op.results[k]
    if not taken[value]:
        return Side()
    it = program.values[value]
    if op.kind.updates:
        update = program.values[op.operands[-1 if op.name == SCATTER else 1]]
        return Side(min(it.bytes, update.bytes), min(it.elements, update.elements))
    size = round(it.bytes * padding[value])
    kept = any(program.ops[user].name == RESULT for user, _ in program.users[value])
    return Side(size, round(it.elements * padding[value]), passing=0 if kept else size)
