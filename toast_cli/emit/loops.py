"""Loops that carry partial sums, written as manual regions: annotations cannot say that a sum is reduced behind a loop.

Enters: a `Source` and a `PartitionedProgram`. Leaves, inside a `with` block, both with every such loop in a region that
holds the loop on local shapes, its collectives, and those that reduce what it results in; after it the module is what
it was before. What is inside a region is no longer anybody's to annotate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from toast_cli.emit.annotate import Undo
from toast_cli.emit.shardy import ShardyNotation, quoted
from toast_cli.emit.spmd.build import Builder
from toast_cli.emit.spmd.deciding import Deciding
from toast_cli.emit.spmd.piece import Piece, local_shape
from toast_cli.emit.spmd.writer import Writer
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding, replicated
from toast_cli.program.model import Op
from toast_cli.program.ops import CARRY
from toast_cli.xla import ADVANCE, ir


@contextmanager
def loops_in_regions(
    source: Source, lowered: PartitionedProgram
) -> Iterator[tuple[Source, PartitionedProgram, frozenset[int]]]:
    """Both, and the ops that are in regions."""
    numbers = carrying_loops(source, lowered)
    if not numbers:
        yield source, lowered, frozenset()
        return
    undo: Undo = []
    program = source.program
    behind: dict[Any, int] = {}  # results of regions that are values of the program
    definitions, operations, shardings = list(source.definitions), list(source.operations), list(lowered.shardings)
    inside = frozenset(op for loop in numbers for op in range(program.loops[loop].first, program.loops[loop].last))
    hidden = {value for op in inside for value in program.ops[op].results}
    try:
        with source.module.context, ir.Location.unknown():
            notation = ShardyNotation(source.module, lowered.axis_names, lowered.axis_sizes)
            notation.prepare(source.module, undo)
            for loop in numbers:
                deciding = Deciding(replace(source, definitions=definitions), behind)
                region, left = put_loop(source, lowered, loop, deciding, notation, undo, behind)
                for value, (result, sharding) in left.items():
                    hidden.discard(value)
                    definitions[value], shardings[value] = result, sharding
                for op in range(program.loops[loop].first, program.loops[loop].last):
                    operations[op] = region
        for value in hidden:
            shardings[value] = ()
        gone = {*hidden, *(value for op in inside for value in program.ops[op].results)}
        yield (
            replace(
                source,
                definitions=definitions,
                operations=operations,
                uses={use: place for use, place in source.uses.items() if use[0] not in inside},
            ),
            replace(
                lowered,
                shardings=shardings,
                computed={value: at for value, at in lowered.computed.items() if value not in gone},
                partial={value: axes for value, axes in lowered.partial.items() if value not in gone},
                required={
                    use: sharding
                    for use, sharding in lowered.required.items()
                    if use[0] not in inside and shardings[program.ops[use[0]].operands[use[1]]] != sharding
                },
                found=lowered.found - gone,
            ),
            inside,
        )
    finally:
        for step in reversed(undo):
            step()


def carrying_loops(source: Source, lowered: PartitionedProgram) -> list[int]:
    """Loops that carry partial sums and are in none that does."""
    program = source.program
    carrying = {program.ops[number].loop for number in lowered.carried}

    def within(loop: int) -> Iterator[int]:
        while (loop := program.loops[loop].parent) >= 0:
            yield loop

    return sorted(loop for loop in carrying if carrying.isdisjoint(within(loop)))


def put_loop(
    source: Source,
    lowered: PartitionedProgram,
    loop: int,
    deciding: Deciding,
    notation: ShardyNotation,
    undo: Undo,
    behind: dict[Any, int],
) -> tuple[Any, dict[int, tuple[Any, Sharding]]]:
    """Puts a region in the place of a loop; returns it, and how what the loop carries lies behind it: value -> result
    of the region, sharding. `behind` learns which values of the program the region's results are."""
    program, sizes = source.program, lowered.axis_sizes
    number = next(n for n in range(program.loops[loop].first, len(program.ops)) if is_carry(program.ops[n], loop))
    operation = source.use(number, 0).operation
    build = Builder(source.module.context)
    entering = entering_values(operation)
    values = [deciding.value_of(handle) for handle in entering]
    ways_in = [
        replicated(handle.type.rank) if value is None else lowered.shardings[value]
        for handle, value in zip(entering, values, strict=True)
    ]
    kinds = [
        build.type(str(handle.type.element_type), local_shape(tuple(handle.type.shape), sharding, sizes))
        for handle, sharding in zip(entering, ways_in, strict=True)
    ]
    holder = ir.Operation.create("sdy.manual_computation", regions=1, loc=operation.location)
    block = ir.Block.create_at_start(holder.regions[0], kinds, [operation.location] * len(kinds))
    copy = operation.clone(ip=ir.InsertionPoint(block)).operation
    writer = Writer(source, lowered, block, deciding)
    for handle, value, argument, sharding in zip(entering, values, block.arguments, ways_in, strict=True):
        writer.enter(handle, value, Piece(argument, sharding))
    read = [result for result in operation.results if list(result.uses)]
    pieces = writer.write_loop(operation, copy, read)
    ir.Operation.create(
        "sdy.return", operands=[piece.handle for piece in pieces], loc=operation.location, ip=ir.InsertionPoint(block)
    )
    for k in reversed(range(len(entering))):
        if not list(block.arguments[k].uses):  # what a loop starts with where it starts with nothing
            block.erase_argument(k)
            del entering[k], ways_in[k]
    axes = ", ".join(map(quoted, lowered.axis_names))
    region = ir.Operation.create(
        "sdy.manual_computation",
        results=[result.type for result in read],
        operands=entering,
        attributes={
            "in_shardings": notation.of_operation(tuple(ways_in)),
            "out_shardings": notation.of_operation(tuple(piece.sharding for piece in pieces)),
            "manual_axes": ir.Attribute.parse(f"#sdy<manual_axes{{{axes}}}>"),
        },
        regions=1,
        loc=operation.location,
        ip=ir.InsertionPoint(operation),
    )
    block.append_to(region.regions[0])
    left: dict[int, tuple[Any, Sharding]] = {}
    for old, new, piece in zip(read, region.results, pieces, strict=True):
        value = deciding.value_of(old)
        if value is not None and program.ops[program.producer[value]].loop == loop:
            left[value] = new, piece.sharding
        old.replace_all_uses_with(new)
        if value is not None:
            behind[new] = value
    operation.detach_from_parent()

    def put_back() -> None:
        ir.InsertionPoint(region).insert(operation)
        for old, new in zip(read, region.results, strict=True):
            new.replace_all_uses_with(old)
        region.erase()

    undo.append(put_back)
    return region, left


def is_carry(op: Op, loop: int) -> bool:
    """Whether it is a carry of that loop."""
    return op.name == CARRY and op.loop == loop


def entering_values(operation: Any) -> list[Any]:
    """What a loop reads from outside, each value once: what it starts with, and what its regions reach for."""
    found: dict[Any, None] = dict.fromkeys(operation.operands)
    own: set[Any] = set()

    def visit(inner: Any) -> Any:
        for region in inner.regions:
            for block in region.blocks:
                own.update(block.arguments)
        own.update(inner.results)
        for operand in inner.operands:
            if operand not in own:
                found.setdefault(operand)
        return ADVANCE

    operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return list(found)
