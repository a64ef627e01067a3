"""Translates shardings that a program states into constraints on the user's mesh.

It also checks that the program's manual regions, which were written for a certain mesh and hold device numbers, fit
the mesh. GSPMD states shardings by device numbers. Manual regions in its form are read on a mesh with invented axes,
the fewest that express the shardings (`factored`). Once the user's mesh is chosen, its axes over the same devices are
found (`axes_on`); while a program is written, its regions name those (`regions_on`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from string import ascii_lowercase
from typing import Any

import numpy as np

from toast_cli.errors import InputError
from toast_cli.frontend.attributes import place_of
from toast_cli.frontend.shardings import (
    MANUAL_REGION,
    TILED,
    AnnotatedSharding,
    Axes,
    Kept,
    MeshAxes,
    OperandOfOp,
    TileAssignment,
    mesh_axes,
    mesh_axes_of,
    meshes_of,
    read_tiling,
    value_shardings,
)
from toast_cli.hardware.model import Groups
from toast_cli.program.model import Exchange, Op
from toast_cli.xla import ir, sdy, walk_ops

PREFIX = "gspmd_axis_"
# Meshes have few axes; with more, there are too many assignments of axes to dimensions to try.
MOST_AXES = 5


def has_invented_axes(mesh: MeshAxes) -> bool:
    return bool(mesh) and all(name.startswith(PREFIX) for name, _ in mesh)


def factored(tilings: Iterable[TileAssignment], devices: int) -> MeshAxes | None:
    """The mesh with the fewest axes, devices in row-major order, that expresses all tilings; None if there is none."""
    tilings = list(tilings)
    for sizes in sorted(_factorisations(devices, MOST_AXES), key=len):
        names = tuple(f"{PREFIX}{k}" for k in range(len(sizes)))
        if all(mesh_axes(tiling, len(tiling.tiles), names, sizes) is not None for tiling in tilings):
            return tuple(zip(names, sizes, strict=True))
    return None


def _factorisations(number: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every tuple of at most `most` factors above 1 with this product; (1,) for 1."""
    yield (number,)
    if most > 1:
        for first in range(2, number // 2 + 1):
            if number % first == 0:
                yield from ((first, *rest) for rest in _factorisations(number // first, most - 1))


def axes_on(axes: Axes, mesh: MeshAxes, names: tuple[str, ...], sizes: tuple[int, ...]) -> Axes | None:
    """A sharding on a mesh without names, by the axes of another mesh; None if its axes cannot express it."""
    numbers = {name: number for number, (name, _) in enumerate(mesh)}
    extents = tuple(size for _, size in mesh)
    split = [[numbers[name] for name in found or ()] for found in axes]
    used = [number for found in split for number in found]
    rest = [number for number in range(len(mesh)) if number not in used]
    grid = np.arange(prod(extents), dtype=np.int64).reshape(extents).transpose(used + rest)
    tiles = tuple(prod(extents[number] for number in found) for found in split)
    found_axes = mesh_axes(TileAssignment(TILED, tiles, grid.reshape((*tiles, -1))), len(tiles), names, sizes)
    if found_axes is None:
        return None
    return tuple(None if before is None else after for before, after in zip(axes, found_axes, strict=True))


@contextmanager
def regions_on(module: Any, names: tuple[str, ...], sizes: tuple[int, ...]) -> Iterator[None]:
    """While the block runs, regions on meshes without names refer to the mesh with these axes, which must be able to
    express them (`constraints.check_manual_axes`)."""
    meshes = {
        str(op.attributes["sym_name"].value): op
        for op in walk_ops(module, "sdy.mesh")
        if has_invented_axes(mesh_axes_of(op.attributes["mesh"]))
    }
    before: list[tuple[Any, str, Any]] = []

    def put(operation: Any, name: str, text: str) -> None:
        before.append((operation, name, operation.attributes[name]))
        operation.attributes[name] = ir.Attribute.parse(text, module.context)

    for symbol, op in meshes.items():
        mesh = mesh_axes_of(op.attributes["mesh"])
        for region in walk_ops(module, "sdy.manual_computation"):
            _translate(region, symbol, mesh, names, sizes, put)
        axes = ", ".join(f"{quoted(name)}={size}" for name, size in zip(names, sizes, strict=True))
        put(op, "mesh", f"#sdy.mesh<[{axes}]>")
    try:
        yield
    finally:
        for operation, name, attribute in reversed(before):
            operation.attributes[name] = attribute


def _translate(
    region: Any, symbol: str, mesh: MeshAxes, names: tuple[str, ...], sizes: tuple[int, ...], put: Any
) -> None:
    manual = manual_axes(region)
    if not set(manual) <= {name for name, _ in mesh}:
        return
    for name in ("in_shardings", "out_shardings"):
        written = []
        for sharding in sdy.TensorShardingPerValueAttr(region.attributes[name]).shardings:
            stated = [
                (tuple(str(sdy.AxisRefAttr(axis).name) for axis in d.axes), d.is_closed) for d in dimensions(sharding)
            ]
            found = axes_on(tuple(axes for axes, _ in stated), mesh, names, sizes) or ()
            written.append(sharding_text(symbol, found, [closed for _, closed in stated]))
        put(region, name, f"#sdy.sharding_per_value<[{', '.join(written)}]>")
    (ours,) = axes_on((manual,), mesh, names, sizes) or ((),)
    put(region, "manual_axes", manual_text(ours or ()))


def dimensions(sharding: Any) -> list[Any]:
    return [sdy.DimensionShardingAttr(d) for d in sdy.TensorShardingAttr(sharding).dimension_shardings]


def sharding_text(symbol: str, axes: Axes, closed: Iterable[bool]) -> str:
    """Text of one `#sdy.sharding`, for use in a list."""
    found = (
        "{" + ", ".join([*map(quoted, names or ()), *([] if whole else ["?"])]) + "}"
        for names, whole in zip(axes, closed, strict=True)
    )
    return f"<@{symbol}, [{', '.join(found)}]>"


def manual_text(axes: Iterable[str]) -> str:
    return f"#sdy<manual_axes{{{', '.join(map(quoted, axes))}}}>"


def quoted(name: str) -> str:
    """A mesh axis name as MLIR writes it."""
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True)
class AnnotatedConstraint:
    """`value` (or, if `uses` is not empty, these uses of it) must have the sharding `axes`: per dimension, axis names,
    or None if the dimension is open."""

    value: Any  # ir.Value
    axes: Axes
    uses: tuple[OperandOfOp, ...]
    origin: str


def constraints_on(
    records: Iterable[Kept], axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]
) -> tuple[list[AnnotatedConstraint], list[str]]:
    """The records in axes of a mesh, and a notice about those that cannot be expressed by its axes.

    Raises `InputError` when a record names an axis that the mesh does not have, or has with another size.
    """
    found: list[AnnotatedConstraint] = []
    left_out: list[Kept] = []
    for record in records:
        axes = record.sharding.axes
        if has_invented_axes(record.sharding.mesh):  # `check_manual_axes` has seen that they lie along the mesh
            axes = axes_on(axes or (), record.sharding.mesh, axis_names, axis_sizes)
        else:
            check_axes(record, dict(zip(axis_names, axis_sizes, strict=True)))
        if axes is None:
            axes = translated(record.sharding, ir.ShapedType(record.value.type).rank, axis_names, axis_sizes)
        if axes is None:
            left_out.append(record)
        else:
            found.append(AnnotatedConstraint(record.value, axes, record.uses, record.origin))
    if not left_out:
        return found, []
    first = left_out[0]
    notice = (
        f"{len(left_out)} of the program's shardings do not lie along the axes of this mesh and are left out "
        f"(the first is {first.sharding.gspmd}, {first.origin})"
    )
    return found, [notice]


def translated(sharding: AnnotatedSharding, rank: int, names: tuple[str, ...], sizes: tuple[int, ...]) -> Axes | None:
    """A GSPMD sharding by mesh axes; None if no assignment of axes expresses it."""
    tiling = read_tiling(sharding.gspmd)
    axes = mesh_axes(tiling, rank, names, sizes) if tiling else None
    if axes is None:
        return None
    return tuple(None if d in sharding.open_dims and not split else split for d, split in enumerate(axes))


def check_axes(record: Kept, target: dict[str, int]) -> None:
    """Raises `InputError` when a record uses an axis that `target` (name -> size) does not have with the same size."""
    sizes = dict(record.sharding.mesh)
    for name in dict.fromkeys(name for axes in record.sharding.axes or () for name in axes or ()):
        size = sizes.get(name)
        if name in target and size in (None, target[name]):
            continue
        has = f"has it with size {target[name]}" if name in target else f"has only {', '.join(target)}"
        uses = f"uses mesh axis {name!r}" + (f" (size {size})" if size else "")
        shape = f"try --mesh-shape {mesh_shape(record.sharding.mesh)}, or " if sizes else ""
        raise InputError(
            f"the sharding of {record.origin} {uses}; the target mesh {has}",
            where="--keep-shardings",
            hint=f"{shape}drop the program's shardings",
        )


def check_manual_axes(module: Any, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...], path: str = "") -> None:
    """Raises `InputError` unless every manual region was written for a mesh with these axes, in this order.

    Axes of size 1 do not matter. The order does: collectives inside the region count devices.
    """
    target = significant(zip(axis_names, axis_sizes, strict=True))
    meshes = meshes_of(module)
    with module.context:
        for region in walk_ops(module, MANUAL_REGION):
            shardings = [
                s
                for name in ("in_shardings", "out_shardings")
                for s in value_shardings(region.attributes[name], meshes)
            ]
            for mesh in dict.fromkeys(sharding.mesh for sharding in shardings):
                if has_invented_axes(mesh):
                    found_axes = [sharding.axes or () for sharding in shardings] + [(manual_axes(region),)]
                    if any(axes_on(axes, mesh, axis_names, axis_sizes) is None for axes in found_axes):
                        raise InputError(
                            f"a manual region was written for {' × '.join(str(size) for _, size in mesh)} devices and "
                            f"does not lie along the axes of the target mesh, {mesh_shape(target)}",
                            where=place_of(region, path),
                            hint=f"try --mesh-shape {mesh_shape(lettered(mesh))}, with any names",
                        )
                elif significant(mesh) != target:
                    devices, ours = (prod(size for _, size in axes) for axes in (mesh, target))
                    names = ", ".join(repr(name) for name, size in mesh if size > 1)
                    raise InputError(
                        f"a manual region was written for the mesh {mesh_shape(mesh)}, "
                        f"the target mesh is {mesh_shape(target)}",
                        where=place_of(region, path),
                        hint=f"try --mesh-shape {mesh_shape(mesh)}, or write the program without shard_map"
                        if devices == ours
                        else f"lower it with a mesh of all {ours} devices; shard_map(…, axis_names={{{names}}}) leaves "
                        "the other axes to toast",
                    )


def lettered(mesh: MeshAxes) -> MeshAxes:
    """The same axes, renamed a, b, c, …"""
    return tuple((letter, size) for letter, (_, size) in zip(ascii_lowercase, mesh, strict=False))


def significant(mesh: Iterable[tuple[str, int]]) -> MeshAxes:
    """The axes of size greater than 1."""
    return tuple((name, size) for name, size in mesh if size > 1)


def mesh_shape(mesh: MeshAxes) -> str:
    """The axes in the notation of `--mesh-shape`: `data=4,model=2`."""
    return ",".join(f"{name}={size}" for name, size in mesh)


# ---------------------------------------------------------------- communication in manual regions
# Reads the communication in a manual region from the attributes of its collective ops.

KINDS = {
    "stablehlo.all_gather": "all-gather",
    "stablehlo.all_reduce": "all-reduce",
    "stablehlo.all_to_all": "all-to-all",
    "stablehlo.collective_permute": "collective-permute",
    "stablehlo.reduce_scatter": "reduce-scatter",
}
RAGGED_ALL_TO_ALL = "ragged_all_to_all"  # a custom call
_PADDING = -1  # fills groups that are smaller than others


def exchanges_of(ops: Iterable[Op], operations: Iterable[Any]) -> dict[int, Exchange]:
    """Op number -> its communication, for ops that communicate."""
    found = {}
    for number, (op, operation) in enumerate(zip(ops, operations, strict=True)):
        ragged = op.detail == RAGGED_ALL_TO_ALL
        kind = "all-to-all" if ragged else KINDS.get(op.name)
        if kind is not None:
            groups = _ragged_groups(operation) if ragged else _groups(operation)
            if groups is not None:
                found[number] = Exchange(kind, groups, str(operation.location))
    return found


def devices_of(region: Any) -> int:
    """Number of devices of a manual region: the product of the sizes of its manual axes."""
    axes, manual = _axes(region)
    return prod(axes.get(axis, 1) for axis in manual)


def manual_axes(region: Any) -> tuple[str, ...]:
    """The manual axes of a region."""
    return tuple(str(axis) for axis in sdy.ManualAxesAttr(region.attributes["manual_axes"]))


def leaves_axes(region: Any) -> bool:
    """True if some axes of a region's mesh are not manual, so that the partitioner may use them."""
    axes, manual = _axes(region)
    return any(size > 1 for axis, size in axes.items() if axis not in manual)


def _axes(region: Any) -> tuple[dict[str, int], set[str]]:
    """(axis -> size of the mesh that a region was written for, its manual axes)."""
    manual = set(manual_axes(region))
    module = region
    while module.parent is not None:
        module = module.parent
    meshes = meshes_of(module.opview)
    stated = (s for name in ("in_shardings", "out_shardings") for s in value_shardings(region.attributes[name], meshes))
    return {axis: size for sharding in stated for axis, size in sharding.mesh}, manual


def _groups(operation: Any) -> Groups | None:
    """The replica groups, or the source-target pairs, of an op."""
    for name in ("replica_groups", "source_target_pairs"):
        if name in operation.attributes:
            return _rows(operation.attributes[name])
    return None


def _ragged_groups(operation: Any) -> Groups | None:
    attributes = operation.attributes
    name = next((name for name in ("mhlo.backend_config", "backend_config") if name in attributes), "")
    config = attributes[name] if name else None
    if not isinstance(config, ir.DictAttr) or "replica_groups" not in config:
        return None
    return _rows(config["replica_groups"])


def _rows(attribute: Any) -> Groups | None:
    if not isinstance(attribute, ir.DenseIntElementsAttr):
        return None
    rows = np.array(attribute).reshape(attribute.type.shape)
    return tuple(tuple(int(device) for device in row if device != _PADDING) for row in rows)
