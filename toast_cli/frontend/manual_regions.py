"""Manual regions (`shard_map`) as one operation each, rebuilt from Shardy's custom calls in HLO; collectives outside
any region whose groups have one member are dropped.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toast_cli.base.errors import InputError
from toast_cli.frontend import attributes as foreign
from toast_cli.frontend.attributes import NUMBERS, place_of
from toast_cli.frontend.inline import callee_name, replace_operation
from toast_cli.frontend.shardings import (
    MOST_DEVICES,
    PARTITIONS,
    called_name,
    frontend_texts,
    meshes_of,
)
from toast_cli.program.ops import MANUAL_REGION, kind_of
from toast_cli.xla import attributes_of, declare_mesh, ir, operations_in, run_passes, sdy, stablehlo, walk_ops
from toast_cli.xla.build import Builder

# ---------------------------------------------------------------- Shardy's form in HLO
# Rebuilds manual regions (`shard_map`) of an HLO program, each as one operation.
#
# HLO has no operation for them. Shardy writes a region as a custom call `xla.sdy.GlobalToLocalShape`, a call of the
# body, and a custom call `xla.sdy.LocalToGlobalShape`; meshes and shardings are texts in frontend attributes. Out:
# `sdy.manual_computation` around a call of the same body, and `sdy.mesh`.

BODY_PREFIXES = ("xla.sdy.manual_computation_body", "xla.sdy.inlinable_manual_computation_body")
GLOBAL_TO_LOCAL, LOCAL_TO_GLOBAL = "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"
MESHES = "xla.sdy.meshes"
BOUNDARY = ("in_shardings", "out_shardings")
# The propagation passes of Shardy's pipeline.
PROPAGATION = (
    "sdy-add-data-flow-edges,sdy-apply-sharding-constraints,sdy-user-priority-propagate,"
    "func.func(sdy-sink-data-flow-edges)"
)


def restore_manual_regions(module: Any, path: str) -> None:
    """Rebuilds every manual region, after tuples are flattened and before calls are inlined."""
    with module.context, ir.Location.unknown():
        declare_meshes(module, path)
        for call in walk_ops(module, "func.call"):
            if callee_name(call).startswith(BODY_PREFIXES):
                restore_region(call, path)


def declare_meshes(module: Any, path: str) -> None:
    """Declares `sdy.mesh` operations for the meshes that a converted HLO module has as text."""
    place = partial(str, path)
    texts, declared = frontend_texts(attributes_of(module.operation), place), meshes_of(module)
    if MESHES not in texts:
        return
    for item in foreign.parsed(texts[MESHES], MESHES, ir.DictAttr, place):
        mesh = foreign.of_kind(item.attr, MESHES, sdy.MeshAttr, place)
        if item.name not in declared:  # jaxlib 0.12 already declares them
            declare_mesh(module, item.name, mesh)


def restore_region(call: Any, path: str) -> None:
    """Rebuilds one region from the call of its body and the custom calls around it."""
    entrance = getattr(call.operands[0].owner, "operation", None) if len(call.operands) else None
    leaving = [use.owner.operation for result in call.results for use in result.uses]
    way_out = leaving[0] if leaving else None
    boundary = [(entrance, GLOBAL_TO_LOCAL), (way_out, LOCAL_TO_GLOBAL)]
    fits = (len(call.operands) == 0 or entrance is not None) and (
        way_out is None or len(leaving) == len(way_out.operands)
    )
    if not fits or any(custom is not None and called_name(custom) != kind for custom, kind in boundary):
        hint = "write it out again with this version of jax"
        raise InputError("a manual region without its boundary", where=place_of(call, path), hint=hint)
    place = partial(place_of, call, path)
    texts: dict[str, str] = {}
    parts = [part for part in (entrance, call, way_out) if part is not None]
    for part in parts:
        texts |= frontend_texts(attributes_of(part), place)

    def parsed(name: str, default: str, kind: Any) -> Any:
        return foreign.parsed(texts.get(name, default), name, kind, place)

    no_shardings, several = "#sdy.sharding_per_value<[]>", sdy.TensorShardingPerValueAttr
    outside = list(entrance.operands) if entrance is not None else []
    results = list(way_out.results) if way_out is not None else []
    region = ir.Operation.create(
        MANUAL_REGION,
        results=[result.type for result in results],
        operands=outside,
        attributes={
            "in_shardings": parsed("xla.sdy.in_shardings", no_shardings, several),
            "out_shardings": parsed("xla.sdy.out_shardings", no_shardings, several),
            "manual_axes": parsed("xla.sdy.manual_axes", "#sdy<manual_axes{}>", sdy.ManualAxesAttr),
        },
        regions=1,
        loc=call.location,
        ip=ir.InsertionPoint(call),
    )
    inside = ir.Block.create_at_start(region.regions[0], [operand.type for operand in call.operands])
    with ir.InsertionPoint(inside), call.location:
        types, callee = [result.type for result in call.results], {"callee": call.attributes["callee"]}
        body = ir.Operation.create("func.call", types, list(inside.arguments), attributes=callee)
        ir.Operation.create("sdy.return", operands=list(body.results))
    for old, new in zip(results, region.results, strict=True):
        old.replace_all_uses_with(new)
    for part in reversed(parts):
        part.erase()


def close_boundaries(module: Any) -> None:
    """States how operands and results of manual regions are sharded over axes that a constraint or region in it names.
    Where the program leaves that open, Shardy propagates it out of the region. Calls must be inlined."""
    regions = walk_ops(module, MANUAL_REGION)
    if not any(map(_names_more, regions)):
        return
    copy = module.operation.clone()
    for function in copy.regions[0].blocks[0].operations:
        for name in ("arg_attrs", "res_attrs"):
            if name in function.operation.attributes:
                del function.operation.attributes[name]
    copies = walk_ops(copy, MANUAL_REGION)
    run_passes(copy, PROPAGATION)
    for region, closed in zip(regions, copies, strict=True):
        for name in BOUNDARY if _names_more(region) else ():
            text = str(closed.attributes[name]).replace(", ?}", "}").replace("{?}", "{}")
            region.attributes[name] = ir.Attribute.parse(text, module.context)


def _names_more(region: Any) -> bool:
    """True if something in a region names axes that are not manual there."""
    inside = [operation.attributes["sharding"] for operation in walk_ops(region, "sdy.sharding_constraint")]
    regions = [operation.attributes["manual_axes"] for operation in walk_ops(region, MANUAL_REGION)[1:]]
    return any('"' in str(stated) for stated in (*inside, *regions))


# ---------------------------------------------------------------- collectives outside any region
# Drops collectives whose groups have one member, and lists the devices of groups that name mesh axes.
#
# `shard_map` on one device, or over axes of size 1, leaves its collectives outside any manual region. Each of their
# groups has one member, so they return their operands, and the partition id is 0. XLA's partitioner refuses all of
# them. Collectives of several members stay, for `refuse_unpartitionable` to report.

GROUPS, PAIRS, CHANNEL = "replica_groups", "source_target_pairs", "channel_handle"
REPLICAS = "mhlo.num_replicas"

MESH = "mesh"
# (product of the parts before it, its size) of a sub-axis.
PART = re.compile(r"\((\d+)\)(\d+)")


def drop_lone_collectives(module: Any, path: str) -> None:
    """Replaces each such collective by its operands, or by zeros if no device sends anything."""
    collectives = collectives_outside(module)
    if not collectives:
        return
    partitions, replicas = (
        foreign.integer(module.operation.attributes, name, lambda: path, least=0, most=MOST_DEVICES) or 1
        for name in (PARTITIONS, REPLICAS)
    )
    with module.context:
        for operation in collectives:
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
    return [operation for operation in operations_in(view, outside=MANUAL_REGION) if kind_of(operation.name).per_device]


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
    kind = getattr(stablehlo, "ReplicaGroupMeshAxesAttr", None)
    return kind is not None and bool(kind.isinstance(attribute))


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
        cuts = sorted({1, size, *(cut for axis, *ends in wanted if axis == name for cut in ends)})
        pieces += [(name, low, high) for low, high in pairwise(cuts)]
    extents = [high // low for _, low, high in pieces]
    grouped = [pieces.index(piece) for piece in wanted if piece[1] != piece[2]]
    rest = [number for number in range(len(pieces)) if number not in grouped]
    count = int(np.prod([extents[number] for number in grouped]))  # 1 for no axes
    devices = np.array(mesh.device_ids or range(int(np.prod(extents))), np.int64)
    return devices.reshape(extents).transpose(rest + grouped).reshape(-1, count)
