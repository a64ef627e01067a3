"""Drops collectives whose groups have one member, and lists the devices of groups that name mesh axes.

`shard_map` on one device, or over axes of size 1, leaves its collectives outside any manual region. Each of their
groups has one member, so they return their operands, and the partition id is 0. XLA's partitioner refuses all of them.
In: a module whose calls are inlined and whose manual regions are operations. Out: the same without those.
Collectives of several members stay, for `refuse_unpartitionable` to report.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toast_cli.errors import InputError
from toast_cli.frontend import attributes as foreign
from toast_cli.frontend.diagnostics import place_of
from toast_cli.frontend.effects import NUMBERS, REGION
from toast_cli.frontend.gspmd import MOST_DEVICES
from toast_cli.frontend.inline import replace_operation
from toast_cli.program.ops import kind_of
from toast_cli.xla import ir, operations_in, sdy, stablehlo
from toast_cli.xla.build import Builder

GROUPS, PAIRS, CHANNEL = "replica_groups", "source_target_pairs", "channel_handle"
PARTITIONS, REPLICAS = "mhlo.num_partitions", "mhlo.num_replicas"

MESH = "mesh"
# (product of the parts before it, its size) of a sub-axis.
PART = re.compile(r"\((\d+)\)(\d+)")


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
    return [one for one in operations_in(view, outside=REGION) if kind_of(one.name).per_device]


def values_alone(operation: Any, partitions: int, replicas: int) -> list[Any] | None:
    """The values that replace an operation's results; None if devices communicate or must know their number."""
    devices = partitions * replicas
    if operation.name in NUMBERS:
        return [zeros_for(operation)] if devices == 1 else None
    if PAIRS in operation.attributes:
        pairs = np.array(operation.attributes[PAIRS]).reshape(-1, 2)
        if not len(pairs):
            return [zeros_for(operation)]
        return list(operation.operands) if (pairs[:, 0] == pairs[:, 1]).all() and len(pairs) >= devices else None
    if members(operation, partitions, replicas) > 1:
        return None
    return list(operation.operands)[: len(operation.results)]  # without roots of a collective_reduce


def zeros_for(operation: Any) -> Any:
    """Zeros in place of an operation's result."""
    build, kind = Builder.before(operation), operation.results[0].type
    return build.broadcast(build.constant(0, str(kind.element_type)), tuple(kind.shape))


def members(operation: Any, partitions: int, replicas: int) -> int:
    """Size of the largest group of a collective. Without groups, all replicas form one. A collective with a channel and
    without global device ids includes every partition of the replicas in a group."""
    attributes = operation.attributes
    groups = np.array(attributes[GROUPS]) if GROUPS in attributes else np.zeros((0, 0))
    named = groups.shape[-1] if groups.size else replicas
    reduces = kind_of(operation.name).reduction or operation.name == "stablehlo.all_gather"
    across = CHANNEL in attributes and "use_global_device_ids" not in attributes and (reduces or not groups.size)
    return int(named * partitions if across else named)


def list_replica_groups(module: Any, path: str) -> None:
    """Writes replica groups that name mesh axes, as JAX 0.12 has them, as lists, which every version accepts. Raises
    `InputError` for unknown axes."""
    meshes = {
        op.attributes["sym_name"].value: sdy.MeshAttr(op.attributes[MESH])
        for op in (view.operation for view in module.body.operations)
        if op.name == "sdy.mesh"
    }

    for operation in operations_in(module):
        if GROUPS not in operation.attributes or not names_axes(operation.attributes[GROUPS]):
            continue
        try:
            rows = devices_along(stablehlo.ReplicaGroupMeshAxesAttr(operation.attributes[GROUPS]), meshes)
        except (KeyError, ValueError) as error:
            raise InputError(
                f"{operation.name}: {GROUPS} names axes that its mesh does not have: {error}",
                where=place_of(operation, path),
                hint="name the axes of the mesh, or list the devices of each group",
            ) from None
        operation.attributes[GROUPS] = ir.DenseElementsAttr.get(np.ascontiguousarray(rows), context=operation.context)


def names_axes(attribute: Any) -> bool:
    """True if replica groups are given by mesh axes; the oldest versions of jaxlib lack the class."""
    known = getattr(stablehlo, "ReplicaGroupMeshAxesAttr", None)
    return known is not None and bool(known.isinstance(attribute))


def devices_along(groups_attribute: Any, meshes: dict[str, Any]) -> NDArray[np.int64]:
    """[groups, devices of a group] device numbers."""
    if stablehlo.MeshAttr.isinstance(groups_attribute.mesh):
        mesh, axis_of = stablehlo.MeshAttr(groups_attribute.mesh), stablehlo.MeshAxisAttr
    else:
        mesh, axis_of = meshes[ir.FlatSymbolRefAttr(groups_attribute.mesh).value], sdy.MeshAxisAttr
    sizes = {axis.name: axis.size for axis in map(axis_of, mesh.axes)}
    wanted: list[tuple[str, int, int]] = []  # axis, from which stride to which
    for axis in map(stablehlo.AxisRefAttr, groups_attribute.axes):
        part = PART.search(str(axis.sub_axis_info))
        before, size = (int(part[1]), int(part[2])) if part else (1, sizes[axis.name])
        wanted.append((axis.name, before, before * size))
    pieces: list[tuple[str, int, int]] = []
    for name, size in sizes.items():
        cuts = sorted({1, size, *(cut for one, *ends in wanted if one == name for cut in ends)})
        pieces += [(name, low, high) for low, high in pairwise(cuts)]
    extents = [high // low for _, low, high in pieces]
    grouped = [pieces.index(one) for one in wanted if one[1] != one[2]]
    rest = [number for number in range(len(pieces)) if number not in grouped]
    count = int(np.prod([extents[number] for number in grouped]))  # 1 for no axes
    devices = np.array(mesh.device_ids or range(int(np.prod(extents))), np.int64)
    return devices.reshape(extents).transpose(rest + grouped).reshape(-1, count)
