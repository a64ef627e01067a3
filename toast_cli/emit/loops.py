"""Writes loops that carry partial sums as manual regions: annotations cannot defer a reduction to after the loop.

In: a `Source` and a `PartitionedProgram`. Out, inside a `with` block, both with every such loop in a region that
holds the loop on local shapes, its collectives, and those that reduce its results; after it the module is as before.
Operations in a region get no annotations. An array that is resharded ahead of the loop for other users as well, or
ahead of an outer loop, enters the region in that sharding: one collective serves all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from toast_cli.emit.annotate import Undo
from toast_cli.emit.shardy import ShardyNotation, replace_by_region
from toast_cli.emit.spmd.deciding import Deciding
from toast_cli.emit.spmd.devices import Piece
from toast_cli.emit.spmd.writer import Writer
from toast_cli.frontend.source import Source, Use
from toast_cli.plan.partitioned import Collective, PartitionedProgram
from toast_cli.plan.sharding import Sharding, local_shape, replicated
from toast_cli.program.model import Program
from toast_cli.program.ops import CARRY
from toast_cli.xla import ir, outer_operands
from toast_cli.xla.build import Builder

Edge = tuple[int, int]  # op number, operand position


@dataclass
class Regions:
    """The regions added to a module.

    Attributes:
        undo: steps that remove them again. behind: result of a region -> the program's value that it stands for.
        taken: a use in a loop -> where its region reads the array that is resharded outside of it, and its sharding.
    """

    undo: Undo = field(default_factory=list)
    behind: dict[Any, int] = field(default_factory=dict)
    taken: dict[Edge, tuple[Use, Sharding]] = field(default_factory=dict)


@contextmanager
def loops_in_regions(
    source: Source, lowered: PartitionedProgram
) -> Iterator[tuple[Source, PartitionedProgram, frozenset[int]]]:
    """The rewritten source and program, and the ops that are in regions."""
    numbers = carrying_loops(source, lowered)
    if not numbers:
        yield source, lowered, frozenset()
        return
    program, regions = source.program, Regions()
    definitions, operations, shardings = list(source.definitions), list(source.operations), list(lowered.shardings)
    inside = frozenset(op for loop in numbers for op in range(program.loops[loop].first, program.loops[loop].last))
    hidden = {value for op in inside for value in program.ops[op].results}
    try:
        with source.module.context, ir.Location.unknown():
            notation = ShardyNotation(source.module, lowered.axis_names, lowered.axis_sizes)
            notation.prepare(source.module, regions.undo)
            for loop in numbers:
                deciding = Deciding(replace(source, definitions=definitions, also=regions.behind))
                region, left = put_loop(source, lowered, loop, deciding, notation, regions)
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
                also=regions.behind,
                operations=operations,
                uses={use: place for use, place in source.uses.items() if use[0] not in inside}
                | {edge: (use.operation, use.operand) for edge, (use, _) in regions.taken.items()},
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
                }
                | {edge: sharding for edge, (_, sharding) in regions.taken.items()},
                found=lowered.found - gone,
            ),
            inside,
        )
    finally:
        for step in reversed(regions.undo):
            step()


def carrying_loops(source: Source, lowered: PartitionedProgram) -> list[int]:
    """Loops that carry partial sums and have no enclosing loop that does."""
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
    regions: Regions,
) -> tuple[Any, dict[int, tuple[Any, Sharding]]]:
    """Replaces a loop by a region; returns it, and the loop's results behind it: value -> result of the region,
    sharding."""
    program, sizes = source.program, lowered.axis_sizes
    number = next(
        n
        for n in range(program.loops[loop].first, len(program.ops))
        if (program.ops[n].name, program.ops[n].loop) == (CARRY, loop)
    )
    operation = source.use(number, 0).operation
    build = Builder(source.module.context)
    # The outside values that the loop reads: its initial values, and those that its regions capture.
    entering = list(dict.fromkeys(value for _, _, value in outer_operands([operation])))
    values = [deciding.value_of(handle) for handle in entering]
    in_shardings = [
        replicated(handle.type.rank) if value is None else lowered.shardings[value]
        for handle, value in zip(entering, values, strict=True)
    ]
    copies: list[Resharded | None] = [None] * len(entering)
    for moved in resharded_outside(program, lowered, loop):
        entering.append(entering[values.index(moved.value)])
        in_shardings.append(moved.sharding)
        copies.append(moved)
    kinds = [
        build.type(str(handle.type.element_type), local_shape(tuple(handle.type.shape), sharding, sizes))
        for handle, sharding in zip(entering, in_shardings, strict=True)
    ]
    holder = ir.Operation.create("sdy.manual_computation", regions=1, loc=operation.location)
    block = ir.Block.create_at_start(holder.regions[0], kinds, [operation.location] * len(kinds))
    copy = operation.clone(ip=ir.InsertionPoint(block)).operation
    writer = Writer(source, lowered, block, deciding)
    for handle, argument, sharding, each in zip(entering, block.arguments, in_shardings, copies, strict=True):
        if each is None:
            writer.enter(handle, deciding.value_of(handle), Piece(argument, sharding))
        else:
            writer.enter_resharded(each.value, Piece(argument, sharding), each.uses, each.by)
    read = [result for result in operation.results if list(result.uses)]
    pieces = writer.write_loop(operation, copy, read)
    ir.Operation.create(
        "sdy.return", operands=[piece.handle for piece in pieces], loc=operation.location, ip=ir.InsertionPoint(block)
    )
    for k in reversed(range(len(entering))):
        if not list(block.arguments[k].uses):  # the loop starts from local zeros instead
            block.erase_argument(k)
            del entering[k], in_shardings[k], copies[k]
    out_shardings = tuple(piece.sharding for piece in pieces)
    region = ir.Operation.create(
        "sdy.manual_computation", [result.type for result in read], entering,
        notation.region_attributes(tuple(in_shardings), out_shardings),
        regions=1, loc=operation.location, ip=ir.InsertionPoint(operation),
    )  # fmt: skip
    block.append_to(region.regions[0])
    regions.taken.update(
        {each.uses[0]: (Use(region, k), each.sharding) for k, each in enumerate(copies) if each is not None}
    )
    left: dict[int, tuple[Any, Sharding]] = {}
    for old, new, piece in zip(read, region.results, pieces, strict=True):
        value = deciding.value_of(old)
        if value is not None and program.ops[program.producer[value]].loop == loop:
            left[value] = new, piece.sharding
        if value is not None:
            regions.behind[new] = value
    replace_by_region(operation, read, region, regions.undo)
    return region, left


class Resharded(NamedTuple):
    """A copy of a value for some uses in a loop, resharded outside of the loop's region by these collectives."""

    value: int
    sharding: Sharding
    uses: tuple[Edge, ...]
    by: tuple[Collective, ...]


def resharded_outside(program: Program, lowered: PartitionedProgram, loop: int) -> list[Resharded]:
    """Copies that are made before an outer loop, or that others read as well."""
    inside = range(program.loops[loop].first, program.loops[loop].last)
    completing: dict[Edge, list[Collective]] = {}
    for one in lowered.collectives:
        if one.reason == "reshard" and one.edge == "before" and program.producer[one.value] not in inside:
            uses = [use for use in one.uses if use[0] in inside]
            if len(uses) < len(one.uses) or one.loop != program.loops[loop].parent:
                for use in uses:
                    completing.setdefault(use, []).append(one)
    found: dict[tuple[Collective, ...], list[Edge]] = {}
    for use, by in completing.items():
        found.setdefault(tuple(by), []).append(use)
    return [Resharded(by[-1].value, by[-1].after or (), tuple(uses), by) for by, uses in found.items()]
