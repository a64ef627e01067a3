"""Manual regions (`shard_map`) as one operation each: rebuilt from Shardy's custom calls in HLO and from GSPMD's form;
collectives outside any region whose groups have one member are dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toast_cli.errors import InputError
from toast_cli.frontend import attributes as foreign
from toast_cli.frontend.attributes import NUMBERS, REGION, place_of
from toast_cli.frontend.constraints import factored, manual_text, sharding_text
from toast_cli.frontend.convert import sort_block
from toast_cli.frontend.inline import callee_name, replace_operation
from toast_cli.frontend.shardings import (
    FRONTEND,
    GSPMD,
    MANUAL,
    MOST_DEVICES,
    PARTITIONS,
    REPLICATED,
    SDY,
    TILED,
    MeshAxes,
    TileAssignment,
    called_name,
    frontend_texts,
    mesh_axes,
    read_tiling,
    unspecified_dims,
)
from toast_cli.program.ops import kind_of
from toast_cli.xla import declare_mesh, free_symbol, ir, operations_in, run_passes, sdy, stablehlo, walk_ops
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
    """Rebuilds every manual region, after tuples are flattened and before calls are inlined. `restore_gspmd_regions`
    handles those in GSPMD's form."""
    with module.context, ir.Location.unknown():
        declare_meshes(module, path)
        for call in walk_ops(module, "func.call"):
            if callee_name(call).startswith(BODY_PREFIXES):
                restore_region(call, path)


def declare_meshes(module: Any, path: str) -> None:
    """Declares `sdy.mesh` operations for the meshes that a converted HLO module has as text."""
    attributes = {name: module.operation.attributes[name] for name in module.operation.attributes}

    def place() -> str:
        return path

    texts = frontend_texts(attributes, place)
    if MESHES not in texts:
        return
    declared = {op.attributes["sym_name"].value for op in module.body.operations if op.operation.name == "sdy.mesh"}
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
    for part in (call, entrance, way_out):
        if part is not None and FRONTEND in part.attributes:
            texts |= frontend_texts({FRONTEND: part.attributes[FRONTEND]}, place)

    def parsed(name: str, default: str, kind: Any) -> Any:
        return foreign.parsed(texts.get(name, default), name, kind, place)

    no_shardings, several = "#sdy.sharding_per_value<[]>", sdy.TensorShardingPerValueAttr
    outside = list(entrance.operands) if entrance is not None else []
    results = list(way_out.results) if way_out is not None else []
    region = ir.Operation.create(
        REGION,
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
        types = [result.type for result in call.results]
        body = ir.Operation.create(
            "func.call",
            results=types,
            operands=list(inside.arguments),
            attributes={"callee": call.attributes["callee"]},
        )
        ir.Operation.create("sdy.return", operands=list(body.results))
    for old, new in zip(results, region.results, strict=True):
        old.replace_all_uses_with(new)
    for part in (way_out, call, entrance):
        if part is not None:
            part.erase()


def close_boundaries(module: Any) -> None:
    """States how operands and results of manual regions are sharded over axes that a constraint or region in it names.
    Where the program leaves that open, Shardy propagates it out of the region. Calls must be inlined."""
    regions = [region for region in walk_ops(module, REGION) if _names_more(region)]
    if not regions:
        return
    copy = module.operation.clone()
    for function in copy.regions[0].blocks[0].operations:
        for name in ("arg_attrs", "res_attrs"):
            if name in function.operation.attributes:
                del function.operation.attributes[name]
    places = {region: k for k, region in enumerate(walk_ops(module, REGION))}
    copies = walk_ops(copy, REGION)
    settled = [copies[places[region]] for region in regions]
    run_passes(copy, PROPAGATION)
    for region, found in zip(regions, settled, strict=True):
        for name in BOUNDARY:
            text = str(found.attributes[name]).replace(", ?}", "}").replace("{?}", "{}")
            region.attributes[name] = ir.Attribute.parse(text, module.context)


def _names_more(region: Any) -> bool:
    """True if something in a region names axes that are not manual there."""
    inside = [one.attributes["sharding"] for one in walk_ops(region, "sdy.sharding_constraint")]
    regions = [one.attributes["manual_axes"] for one in walk_ops(region, REGION)[1:]]
    return any('"' in str(stated) for stated in (*inside, *regions))


# ---------------------------------------------------------------- GSPMD's form
# Rebuilds manual regions in GSPMD's form, as `shard_map` of JAX up to 0.6 writes them, and later JAX without Shardy.
#
# The form has no operation around the body: a `Sharding` followed by `SPMDFullToShardShape` makes a device's shard of
# an array, `SPMDShardToFullShape` makes an array of shards, and the operations between them work on shards.

FULL_TO_SHARD, SHARD_TO_FULL, STATEMENT = "SPMDFullToShardShape", "SPMDShardToFullShape", "Sharding"
HINT = "lower the program with the Shardy partitioner (jax_use_shardy_partitioner, the default since jax 0.7)"


@dataclass(frozen=True)
class Crossing:
    """An entrance or exit of a region: the custom call, the sharding of the whole array, and the devices over which the
    region is manual. `open`: dimensions that the partitioner may split further."""

    operation: Any
    whole: TileAssignment
    manual: TileAssignment
    open: frozenset[int]


@dataclass
class Body:
    """A connected set of operations on shards, in program order. `operations` are the inner ones."""

    operations: list[Any] = field(default_factory=list)
    entrances: list[Any] = field(default_factory=list)
    exits: list[Any] = field(default_factory=list)


def restore_gspmd_regions(module: Any, function: Any, path: str) -> None:
    """Rebuilds every region of the entry function.

    Raises `InputError` at the first whose boundary is not whole, or does not lie along the axes of a mesh.
    """
    calls = [
        call
        for call in walk_ops(function, "stablehlo.custom_call")
        if called_name(call) in (FULL_TO_SHARD, SHARD_TO_FULL)
    ]
    if not calls:
        return
    crossings = {call: read_crossing(call, path) for call in calls}
    mesh = common_mesh(module, list(crossings.values()), path)
    with module.context, ir.Location.unknown():
        axes, symbol = ", ".join(f'"{name}"={size}' for name, size in mesh), free_symbol(module, "gspmd")
        declare_mesh(module, symbol, ir.Attribute.parse(f"#sdy.mesh<[{axes}]>"))
        for block in dict.fromkeys(call.operation.block for call in calls):
            copied: set[Any] = set()
            for body in bodies_in([view.operation for view in block.operations], block, path):
                copied |= build(body, crossings, mesh, symbol, path)
            sort_block(block, by_number=False)
            for view in reversed(list(block.operations)):
                if view.operation in copied and not any(list(result.uses) for result in view.operation.results):
                    view.operation.erase()


# ---------------------------------------------------------------- boundary


def read_crossing(call: Any, path: str) -> Crossing:
    """Reads the shardings of a boundary's custom call and of the one in front of it."""

    def tiling_of(operation: Any) -> TileAssignment:
        text = foreign.text(operation.attributes, GSPMD, lambda: place_of(operation, path)) or ""
        tiling = read_tiling(text)
        if tiling is None:
            raise unreadable(f"whose boundary has the sharding {text}", operation, path)
        return tiling

    before = getattr(call.operands[0].owner, "operation", None)
    if GSPMD not in call.attributes or before is None or GSPMD not in before.attributes:
        raise unreadable("whose boundary has no sharding", call, path)
    local, whole = (call, before) if called_name(call) == FULL_TO_SHARD else (before, call)
    attributes = {name: whole.attributes[name] for name in whole.attributes}
    return Crossing(call, tiling_of(whole), tiling_of(local), unspecified_dims(attributes))


def unreadable(what: str, operation: Any, path: str) -> InputError:
    return InputError(f"a manual region in GSPMD's form {what}", where=place_of(operation, path), hint=HINT)


def common_mesh(module: Any, crossings: list[Crossing], path: str) -> MeshAxes:
    """The mesh with the fewest axes that express every boundary's sharding."""
    counts = {
        tiling.devices.size
        for crossing in crossings
        for tiling in (crossing.whole, crossing.manual)
        if tiling.devices is not None
    }
    stated = foreign.integer(module.operation.attributes, PARTITIONS, lambda: path, least=0, most=MOST_DEVICES) or 1
    devices = max(counts, default=stated)
    first = crossings[0].operation
    if len(counts) > 1:
        raise unreadable(f"that is for {' and for '.join(map(str, sorted(counts)))} devices", first, path)
    if devices == 1:
        raise unreadable("that does not say for how many devices it is", first, path)
    tilings = [crossing.whole for crossing in crossings if crossing.whole.kind == TILED]
    mesh = factored([*tilings, *(by_hand(crossing.manual, devices) for crossing in crossings)], devices)
    if mesh is None:
        raise unreadable("over devices that lie along the axes of no mesh", first, path)
    return mesh


def by_hand(local: TileAssignment, devices: int) -> TileAssignment:
    """One dimension, split over the manual devices: all of them for `{manual}`."""
    parts = np.arange(devices, dtype=np.int64)[:, None] if local.kind == MANUAL else local.by_hand
    return TileAssignment(REPLICATED, (1,)) if parts is None else TileAssignment(TILED, parts.shape[:1], parts)


# ---------------------------------------------------------------- bodies


def bodies_in(operations: list[Any], block: Any, path: str) -> list[Body]:
    """The bodies among the operations of a block: the operations reachable from an entrance, up to the exits.

    Raises `InputError` for a body that reads an array which did not come in through an entrance.
    """
    reads = {operation: values_read(operation, block) for operation in operations}
    maker: dict[Any, Any] = {}  # a value that is a shard -> the operation that made it
    exits: list[Any] = []
    for operation in operations:
        kind = called_name(operation)
        follows = any(value in maker for value in reads[operation])
        if kind == FULL_TO_SHARD and follows:
            raise unreadable("inside another one", operation, path)
        if kind == SHARD_TO_FULL:
            exits.append(operation)
        elif follows or kind == FULL_TO_SHARD:
            maker.update(dict.fromkeys(operation.results, operation))
    parent = {operation: operation for operation in [*dict.fromkeys(maker.values()), *exits]}

    def find(operation: Any) -> Any:
        while parent[operation] != operation:
            operation = parent[operation]
        return operation

    bodies: dict[Any, Body] = {}
    for operation in parent:
        for value in reads[operation] if called_name(operation) != FULL_TO_SHARD else ():
            if value in maker:
                parent[find(maker[value])] = find(operation)
            elif not made_of_nothing(value, reads):
                raise unreadable("that reads an array which no boundary splits", operation, path)
    for operation in operations:
        if operation in parent:
            body = bodies.setdefault(find(operation), Body())
            {FULL_TO_SHARD: body.entrances, SHARD_TO_FULL: body.exits}.get(
                called_name(operation), body.operations
            ).append(operation)
    return list(bodies.values())


def values_read(operation: Any, block: Any) -> list[Any]:
    """The values of this block that an operation reads, also from within its regions."""
    found: dict[Any, None] = {}

    for value in [value for inner in operations_in(operation) for value in inner.operands]:
        holder = value.owner if isinstance(value, ir.BlockArgument) else value.owner.operation.block
        if holder == block:
            found[value] = None
    return list(found)


def made_of_nothing(value: Any, reads: dict[Any, list[Any]]) -> bool:
    """True if a value depends on constants and on the partition id alone."""
    waiting, seen = [value], {value}
    while waiting:
        one = waiting.pop()
        if isinstance(one, ir.BlockArgument) or one.owner.operation not in reads:
            return False
        if called_name(one.owner.operation) == SHARD_TO_FULL:
            return False
        fresh = [other for other in reads[one.owner.operation] if other not in seen]
        seen.update(fresh)
        waiting += fresh
    return True


# ---------------------------------------------------------------- the region


def build(body: Body, crossings: dict[Any, Crossing], mesh: MeshAxes, symbol: str, path: str) -> set[Any]:
    """Moves a body into a `sdy.manual_computation` in place of its boundary; erases a body that nothing reads. Returns
    the outside operations that it has copies of."""
    if not body.exits:
        for operation in [*reversed(body.operations), *body.entrances]:
            operation.erase()
        return set()
    entrances = [call for call in body.entrances if list(call.results[0].uses)]
    region = region_between(entrances, body.exits, crossings, mesh, symbol, path)
    inside = ir.Block.create_at_start(region.regions[0], [call.results[0].type for call in entrances])
    with ir.InsertionPoint(inside):
        pieces = [call.operands[0] for call in body.exits]
        end = ir.Operation.create("sdy.return", operands=pieces, loc=region.location)
    for call, argument in zip(entrances, inside.arguments, strict=True):
        call.results[0].replace_all_uses_with(argument)
    for operation in body.operations:
        operation.move_before(end)
    copied = copy_in(inside, region.operation.block)
    drop_annotations(inside)
    for call, result in zip(body.exits, region.results, strict=True):
        call.results[0].replace_all_uses_with(result)
    stated = {call.operands[0] for call in body.entrances}
    for call in [*body.exits, *body.entrances]:
        call.erase()
    for value in stated:
        if unstated(value) != value and not list(value.uses):
            value.owner.erase()
    sort_block(inside, by_number=False)
    return copied


def region_between(
    entrances: list[Any], exits: list[Any], crossings: dict[Any, Crossing], mesh: MeshAxes, symbol: str, path: str
) -> Any:
    """Creates the `sdy.manual_computation`, still without a body."""
    axes = {manual_axes(crossings[call], mesh, path) for call in [*entrances, *exits]}
    if len(axes) > 1:
        raise unreadable("whose boundary is manual over different devices", exits[0], path)
    (manual,) = axes
    boundary = Boundary(manual, mesh, symbol, path)
    shardings = (
        ", ".join(sharding_at(crossings[call], whole(call).type, local(call).type, boundary) for call in calls)
        for calls, whole, local in ((entrances, before, after), (exits, after, before))
    )
    tiling_of = (f"#sdy.sharding_per_value<[{text}]>" for text in shardings)
    texts = dict(zip(("in_shardings", "out_shardings"), tiling_of, strict=True), manual_axes=manual_text(manual))
    return ir.Operation.create(
        "sdy.manual_computation",
        results=[call.results[0].type for call in exits],
        operands=[unstated(call.operands[0]) for call in entrances],
        attributes={name: ir.Attribute.parse(text) for name, text in texts.items()},
        regions=1,
        loc=exits[0].location,
        ip=ir.InsertionPoint(exits[0]),
    )


def unstated(value: Any) -> Any:
    """The value that enters, without the `Sharding` custom call around it."""
    owner = getattr(value.owner, "operation", None)
    return owner.operands[0] if owner is not None and called_name(owner) == STATEMENT else value


def before(call: Any) -> Any:
    return call.operands[0]


def after(call: Any) -> Any:
    return call.results[0]


def manual_axes(crossing: Crossing, mesh: MeshAxes, path: str) -> tuple[str, ...]:
    """The axes over which the region at a boundary is manual, in the mesh's order."""
    names, sizes = zip(*mesh, strict=True)
    found = mesh_axes(by_hand(crossing.manual, prod(sizes)), 1, names, sizes)
    if not found or not found[0]:
        raise unreadable("that is manual over no devices", crossing.operation, path)
    return tuple(name for name in names if name in found[0])


class Boundary(NamedTuple):
    """The boundary of a manual region: the mesh (with its symbol), its manual axes, and the program's path."""

    manual: tuple[str, ...]
    mesh: MeshAxes
    symbol: str
    path: str


def sharding_at(crossing: Crossing, whole: Any, local: Any, boundary: Boundary) -> str:
    """The sharding of an array at the boundary over the manual axes; other axes are left to propagation."""
    manual, mesh, symbol, path = boundary
    names, sizes = zip(*mesh, strict=True)
    found = mesh_axes(crossing.whole, whole.rank, names, sizes) or ()
    axes = tuple(tuple(name for name in split if name in manual) for split in found)
    parts = [prod(dict(mesh)[name] for name in split) for split in axes]
    shape = [size * count for size, count in zip(local.shape, parts, strict=False)]
    leads = all(split[: len(ours)] == ours for split, ours in zip(found, axes, strict=True))
    if len(found) != whole.rank or shape != list(whole.shape) or not leads:
        what = f"that makes {local} of {whole}, split as its boundary says"
        raise unreadable(what, crossing.operation, path)
    closed = [d not in crossing.open and split == ours for d, (split, ours) in enumerate(zip(found, axes, strict=True))]
    return sharding_text(symbol, axes, closed)


def copy_in(inside: Any, outside: Any) -> set[Any]:
    """Copies outside operations that a region reads, which depend on constants alone, into it;
    returns the originals."""
    copies: dict[Any, Any] = {}
    waiting = [view.operation for view in inside.operations]

    while waiting:
        root = waiting.pop()
        for operation, number, value in [(o, n, v) for o in operations_in(root) for n, v in enumerate(o.operands)]:
            if isinstance(value, ir.BlockArgument) or value.owner.operation.block != outside:
                continue
            original = value.owner.operation
            if original not in copies:
                copies[original] = original.clone(ip=ir.InsertionPoint.at_block_begin(inside)).operation
                waiting.append(copies[original])
            operation.operands[number] = copies[original].results[value.result_number]
    return set(copies)


def drop_annotations(inside: Any) -> None:
    """Removes sharding annotations from a body, whose values are shards already."""
    for view in list(inside.operations):
        for operation in [*walk_ops(view.operation, "stablehlo.custom_call")]:
            if called_name(operation) == STATEMENT:
                operation.results[0].replace_all_uses_with(operation.operands[0])
                operation.erase()
    for operation in [one for view in inside.operations for one in operations_in(view)]:
        for name in (GSPMD, SDY):
            if name in operation.attributes:
                del operation.attributes[name]


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
