"""Rebuilds manual regions in GSPMD's form, as `shard_map` of JAX up to 0.6 writes them, and later JAX without Shardy.

The form has no operation around the body: a `Sharding` followed by `SPMDFullToShardShape` makes a device's shard of an
array, `SPMDShardToFullShape` makes an array of shards, and the operations between them work on shards. In: the
entry function, calls inlined. Out: each connected body in a `sdy.manual_computation`, over a mesh without names (see
`constraints`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from toast_cli.errors import InputError
from toast_cli.frontend import attributes as foreign
from toast_cli.frontend.annotations import GSPMD, SDY, MeshAxes
from toast_cli.frontend.constraints import factored, manual_text, sharding_text
from toast_cli.frontend.creation_order import sort_block
from toast_cli.frontend.diagnostics import place_of
from toast_cli.frontend.gspmd import MANUAL, MOST_DEVICES, REPLICATED, TILED, TileAssignment, mesh_axes, read_tiling
from toast_cli.frontend.shardings import PARTITIONS, kind_of, unspecified_dims
from toast_cli.xla import declare_mesh, free_symbol, ir, operations_in, walk_ops

ENTRANCE, EXIT, STATEMENT = "SPMDFullToShardShape", "SPMDShardToFullShape", "Sharding"
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
    calls = [call for call in walk_ops(function, "stablehlo.custom_call") if kind_of(call) in (ENTRANCE, EXIT)]
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
    local, whole = (call, before) if kind_of(call) == ENTRANCE else (before, call)
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
        kind = kind_of(operation)
        follows = any(value in maker for value in reads[operation])
        if kind == ENTRANCE and follows:
            raise unreadable("inside another one", operation, path)
        if kind == EXIT:
            exits.append(operation)
        elif follows or kind == ENTRANCE:
            maker.update(dict.fromkeys(operation.results, operation))
    parent = {operation: operation for operation in [*dict.fromkeys(maker.values()), *exits]}

    def find(operation: Any) -> Any:
        while parent[operation] != operation:
            operation = parent[operation]
        return operation

    bodies: dict[Any, Body] = {}
    for operation in parent:
        for value in reads[operation] if kind_of(operation) != ENTRANCE else ():
            if value in maker:
                parent[find(maker[value])] = find(operation)
            elif not made_of_nothing(value, reads):
                raise unreadable("that reads an array which no boundary splits", operation, path)
    for operation in operations:
        if operation in parent:
            body = bodies.setdefault(find(operation), Body())
            {ENTRANCE: body.entrances, EXIT: body.exits}.get(kind_of(operation), body.operations).append(operation)
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
        if kind_of(one.owner.operation) == EXIT:
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
    return owner.operands[0] if owner is not None and kind_of(owner) == STATEMENT else value


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
            if kind_of(operation) == STATEMENT:
                operation.results[0].replace_all_uses_with(operation.operands[0])
                operation.erase()
    for operation in [one for view in inside.operations for one in operations_in(view)]:
        for name in (GSPMD, SDY):
            if name in operation.attributes:
                del operation.attributes[name]
