"""What XLA without Shardy cannot partition, and HLO text for it therefore cannot hold.

Enters: a `Source` and a `PartitionedProgram`. Raises `UsageError` for the first such op.
"""

from __future__ import annotations

from math import prod

from toast_cli import xla
from toast_cli.emit.shardy import check_manual_regions
from toast_cli.errors import UsageError
from toast_cli.frontend.nameless import region_axes
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram

REGION, RAGGED_DOT = "sdy.manual_computation", "chlo.ragged_dot"
# Collectives at which it stops in regions over some axes ("sharding.IsManualSubgroup()").
NOT_OVER_SOME_AXES = ("stablehlo.all_gather", "stablehlo.all_to_all", "stablehlo.collective_broadcast")


def refuse_what_needs_shardy(source: Source, lowered: PartitionedProgram) -> None:
    """Products of ragged groups; manual regions in one another; some collectives in regions over some axes."""
    check_manual_regions(source, lowered.axis_names, lowered.axis_sizes)
    for number, op in enumerate(source.program.ops):
        if op.region is None and op.name != RAGGED_DOT:
            continue
        operation, what = source.operations[number], ""
        if op.name == RAGGED_DOT or xla.walk_ops(operation, RAGGED_DOT):
            what = "ragged_dot" if prod(lowered.axis_sizes) > 1 else ""
        elif len(xla.walk_ops(operation, REGION)) > 1:
            what = "a manual region (shard_map) in another one (axis_index in a shard_map over some axes is one)"
        elif set(region_axes(operation)) < set(lowered.axis_names) and xla.walk_ops(operation, *NOT_OVER_SOME_AXES):
            what = "a manual region (shard_map) over some axes that gathers or exchanges by hand"
        if what:
            raise UsageError(
                f"{what} cannot be written as HLO text without Shardy",
                where=source.location(number),
                hint="write it with --format stablehlo or specs",
            )
