"""Chooses the shardings of HLO text: constraints behind every value and at the start of branches.

In: a `Source` and a `PartitionedProgram`. Out: `Annotations`, which `hlo` writes as `Sharding` custom calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from toast_cli import xla
from toast_cli.emit.annotations import Annotations, full_annotations
from toast_cli.emit.reshards import Reshard
from toast_cli.frontend.branches import CONDITIONALS
from toast_cli.frontend.source import Source, Use
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import axes_of
from toast_cli.program.rematerialised import remade_values
from toast_cli.program.transposed import transposed


def hlo_annotations(source: Source, lowered: PartitionedProgram) -> Annotations:
    """A constraint on every value: GSPMD's propagation goes further than Shardy's, so fewer do not give the plan.

    Products that are scattered over some axes and reduced over others are computed in their final sharding if the
    partitioner finds the collectives by itself: given the computed sharding, it all-reduces over all axes. Values that
    are recomputed for each use have a sharding of their own: the conversion to HLO merges equal constants, and GSPMD
    would propagate shardings from the readers of one to those of the other.
    """
    computed = {
        value: sharding
        for value, sharding in lowered.computed.items()
        if value not in lowered.found
        or axes_of(lowered.shardings[value]) - axes_of(sharding) >= {*lowered.partial.get(value, ())}
    }
    program, remade = source.program, remade_values(source.program)
    recomputed = tuple(
        (handle.owner.operation, sharding)
        for value, (handle, sharding) in enumerate(zip(source.definitions, lowered.shardings, strict=True))
        if remade[value] and sharding and program.producer[value] >= 0
    )
    found = full_annotations(source, replace(lowered, computed=computed))
    constraints = tuple(one for one in found.constraints if not is_folded(source, lowered, one.handle))
    entrances = tuple(branch_entrances(source, lowered))
    return replace(found, constraints=constraints, recomputed=recomputed, reshards=(*entrances, *found.reshards))


def branch_entrances(source: Source, lowered: PartitionedProgram) -> Iterator[Reshard]:
    """A constraint at the start of each branch on every array from outside: in HLO they are the arguments of a
    computation, and GSPMD would propagate the sharding that a reader in one branch needs to all of them."""
    remade = remade_values(source.program)
    for conditional in xla.walk_ops(source.module, *CONDITIONALS):
        for region in conditional.regions:
            body = [view.operation for view in region.blocks[0].operations]
            reads: dict[int, list[Use]] = {}
            for operation, operand, handle in xla.outer_operands(body):
                value = source.numbers.get(handle)
                if value is not None and lowered.shardings[value] and not remade[value]:
                    reads.setdefault(value, []).append(Use(operation, operand))
            for value, uses in reads.items():
                sharding = lowered.shardings[value]
                yield Reshard(value, sharding, sharding, body[0], uses[0], tuple(uses), ())


def is_folded(source: Source, lowered: PartitionedProgram, handle: Any) -> bool:
    """True if only a transpose reads a value: XLA:TPU folds it into the product that makes the value, unless a
    constraint is in between. The one behind the transpose suffices."""
    value = source.numbers.get(handle)
    if value is None:
        return False
    behind = transposed(source.program, value)
    return behind is not None and (behind.op, 0) not in lowered.required and len(lowered.path(value)) == 1
