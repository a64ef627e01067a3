"""Writes the program of one device as HLO text, for XLA without Shardy.

In: a `Source` and a `PartitionedProgram`. Out: HLO text whose parameters and root are whole arrays with GSPMD's
shardings. `SPMDFullToShardShape` behind each parameter makes a device's shard of it, and `SPMDShardToFullShape` in
front of the root makes whole arrays of shards; everything in between is manual, on local shapes.
"""

from __future__ import annotations

from math import prod

from toast_cli import xla
from toast_cli.emit.annotate import annotate_boundary
from toast_cli.emit.dense_products import write_out_ragged
from toast_cli.emit.hlo import (
    ENTRANCE,
    EXIT,
    Boundary,
    GspmdNotation,
    bare_bytecode,
    flatten,
    refuse_shardy_only,
    with_host_memory,
    with_partitions,
)
from toast_cli.emit.spmd import manual_region, refuse_bound
from toast_cli.errors import ToastError
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.xla import ir, main_function


def emit_spmd_hlo(source: Source, lowered: PartitionedProgram) -> bytes:
    """The program of each device as HLO text.

    Raises `UsageError` for programs with manual regions of their own, with host callbacks, and with ops that only XLA
    with Shardy accepts.
    """
    refuse_bound(source)
    refuse_shardy_only(source, lowered)
    with source.module.context, ir.Location.unknown():
        module = source.module.operation.clone()
        function = main_function(module)
        region, in_shardings, out_shardings = manual_region(source, lowered, function)
        read = sum(bool(list(argument.uses)) for argument in region.regions[0].blocks[0].arguments)
        write_out_ragged(module)
        every_axis = frozenset(range(len(lowered.axis_sizes)))
        flatten(region, Boundary(in_shardings, out_shardings, every_axis), lowered.axis_sizes)
        notation = GspmdNotation(source, lowered.axis_sizes)
        annotate_boundary(function.operation, "arg_attrs", in_shardings, notation, [])
        annotate_boundary(function.operation, "res_attrs", out_shardings, notation, [])
        module.verify()
        text = xla.stablehlo_to_hlo_text(bare_bytecode(module))
    entrances, exits = text.count(f'"{ENTRANCE}"'), text.count(f'"{EXIT}"')
    if entrances > read or exits != len(out_shardings):  # XLA drops readers in branches that constants rule out
        raise ToastError(
            f"boundaries were lost on the way to HLO: {(entrances, exits)} of {(read, len(out_shardings))} are there",
            hint="write the program with --format spmd, and report this as a bug",
        )
    text = with_host_memory(with_partitions(text, prod(lowered.axis_sizes)), source)
    xla.hlo_text_to_proto(text)
    return text.encode()
