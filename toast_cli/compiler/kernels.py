"""Groups ops into kernels: one kernel for each value that is materialised.

A kernel belongs to the op that writes its result or, with output fusion, to the contraction whose epilogue writes it.
An operand that is not in memory is computed in the kernel, so its flops and reads count for that operand, which
determines its local shape. A value read twice by one kernel is read once. `merged_kernels` merges kernels further.

Enters: a program, which values are stored and which are free. Leaves: per op a `Kernel`, or None for ops inside
another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from toast_cli.compiler.arithmetic import op_arithmetic, scatter_start_bytes
from toast_cli.compiler.fusion_rules import expansions
from toast_cli.compiler.kernel import Kernel, Side
from toast_cli.compiler.merged_kernels import Hosts, join_rows, let_reductions_ride
from toast_cli.compiler.on_chip import LoopResidency, is_scalar, loop_residency, reuse_widths
from toast_cli.compiler.profile import CompilerProfile
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import ARGUMENT, CARRY, RESULT, SCATTER


@dataclass(slots=True)
class _Walk:
    """State while one kernel is collected.

    padding, parts: [values] see `kernels`. cost: see `expansions`. atomic: see `lookup_operations`. residency: see
    `loop_residency`. widths: [values] see `reuse_widths`. read: (value, op that takes a part of it or -1) already
    counted. product: the contraction it contains; others: further ones.
    """

    padding: list[float]
    parts: list[float]
    cost: Mapping[str, float]
    atomic: bool
    residency: LoopResidency
    widths: list[float]
    read: set[tuple[int, int]] = field(default_factory=set)
    members: set[int] = field(default_factory=set)
    product: int = -1
    others: list[int] = field(default_factory=list)


def kernels(
    program: Program,
    stored: list[bool],
    free: tuple[bool, ...],
    profile: CompilerProfile,
    padding: list[float] | None = None,
    parts: list[float] | None = None,
) -> list[Kernel | None]:
    """[ops] the kernels of a program. Arguments, carries, results and collectives have none; manual regions are priced
    separately.

    padding: [values] padded elements over elements, see `layouts`; scales bytes, elements and flops. parts: [values]
    fraction of bits that is stored, see `written_parts`; scales bytes.
    """
    padded, parts = padding or [1.0] * len(program.values), parts or [1.0] * len(program.values)
    found: list[Kernel | None] = [None] * len(program.ops)
    # Includes contractions that have to be written because a kernel can contain only one.
    taken = list(stored)
    reads: dict[int, set[int]] = {}  # last op of a kernel -> values it reads from memory
    joins = "multi-output-fusion" in profile.passes
    hosts = Hosts(program, alone="library-products" in profile.passes)
    scalars_free = "resident-kernels" in profile.passes
    cost, atomic = expansions(profile), "atomic-scatters" in profile.passes
    sizes = [it.bytes * wasted * part for it, wasted, part in zip(program.values, padded, parts, strict=True)]
    residency = loop_residency(program, stored, sizes, free, profile)
    widths = reuse_widths(program, stored, sizes, profile)
    for number, op in enumerate(program.ops):
        if op.name in (ARGUMENT, CARRY, RESULT) or op.kind.per_device or op.region is not None:
            continue
        if not any(stored[v] for v in op.results) or (scalars_free and is_scalar(program, op)):
            continue
        pending = [number]
        while pending:
            end = pending.pop()
            walk = _add(program, taken, free, end, found, _Walk(padded, parts, cost, atomic, residency, widths))
            reads[end] = {value for value, _ in walk.read}
            pending.extend(walk.others)
            joined = hosts.of(end, walk.read) if joins and walk.product < 0 else []
            if joined:
                also = _Walk(padded, parts, cost, atomic, residency, widths)
                _join(program, taken, free, end, found, hosts, joined, also)
            hosts.enter(joined[-1] if joined else walk.product if walk.product >= 0 else end, end, walk.read)
    if "reduction-fusion" in profile.passes:
        let_reductions_ride(program, found, reads, profile)
    if "normalization-fusion" in profile.passes:
        join_rows(program, found, reads, stored)
    return found


def _join(
    program: Program, taken: list[bool], free: tuple[bool, ...], end: int, found: list[Kernel | None], hosts: Hosts,
    joined: list[int], walk: _Walk,
) -> None:  # fmt: skip
    """Merges op `end` into the kernels `joined`: it does not read again what they hold."""
    walk.read.update(*(hosts.holds[kernel] for kernel in joined))
    op, host = program.ops[end], found[joined[-1]]
    operands = [_side(program, taken, free, op, position, walk) for position in range(len(op.operands))]
    results = [_written(program, taken, free, op, k, walk) for k in range(len(op.results))]
    if program.ops[joined[-1]].kind.matrix_unit and host is not None:
        found[end] = None
        _finish(program, op, host.results[0], operands, results, walk)
    else:
        found[end] = Kernel(operands, results, rides=True)


def _add(
    program: Program, taken: list[bool], free: tuple[bool, ...], number: int, found: list[Kernel | None], walk: _Walk
) -> _Walk:
    """Adds the kernel that writes the results of op `number`, or adds the op to the epilogue of a contraction."""
    op = program.ops[number]
    operands = [_side(program, taken, free, op, position, walk) for position in range(len(op.operands))]
    results = [_written(program, taken, free, op, k, walk) for k in range(len(op.results))]
    if walk.product < 0:
        found[number] = Kernel(operands, results)
        return walk
    product = program.ops[walk.product]
    known = found[walk.product]
    if known is None:
        ways_in = [_side(program, taken, free, product, position, walk) for position in range(len(product.operands))]
        known = found[walk.product] = Kernel(ways_in, [Side()], program.values[product.results[0]].bytes)
    _finish(program, op, known.results[0], operands, results, walk)
    return walk


def _finish(program: Program, op: Op, finish: Side, operands: list[Side], results: list[Side], walk: _Walk) -> None:
    """Adds an op's work to the epilogue of a contraction."""
    finish.bytes += sum(s.bytes for s in results)
    finish.elements += sum(s.elements for s in results)
    finish.flops += op_arithmetic(program, op, walk.cost, walk.atomic) * walk.padding[op.results[0]] + sum(
        s.flops for s in operands
    )
    finish.read += sum(s.bytes for s in operands)
    finish.passing += sum(s.passing for s in (*operands, *results))
    finish.given += sum(s.given for s in (*operands, *results))
    finish.widest = max([finish.widest, *(s.widest for s in (*operands, *results))])
    finish.staying += sum(s.staying for s in (*operands, *results))
    finish.beside = max([finish.beside, *(s.beside for s in (*operands, *results))])


def _side(program: Program, taken: list[bool], free: tuple[bool, ...], op: Op, position: int, walk: _Walk) -> Side:
    """Reads and fused arithmetic of one operand of an op."""
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
        side.flops += op_arithmetic(program, made, walk.cost, walk.atomic) * walk.padding[value]
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
    size = round(min(it.bytes, part.bytes) * padding * walk.parts[value])
    stays, beside = (0.0, 0.0) if takes else walk.residency.of_read(value, reader)
    size = round(size * stays) if stays else size
    side.bytes += size
    maker = program.ops[program.producer[value]].name
    if stays:
        side.staying, side.beside = side.staying + size, beside
    elif maker == ARGUMENT and not takes:
        side.given += size
    elif maker not in (ARGUMENT, CARRY):
        side.passing += size
        side.widest = max(side.widest, min(size, walk.widths[value]))
    elif takes and maker == CARRY:  # of a sequence, on the chip as a whole or not at all
        side.passing += size
        side.widest = max(side.widest, it.bytes * padding)
    elements = round(min(it.elements, part.elements) * padding)
    side.elements, side.largest = side.elements + elements, max(side.largest, elements)


def _written(program: Program, taken: list[bool], free: tuple[bool, ...], op: Op, k: int, walk: _Walk) -> Side:
    value = op.results[k]
    if not taken[value]:
        return Side()
    it = program.values[value]
    if op.kind.updates:
        update = program.values[op.operands[-1 if op.name == SCATTER else 1]]
        size, elements = min(it.bytes, update.bytes), min(it.elements, update.elements)
        if op.name == SCATTER:
            return Side(size + (scatter_start_bytes(program, op, free) if walk.atomic else 0), elements)
        return Side(size, elements, passing=size, widest=it.bytes * walk.padding[value])
    size = round(it.bytes * walk.padding[value] * walk.parts[value])
    elements = round(it.elements * walk.padding[value])
    stays, beside = walk.residency.of_yield(program, value)
    if stays:
        return Side(size, elements, staying=size, beside=beside)
    kept = any(program.ops[user].name == RESULT for user, _ in program.users[value])
    if kept:
        return Side(size, elements, given=size)
    return Side(size, elements, passing=size, widest=min(size, walk.widths[value]))


class Making(NamedTuple):
    """Work to compute an array from stored ones, in one kernel. flops: elementwise. read: bytes."""

    flops: float = 0.0
    read: float = 0.0


def making_whole(
    program: Program, stored: list[bool], free: tuple[bool, ...], profile: CompilerProfile, value: int
) -> Making | None:
    """Work to compute a value that is not stored; None if a product makes it, or each reader computes its own shard.

    XLA recomputes a fused array in each kernel that reads it, and only the part that the kernel needs: the slice that
    selects a device's shard moves up through the fusion. If kernels take different shards, or one takes a shard and
    another the whole array, no slice moves, and each device computes and writes the array in the sharding in which it
    is made (libtpu 0.0.42.1 for v5e and v4, `python benchmarks/unsliced.py`: two products that read a quarter of
    bf16[4,12,512,512] each take 133 us where they take different quarters, 92 where they take the same).

    Args:
        stored: [values] whether each is written. free: [values] derived from constants alone.
    """
    first = program.ops[program.producer[value]]
    if "unsliced-fusions" not in profile.passes or stored[value] or free[value] or first.kind.matrix_unit:
        return None
    cost, flops, read = expansions(profile), 0.0, 0.0
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
