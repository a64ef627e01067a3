"""Writes the program of one device, on local shapes and with explicit collectives, so that no partitioner decides
anything.

In: a `Source` and a `PartitionedProgram`. Out: the bytes of a StableHLO file whose `main` is one manual region
over all mesh axes (`sdy.manual_computation`), with the plan's shardings at its boundary; JAX loads it like any sharded
program.

`writer` walks the program; `rules` has a local rule for each family of ops (others are computed replicated);
`alignment` derives the shardings of an op's arrays from its factors; `moves` writes reshards and reductions;
`completions` reads from the plan which collectives complete which value; `devices` computes replica groups; `deciding`
finds values that only determine trip counts.
"""

from __future__ import annotations

from math import prod
from typing import Any

from toast_cli.emit.annotate import PARTITIONS, REPLICAS, Undo, annotate_boundary
from toast_cli.emit.shardy import ShardyNotation, written
from toast_cli.emit.spmd.writer import Writer
from toast_cli.errors import UsageError
from toast_cli.frontend.effects import is_placed
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding
from toast_cli.program.ops import RNG
from toast_cli.xla import ir, main_function, terminator


def emit_spmd(source: Source, lowered: PartitionedProgram, *, binary: bool = False) -> bytes:
    """The program of each device as StableHLO text, or as MLIR bytecode.

    Raises `UsageError` for programs with manual regions of their own, and with host callbacks.
    """
    return written(spmd_module(source, lowered), binary=binary)


def spmd_module(source: Source, lowered: PartitionedProgram) -> Any:
    """The same as an operation `builtin.module` in the context of `source`."""
    refuse_bound(source)
    undo: Undo = []  # changes to a copy need no undo
    with source.module.context, ir.Location.unknown():
        module = source.module.operation.clone()
        notation = ShardyNotation(module, lowered.axis_names, lowered.axis_sizes)
        notation.prepare(module, undo)
        function = main_function(module)
        region, in_shardings, out_shardings = manual_region(source, lowered, function)
        for name, attribute in notation.region_attributes(in_shardings, out_shardings).items():
            region.attributes[name] = attribute
        annotate_boundary(function.operation, "arg_attrs", in_shardings, notation, undo)
        annotate_boundary(function.operation, "res_attrs", out_shardings, notation, undo)
        number = ir.IntegerType.get_signless(32)
        module.attributes[PARTITIONS] = ir.IntegerAttr.get(number, prod(lowered.axis_sizes))
        module.attributes[REPLICAS] = ir.IntegerAttr.get(number, 1)
        module.verify()
    return module


def refuse_bound(source: Source) -> None:
    """Raises `UsageError` for the first op that cannot be inside a region: a manual region, an op that runs on one
    device, or a random number generator, which would differ between devices."""
    for number, op in enumerate(source.program.ops):
        shard_map = op.name == "sdy.manual_computation"
        if shard_map or op.name == RNG or is_placed(source.operations[number]):
            placed = "what runs on one device (a host callback, an infeed, stablehlo.rng)"
            what = "manual regions of its own (shard_map)" if shard_map else placed
            raise UsageError(
                f"a program with {what} cannot be written as the program of one device",
                where=source.location(number),
                hint="write it with --format stablehlo or hlo",
            )


def manual_region(
    source: Source, lowered: PartitionedProgram, function: Any
) -> tuple[Any, tuple[Sharding, ...], tuple[Sharding, ...]]:
    """Moves the body of `function`, a copy of the entry function, into a region on local shapes; returns it with the
    shardings of arguments and results."""
    block = function.regions[0].blocks[0]
    kinds, locations = ([a.type for a in block.arguments], [a.location for a in block.arguments])
    entry = block.create_before(*kinds, arg_locs=locations)
    region = ir.Operation.create(
        "sdy.manual_computation",
        results=function.type.results,
        operands=list(entry.arguments),
        regions=1,
        loc=function.location,
        ip=ir.InsertionPoint(entry),
    )
    block.append_to(region.regions[0])
    last = terminator(block)
    ir.Operation.create("func.return", operands=list(region.results), loc=last.location, ip=ir.InsertionPoint(entry))
    original = main_function(source.module).regions[0].blocks[0]
    out_shardings = Writer(source, lowered, block).write(original, block)
    ir.Operation.create("sdy.return", operands=list(last.operands), loc=last.location, ip=ir.InsertionPoint(last))
    last.erase()
    return region, tuple(lowered.shardings[argument.value] for argument in source.program.arguments), out_shardings
