"""Writes splits that XLA's partitioner gets wrong, or implements with other collectives, as manual regions.

Each was found by running every kind of op split along every dimension (`tests/test_partitioner.py`), with jaxlib
0.10.2:

* A convolution with batch groups (`batch_group_count`, the gradient of a grouped or depthwise convolution) that
  contracts a sharded dimension: the gradient of its kernel under data parallelism is wrong.
* A `select_and_scatter` (the gradient of a pooling) along a dimension where its windows overlap.
* A `dynamic_slice` whose result is sharded: XLA adds the starts of both slices, and does not clamp the first.
* A reduction over a sharded dimension with an initial value that is not neutral: every device starts with it. With a
  body that collectives do not support (xor), XLA fails.

Others have correct results but other collectives than planned:

* `top_k`, and a convolution with groups of several channels, however they are split: all operands are gathered, the
  batch included (a depthwise convolution has one channel in a group, and is split everywhere). XLA:TPU first rewrites
  both into ops that its partitioner can split, XLA:GPU `top_k` alone (8 of 4,096 and 2 of 64 on H100), XLA:CPU neither.
* A Fourier transform, however it is split: its operand is gathered, the batch included (XLA's fft_handler.cc splits
  only transforms along the sharded dimension, over all devices).
* A convolution with batch groups that are split over one axis, and the images of a group over another.
* A `dynamic_update_slice` of part of a sharded dimension: the whole array is gathered along it, unless the update is
  known to be within one shard (one row, or constant starts).
* A gather from a table with sharded rows, by sharded indices, if a mesh axis splits neither. XLA forms device groups
  over that axis instead of the table's, and sends the table there first.
* A hand-written kernel: XLA computes it whole on every device, so it is rewritten for local shapes.
* Sums of complex numbers over a sharded dimension, on XLA:TPU, which splits them into real ones and then gathers the
  padded, sliced and concatenated parts (a state-space model with complex states, data parallelism on 16 v5e: 252 MiB
  sent instead of 43). Not in HLO, where XLA without Shardy aborts on such a program with regions in it.

Ragged dots are in regions however they are split: XLA without Shardy cannot partition them, and with Shardy it gathers
rows and the sharded weights of groups. So are block-scaled dots (`jax.nn.scaled_matmul`), which are custom calls to
XLA.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from toast_cli.emit.regions.loops import ModuleOps, Writer
from toast_cli.emit.regions.moves import Devices, Mover, Piece
from toast_cli.emit.regions.rules import rule_of
from toast_cli.emit.regions.site import Site, align, starts_neutral
from toast_cli.emit.regions.values import Completions, completions
from toast_cli.emit.shardy import ShardyNotation, Undo, replace_by_region
from toast_cli.frontend.rules import convolution_dims
from toast_cli.frontend.source import Source, Use
from toast_cli.plan.partitioned import Collective, PartitionedProgram
from toast_cli.plan.sharding import Sharding, axes_of, local_shape, replicated, shards
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import (
    BLOCK_SCALED_DOT,
    CARRY,
    CONVOLUTION,
    CUSTOM_CALL,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    FFT,
    GATHER,
    RAGGED_DOT,
    REDUCE,
    SCATTER,
)
from toast_cli.xla import ir, outer_operands, splat_number
from toast_cli.xla.build import Builder


@contextmanager
def in_regions(
    source: Source, lowered: PartitionedProgram, *, sums_too: bool = True
) -> Iterator[tuple[Source, PartitionedProgram]]:
    """The rewritten source and program: every loop that carries partial sums is in a manual region, and every misread
    op is in one that also does its reductions. sums_too: also sums of complex numbers."""
    with Undo() as undo:
        source, lowered, inside = loops_in_regions(source, lowered, undo)
        numbers = {*misread_ops(source, lowered, inside), *gathered_ops(source, lowered, inside)}
        numbers.update(regrouped_lookups(source, lowered), complex_sums(source, lowered) if sums_too else ())
        numbers.update(number for number, op in enumerate(source.program.ops) if op.kind.name in _PRODUCTS)
        yield ops_in_regions(source, lowered, sorted(numbers - inside), undo)


def ops_in_regions(
    source: Source, lowered: PartitionedProgram, numbers: list[int], undo: Undo
) -> tuple[Source, PartitionedProgram]:
    """The rewritten source and program with these ops in manual regions, one for each."""
    if not numbers:
        return source, lowered
    results = {value for number in numbers for value in source.program.ops[number].results}
    lowered, steps = completions(source.program, lowered, results)
    definitions, operations = list(source.definitions), list(source.operations)
    computed, partial = dict(lowered.computed), dict(lowered.partial)
    with source.module.context, ir.Location.unknown():
        notation = ShardyNotation(source.module, lowered.axis_names, lowered.axis_sizes)
        notation.prepare(source.module, undo)
        for number in numbers:
            operation = operations[number] = put_region(source, lowered, number, steps, notation, undo)
            for k, value in enumerate(source.program.ops[number].results):
                definitions[value] = operation.results[k]
                computed.pop(value, None)
                partial.pop(value, None)
    source = replace(source, definitions=definitions, operations=operations)
    return source, replace(lowered, computed=computed, partial=partial)


def misread_ops(source: Source, lowered: PartitionedProgram, inside: frozenset[int] = frozenset()) -> list[int]:
    """Numbers of the ops whose sharding XLA partitions wrongly, except those in `inside`, which are in regions already,
    and those of empty arrays."""
    numbers = []
    for number, op in enumerate(source.program.ops):
        if op.name == DYNAMIC_SLICE and number not in inside and _cuts_slice(source, lowered, number, op):
            numbers.append(number)
        check = _CHECKS.get(op.name)
        if check is None or number in inside or not _has_elements(source, op):
            continue
        in_shardings, out_shardings = shardings_at(lowered, number, op)
        over = align(op.rule, in_shardings, out_shardings, lowered.axis_sizes).partial
        if check(op, source.operations[number], in_shardings, over):
            numbers.append(number)
    return numbers


def _cuts_slice(source: Source, lowered: PartitionedProgram, number: int, op: Op) -> bool:
    """True if some use shards a slice along a dimension of which it takes a part, with a computed start."""
    _, *starts = source.operations[number].operands
    (value,) = op.results
    shape, sizes = source.program.values[op.operands[0]].shape, source.program.values[value].shape
    partly = [1 < size < n for size, n in zip(sizes, shape, strict=True)]
    unknown = [part and splat_number(start) is None for part, start in zip(partly, starts, strict=True)]
    uses = (lowered.required.get(use) for use in source.program.users[value])
    return any(axes and far for use in uses if use for axes, far in zip(use, unknown, strict=True))


def gathered_ops(source: Source, lowered: PartitionedProgram, inside: frozenset[int] = frozenset()) -> list[int]:
    """Numbers of the sharded ops for which XLA's partitioner gathers all operands, unless the compiler rewrites them
    first; those in `inside` are in regions already."""
    return [
        number
        for number, op in enumerate(source.program.ops)
        if op.name in _GATHERED
        and number not in inside
        and any(map(axes_of, itertools.chain(*shardings_at(lowered, number, op))))
        and _GATHERED[op.name](op, source.operations[number], shardings_at(lowered, number, op)[0], lowered.axis_sizes)
    ]


def regrouped_lookups(source: Source, lowered: PartitionedProgram) -> list[int]:
    """Numbers of the gathers and scatters for which XLA would first move the table to other device groups, except those
    that are added up before they are reduced."""
    numbers, busy = [], {axis for axis, size in enumerate(lowered.axis_sizes) if size > 1}
    for number, op in enumerate(source.program.ops):
        if op.name not in (GATHER, SCATTER) or op.results[0] in lowered.added:
            continue
        in_shardings, out_shardings = shardings_at(lowered, number, op)
        others = out_shardings[0] if op.name == GATHER else in_shardings[2]
        rows, indices = axes_of(in_shardings[0]) - axes_of(others), axes_of(in_shardings[1])
        if rows and indices and busy - axes_of(in_shardings[0]) - indices - axes_of(others):
            numbers.append(number)
    return numbers


def complex_sums(source: Source, lowered: PartitionedProgram) -> list[int]:
    """Numbers of the sums of complex numbers over a split dimension."""
    numbers = []
    for number, op in enumerate(source.program.ops):
        if op.name == REDUCE and source.program.values[op.results[0]].dtype.startswith("complex"):
            in_shardings, out_shardings = shardings_at(lowered, number, op)
            if align(op.rule, in_shardings, out_shardings, lowered.axis_sizes).partial and _has_elements(source, op):
                numbers.append(number)
    return numbers


def _has_elements(source: Source, op: Op) -> bool:
    return prod(source.program.values[op.results[0]].shape) > 0


def misread_note(source: Source, lowered: PartitionedProgram) -> str:
    """A note on writing the plan in a form that cannot hold regions; empty if nothing is wrong."""
    wrong, gathered = misread_ops(source, lowered), gathered_ops(source, lowered)
    parts = []
    if gathered:
        gathers = f"XLA's partitioner gathers all that {places(source, gathered)} reads, though the plan splits it"
        ops = [source.program.ops[number] for number in gathered]
        rewritten = any(op.name not in (DYNAMIC_UPDATE_SLICE, FFT) and op.kernel is None for op in ops)
        parts.append(f"{gathers}, unless the compiler rewrites it first, as XLA:TPU does" if rewritten else gathers)
    if wrong:
        parts.append(
            f"XLA's partitioner gets wrong numbers for {places(source, wrong)} if it splits it as the plan does"
        )
    return "; ".join(parts)


def places(source: Source, numbers: list[int]) -> str:
    """Source location of the first of some ops, and how many more there are."""
    more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    return f"{source.location(numbers[0])}{more}"


def shardings_at(lowered: PartitionedProgram, number: int, op: Op) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]]:
    """Shardings of an op's operands where it reads them, and of its results where it computes them."""
    in_shardings = tuple(lowered.required.get((number, k), lowered.shardings[v]) for k, v in enumerate(op.operands))
    return in_shardings, tuple(lowered.computed.get(v, lowered.shardings[v]) for v in op.results)


def put_region(
    source: Source,
    lowered: PartitionedProgram,
    number: int,
    steps: Completions,
    notation: ShardyNotation,
    undo: Undo,
) -> Any:
    """Replaces an operation by a region; returns it. steps: collectives that complete some values."""
    program, sizes = source.program, lowered.axis_sizes
    op, operation = program.ops[number], source.operations[number]
    in_shardings, computed = shardings_at(lowered, number, op)
    out_shardings = tuple(lowered.shardings[value] for value in op.results)
    region = ir.Operation.create(
        "sdy.manual_computation", [result.type for result in operation.results], list(operation.operands),
        notation.region_attributes(in_shardings, out_shardings),
        regions=1, loc=operation.location, ip=ir.InsertionPoint(operation),
    )  # fmt: skip
    build = Builder(source.module.context)
    arrays = [program.values[value] for value in op.operands]
    kinds = [build.type(a.dtype, local_shape(a.shape, s, sizes)) for a, s in zip(arrays, in_shardings, strict=True)]
    block = ir.Block.create_at_start(region.regions[0], kinds, [operation.location] * len(kinds))
    inside = operation.clone(ip=ir.InsertionPoint(block)).operation
    devices = Devices(build, sizes, inside)
    mover = Mover(build, devices)
    pieces = [
        Piece(_made_inside(operand, argument, block), sharding)
        for operand, argument, sharding in zip(operation.operands, block.arguments, in_shardings, strict=True)
    ]
    with build.at(ir.InsertionPoint(inside), operation.location):
        results = rule_of(op.kind)(Site(program, op, inside, pieces, computed, build, devices, mover))
    with build.at(ir.InsertionPoint(block), operation.location):
        handles = []
        for value, piece, target in zip(op.results, results, out_shardings, strict=True):
            reduced = mover.all_reduced(mover.reduce(piece, steps.get(value, ())))
            handles.append(mover.to(reduced, target, program.values[value].shape).handle)
        ir.Operation.create("sdy.return", operands=handles, loc=operation.location, ip=build.ip)
    replace_by_region(operation, list(operation.results), region, undo)
    return region


def _made_inside(operand: Any, argument: Any, block: Any) -> Any:
    """A scalar constant is copied into the region, so that its value is known there; others are
    passed as the argument."""
    if isinstance(operand, ir.BlockArgument) or operand.owner.name != "stablehlo.constant" or operand.type.rank:
        return argument
    return operand.owner.operation.clone(ip=ir.InsertionPoint.at_block_begin(block)).results[0]


def _in_groups(op: Op, operation: Any, in_shardings: tuple[Sharding, ...], sizes: tuple[int, ...]) -> bool:
    """True if a convolution has feature groups of several channels, or if its batch groups are themselves sharded."""
    image, kernel, _ = convolution_dims(operation)
    features, images = (int(operation.attributes[f"{of}_group_count"].value) for of in ("feature", "batch"))
    several = ir.RankedTensorType(operation.operands[1].type).shape[kernel.index("i")] > 1
    within = set(in_shardings[0][image.index("b")]) - set(in_shardings[1][kernel.index("o")])
    return bool((features > 1 and several) or (images > 1 and within))


def _updates_several_pieces(op: Op, operation: Any, in_shardings: tuple[Sharding, ...], sizes: tuple[int, ...]) -> bool:
    """True if an update may touch the shards of several devices without replacing them whole."""
    array, update, *starts = operation.operands
    for axes, size, part, start in zip(in_shardings[0], array.type.shape, update.type.shape, starts, strict=True):
        if axes and 1 < part < size:
            piece, first = size // shards((axes,), sizes), splat_number(start)
            if first is None or first // piece != (first + part - 1) // piece:
                return True
    return False


# Op -> predicate: XLA gathers the operands of the sharded op, unless it rewrites it first. Takes the op, the operation,
# its operands' shardings and the mesh's axis sizes.
_GATHERED: dict[str, Callable[[Op, Any, tuple[Sharding, ...], tuple[int, ...]], bool]] = {
    CONVOLUTION: _in_groups,
    DYNAMIC_UPDATE_SLICE: _updates_several_pieces,
    "chlo.top_k": lambda op, *_: True,
    FFT: lambda op, *_: True,
    CUSTOM_CALL: lambda op, *_: op.kernel is not None or op.detail in ("TopK", "mhlo.topk"),
}
_PRODUCTS = (RAGGED_DOT, BLOCK_SCALED_DOT)
_Check = Callable[[Op, Any, tuple[Sharding, ...], tuple[int, ...]], bool]
# Op -> predicate: XLA partitions the op wrongly. Takes op, operation, operands' shardings, axes it is partial over.
_CHECKS: dict[str, _Check] = {
    CONVOLUTION: lambda _, operation, __, over: bool(over) and int(operation.attributes["batch_group_count"].value) > 1,
    "stablehlo.select_and_scatter": lambda op, _, in_shardings, __: any(
        window.size > window.stride and in_shardings[0][window.operand_dim] for window in op.windows
    ),
    REDUCE: lambda op, operation, _, over: bool(over) and len(op.results) == 1 and not starts_neutral(operation),
}


# ---------------------------------------------------------------- loops that carry partial sums
# Writes loops that carry partial sums as manual regions: annotations cannot defer a reduction to after the loop.
#
# Every such loop is put in a region that holds the loop on local shapes, its collectives, and those that reduce its
# results. Operations in a region get no annotations. An array that is resharded ahead of the loop for other users as
# well, or ahead of an outer loop, enters the region in that sharding: one collective serves all.

Edge = tuple[int, int]  # op number, operand position


@dataclass
class Regions:
    """The regions added to a module.

    Attributes:
        undo: removes them again. behind: result of a region -> the program's value that it stands for.
        resharded: a use in a loop -> where its region reads the array, resharded outside of it, and its sharding.
    """

    undo: Undo
    behind: dict[Any, int] = field(default_factory=dict)
    resharded: dict[Edge, tuple[Use, Sharding]] = field(default_factory=dict)


def loops_in_regions(
    source: Source, lowered: PartitionedProgram, undo: Undo
) -> tuple[Source, PartitionedProgram, frozenset[int]]:
    """The rewritten source and program, and the ops that are in regions."""
    numbers = carrying_loops(source, lowered)
    if not numbers:
        return source, lowered, frozenset()
    program, regions = source.program, Regions(undo)
    definitions, operations, shardings = list(source.definitions), list(source.operations), list(lowered.shardings)
    inside = frozenset(op for loop in numbers for op in range(program.loops[loop].first, program.loops[loop].last))
    made_inside = {value for op in inside for value in program.ops[op].results}
    hidden = set(made_inside)
    with source.module.context, ir.Location.unknown():
        notation = ShardyNotation(source.module, lowered.axis_names, lowered.axis_sizes)
        notation.prepare(source.module, undo)
        for loop in numbers:
            module_ops = ModuleOps(replace(source, definitions=definitions, also=regions.behind))
            region, left = put_loop(source, lowered, loop, module_ops, notation, regions)
            for value, (result, sharding) in left.items():
                hidden.discard(value)
                definitions[value], shardings[value] = result, sharding
            for op in range(program.loops[loop].first, program.loops[loop].last):
                operations[op] = region
    for value in hidden:
        shardings[value] = ()
    return (
        replace(
            source,
            definitions=definitions,
            also=regions.behind,
            operations=operations,
            uses={use: place for use, place in source.uses.items() if use[0] not in inside}
            | {edge: (use.operation, use.operand) for edge, (use, _) in regions.resharded.items()},
        ),
        replace(
            lowered,
            shardings=shardings,
            computed={value: s for value, s in lowered.computed.items() if value not in made_inside},
            partial={value: axes for value, axes in lowered.partial.items() if value not in made_inside},
            required={
                use: sharding
                for use, sharding in lowered.required.items()
                if use[0] not in inside and shardings[program.ops[use[0]].operands[use[1]]] != sharding
            }
            | {edge: sharding for edge, (_, sharding) in regions.resharded.items()},
            by_partitioner=lowered.by_partitioner - made_inside,
        ),
        inside,
    )


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
    module_ops: ModuleOps,
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
    values = [module_ops.value_of(handle) for handle in entering]
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
    writer = Writer(source, lowered, block, module_ops)
    for handle, argument, sharding, each in zip(entering, block.arguments, in_shardings, copies, strict=True):
        if each is None:
            writer.enter(handle, module_ops.value_of(handle), Piece(argument, sharding))
        else:
            writer.values.enter_resharded(each.value, Piece(argument, sharding), each.uses, each.by)
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
    regions.resharded.update(
        {each.uses[0]: (Use(region, k), each.sharding) for k, each in enumerate(copies) if each is not None}
    )
    left: dict[int, tuple[Any, Sharding]] = {}
    for old, new, piece in zip(read, region.results, pieces, strict=True):
        value = module_ops.value_of(old)
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
    for collective in lowered.collectives:
        if (
            collective.reason == "reshard"
            and collective.edge == "before"
            and program.producer[collective.value] not in inside
        ):
            uses = [use for use in collective.uses if use[0] in inside]
            if len(uses) < len(collective.uses) or collective.loop != program.loops[loop].parent:
                for use in uses:
                    completing.setdefault(use, []).append(collective)
    uses_of: dict[tuple[Collective, ...], list[Edge]] = {}
    for use, by in completing.items():
        uses_of.setdefault(tuple(by), []).append(use)
    return [Resharded(by[-1].value, by[-1].after or (), tuple(uses), by) for by, uses in uses_of.items()]
