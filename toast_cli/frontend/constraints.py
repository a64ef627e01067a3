"""Translates shardings that a program states into constraints on the user's mesh.

Enters: `Kept` records and the axes of a mesh. Leaves: the same records with axis names of that mesh. It also checks
that the program's manual regions, which were written for a certain mesh and hold device numbers, fit the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from string import ascii_lowercase
from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import place_of
from toast_cli.frontend.gspmd import mesh_axes, read_tiling
from toast_cli.frontend.nameless import axes_on, is_nameless, region_axes
from toast_cli.frontend.shardings import MANUAL_REGION, Kept, OperandOfOp
from toast_cli.frontend.statements import Axes, MeshAxes, StatedSharding, meshes_of, value_shardings
from toast_cli.xla import ir, walk_ops


@dataclass(frozen=True)
class StatedConstraint:
    """`value` (or, if `uses` is not empty, these uses of it) must have the sharding `axes`: per dimension, axis names,
    or None if the dimension is open."""

    value: Any  # ir.Value
    axes: Axes
    uses: tuple[OperandOfOp, ...]
    origin: str


def constraints_on(
    records: Iterable[Kept], axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]
) -> tuple[list[StatedConstraint], list[str]]:
    """The records in axes of a mesh, and a notice about those that cannot be expressed by its axes.

    Raises `InputError` when a record names an axis that the mesh does not have, or has with another size.
    """
    found: list[StatedConstraint] = []
    left_out: list[Kept] = []
    for record in records:
        axes = record.sharding.axes
        if is_nameless(record.sharding.mesh):  # `check_manual_axes` has seen that they lie along the mesh
            axes = axes_on(axes or (), record.sharding.mesh, axis_names, axis_sizes)
        else:
            check_axes(record, dict(zip(axis_names, axis_sizes, strict=True)))
        if axes is None:
            axes = translated(record.sharding, ir.ShapedType(record.value.type).rank, axis_names, axis_sizes)
        if axes is None:
            left_out.append(record)
        else:
            found.append(StatedConstraint(record.value, axes, record.uses, record.origin))
    if not left_out:
        return found, []
    first = left_out[0]
    notice = (
        f"{len(left_out)} of the program's shardings do not lie along the axes of this mesh and are left out "
        f"(the first is {first.sharding.gspmd}, {first.origin})"
    )
    return found, [notice]


def translated(sharding: StatedSharding, rank: int, names: tuple[str, ...], sizes: tuple[int, ...]) -> Axes | None:
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
                if is_nameless(mesh):
                    said = [sharding.axes or () for sharding in shardings] + [(region_axes(region),)]
                    if any(axes_on(axes, mesh, axis_names, axis_sizes) is None for axes in said):
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
