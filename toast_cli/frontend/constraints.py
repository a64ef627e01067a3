"""Translates shardings that a program states into constraints on the user's mesh.

It also checks that the program's manual regions, which were written for a certain mesh and hold device numbers, fit
the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from toast_cli.base.errors import InputError
from toast_cli.frontend.attributes import place_of
from toast_cli.frontend.shardings import (
    Annotation,
    MeshAxes,
    mesh_axes,
    meshes_of,
    value_shardings,
)
from toast_cli.hardware.model import Groups
from toast_cli.program.model import ManualCollective, Op
from toast_cli.program.ops import MANUAL_REGION, RAGGED_ALL_TO_ALL
from toast_cli.xla import holders, ir, sdy, walk_ops


def quoted(name: str) -> str:
    """A mesh axis name as MLIR writes it."""
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def constraints_on(
    records: Iterable[Annotation], axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]
) -> tuple[list[Annotation], list[str]]:
    """The records in axes of a mesh of more than one device, and a notice about those that these cannot express.

    Raises `InputError` when a record names an axis that the mesh does not have, or has with another size.
    """
    constraints: list[Annotation] = []
    left_out: list[Annotation] = []
    wide = {name for name, size in zip(axis_names, axis_sizes, strict=True) if size > 1}
    for record in records:
        axes = record.sharding.axes
        check_axes(record, dict(zip(axis_names, axis_sizes, strict=True)))
        if axes is None:
            axes = mesh_axes(record.sharding.gspmd, ir.ShapedType(record.value.type).rank, axis_names, axis_sizes)
        if axes is None:
            left_out.append(record)
        else:
            stated_sizes = dict(record.sharding.mesh)
            usable = {name for name in wide if stated_sizes.get(name) != 1}
            axes = tuple(split and tuple(name for name in split if name in usable) for split in axes)
            constraints.append(replace(record, sharding=replace(record.sharding, axes=axes)))
    if not left_out:
        return constraints, []
    first = left_out[0]
    notice = (
        f"{len(left_out)} of the program's shardings do not lie along the axes of this mesh and are left out "
        f"(the first is {first.sharding.gspmd}, {first.origin})"
    )
    return constraints, [notice]


def check_axes(record: Annotation, target: dict[str, int]) -> None:
    """Raises `InputError` when a record uses an axis that `target` (name -> size) does not have with the same size."""
    sizes = dict(record.sharding.mesh)
    for name in dict.fromkeys(name for axes in record.sharding.axes or () for name in axes or ()):
        size = sizes.get(name)
        if size == 1 or (name in target and size in (None, target[name])):
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
    """Raises `InputError` unless every manual region was written for a mesh with these axes, in this order:
    collectives inside the region count devices."""
    target = tuple(zip(axis_names, axis_sizes, strict=True))
    with module.context:
        for region in walk_ops(module, MANUAL_REGION):
            for mesh in _boundary_meshes(region):
                if mesh != target:
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
_PADDING = -1  # fills groups that are smaller than others


def exchanges_of(ops: Iterable[Op], operations: Iterable[Any]) -> dict[int, ManualCollective]:
    """Op number -> its communication, for ops that communicate."""
    exchanges = {}
    for number, (op, operation) in enumerate(zip(ops, operations, strict=True)):
        ragged = op.detail == RAGGED_ALL_TO_ALL
        kind = "all-to-all" if ragged else KINDS.get(op.name)
        if kind is not None:
            groups = _ragged_groups(operation) if ragged else _groups(operation)
            if groups is not None:
                exchanges[number] = ManualCollective(kind, groups, str(operation.location))
    return exchanges


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
    sizes = {axis: size for mesh in _boundary_meshes(region) for axis, size in mesh}
    return sizes, set(manual_axes(region))


def _boundary_meshes(region: Any) -> list[MeshAxes]:
    """The meshes of the shardings that a region states for its operands and results, without repetitions."""
    *_, module = holders(region)
    meshes, names = meshes_of(module.opview), ("in_shardings", "out_shardings")
    return list(dict.fromkeys(s.mesh for name in names for s in value_shardings(region.attributes[name], meshes)))


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
