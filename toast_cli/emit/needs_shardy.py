"""Finds ops that XLA cannot partition without Shardy, so that HLO text for it cannot hold them.

Enters: a `Source` and a `PartitionedProgram`. Raises `UsageError` for the first such op.
"""

from __future__ import annotations

from toast_cli import xla
from toast_cli.emit.shardy import check_manual_regions
from toast_cli.errors import UsageError
from toast_cli.frontend.nameless import region_axes
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.program.ops import RAGGED_DOT

REGION = "sdy.manual_computation"
# Collectives that crash it in partially manual regions ("sharding.IsManualSubgroup()").
NOT_OVER_SOME_AXES = ("stablehlo.all_gather", "stablehlo.all_to_all", "stablehlo.collective_broadcast")


def refuse_what_needs_shardy(source: Source, lowered: PartitionedProgram) -> None:
    """Refuses ragged dots and some collectives in partially manual regions, and nested manual regions."""
    check_manual_regions(source, lowered.axis_names, lowered.axis_sizes)
    for number, op in enumerate(source.program.ops):
        if op.region is None:
            continue
        operation, what = source.operations[number], ""
        some = set(region_axes(operation)) < set(lowered.axis_names)
        if some and xla.walk_ops(operation, RAGGED_DOT):
            what = "ragged_dot in a manual region (shard_map) over some axes"
        elif len(xla.walk_ops(operation, REGION)) > 1:
            what = "a manual region (shard_map) in another one (axis_index in a shard_map over some axes is one)"
        elif some and xla.walk_ops(operation, *NOT_OVER_SOME_AXES):
            what = "a manual region (shard_map) over some axes that gathers or exchanges by hand"
        if what:
            raise UsageError(
                f"{what} cannot be written as HLO text without Shardy",
                where=source.location(number),
                hint="write it with --format stablehlo or specs",
            )
