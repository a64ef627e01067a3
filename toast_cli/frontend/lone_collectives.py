"""Drops collectives whose groups have one member.

`shard_map` on one device, or over axes of size 1, leaves its collectives outside any manual region. Each of their
groups has one member, so they return their operands, and the partition id is 0. XLA's partitioner refuses all of them.
Enters: a module whose calls are inlined and whose manual regions are operations. Leaves: the same without those.
Collectives of several members stay, for `refuse_unpartitionable` to report.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from toast_cli.errors import InputError
from toast_cli.frontend import attributes as foreign
from toast_cli.frontend.diagnostics import place_of
from toast_cli.frontend.effects import NUMBERS, REGION
from toast_cli.frontend.gspmd import MOST_DEVICES
from toast_cli.frontend.inline import replace_operation
from toast_cli.program.ops import kind_of
from toast_cli.xla import ADVANCE, SKIP, ir

GROUPS, PAIRS, CHANNEL = "replica_groups", "source_target_pairs", "channel_handle"
PARTITIONS, REPLICAS = "mhlo.num_partitions", "mhlo.num_replicas"


def drop_lone_collectives(module: Any, path: str) -> None:
    """Replaces each such collective by its operands, or by zeros if no device sends anything."""
    found = collectives_outside(module)
    if not found:
        return
    partitions, replicas = (
        foreign.integer(module.operation.attributes, name, lambda: path, least=0, most=MOST_DEVICES) or 1
        for name in (PARTITIONS, REPLICAS)
    )
    with module.context:
        for operation in found:
            values = values_alone(operation, partitions, replicas)
            if values is None:
                continue
            if [value.type for value in values] != [result.type for result in operation.results]:
                what = f"{operation.name} among groups of one device changes the shape of what it is given"
                raise InputError(what, where=place_of(operation, path), hint="is the file intact?")
            replace_operation(operation, values)


def collectives_outside(view: Any) -> list[Any]:
    """Collectives and partition ids outside manual regions.

    Args:
        view: a module or function.
    """
    found: list[Any] = []

    def visit(operation: Any) -> Any:
        if kind_of(operation.name).per_device:
            found.append(operation)
        return SKIP if operation.name == REGION else ADVANCE

    view.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


def values_alone(operation: Any, partitions: int, replicas: int) -> list[Any] | None:
    """The values that replace an operation's results; None if devices communicate or must know their number."""
    devices = partitions * replicas
    if operation.name in NUMBERS:
        return zeros(operation) if devices == 1 else None
    if PAIRS in operation.attributes:
        pairs = np.array(operation.attributes[PAIRS]).reshape(-1, 2)
        if not len(pairs):
            return zeros(operation)
        return list(operation.operands) if (pairs[:, 0] == pairs[:, 1]).all() and len(pairs) >= devices else None
    if members(operation, partitions, replicas) > 1:
        return None
    return list(operation.operands)[: len(operation.results)]  # without roots of a collective_reduce


def members(operation: Any, partitions: int, replicas: int) -> int:
    """Size of the largest group of a collective. Without groups, all replicas form one. A collective with a channel and
    without global device ids includes every partition of the replicas in a group."""
    attributes = operation.attributes
    groups = np.array(attributes[GROUPS]) if GROUPS in attributes else np.zeros((0, 0))
    named = groups.shape[-1] if groups.size else replicas
    reduces = kind_of(operation.name).reduction or operation.name == "stablehlo.all_gather"
    across = CHANNEL in attributes and "use_global_device_ids" not in attributes and (reduces or not groups.size)
    return int(named * partitions if across else named)


def zeros(operation: Any) -> list[Any]:
    """Zeros of the type of the operation's one result."""
    kind = operation.results[0].type
    with operation.location, ir.InsertionPoint(operation):
        scalar = ir.RankedTensorType.get([], kind.element_type)
        zero = ir.Operation.create(
            "stablehlo.constant", [scalar], attributes={"value": ir.Attribute.parse(f"dense<{_zero(kind)}> : {scalar}")}
        )
        spread = ir.Operation.create(
            "stablehlo.broadcast_in_dim",
            [kind],
            [zero.results[0]],
            {"broadcast_dimensions": ir.DenseI64ArrayAttr.get([])},
        )
    return [spread.results[0]]


def _zero(kind: Any) -> str:
    element = kind.element_type
    if isinstance(element, ir.ComplexType):
        return "(0.0, 0.0)"
    if isinstance(element, ir.IntegerType):
        return "false" if element.width == 1 else "0"
    return "0.0"
