"""Converts replica groups that name mesh axes, as JAX 0.12 writes them, to lists of device numbers.

`replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [<name = "model">]>` refers to a mesh of the
module, which programs without Shardy do not have. Every version accepts lists.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import place_of
from toast_cli.xla import ADVANCE, ir, sdy, stablehlo

GROUPS, MESH = "replica_groups", "mesh"
# (product of the parts before it, its size) of a sub-axis.
PART = re.compile(r"\((\d+)\)(\d+)")


def list_replica_groups(module: Any, path: str) -> None:
    """Writes all replica groups of the module as lists. Raises `InputError` for unknown axes."""
    meshes = {
        op.attributes["sym_name"].value: sdy.MeshAttr(op.attributes[MESH])
        for op in (view.operation for view in module.body.operations)
        if op.name == "sdy.mesh"
    }

    found: list[Any] = []

    def visit(operation: Any) -> Any:
        if GROUPS in operation.attributes and names_axes(operation.attributes[GROUPS]):
            found.append(operation)
        return ADVANCE

    module.operation.walk(visit)
    for operation in found:
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


def devices_along(said: Any, meshes: dict[str, Any]) -> NDArray[np.int64]:
    """[groups, devices of a group] device numbers."""
    if stablehlo.MeshAttr.isinstance(said.mesh):
        mesh, axis_of = stablehlo.MeshAttr(said.mesh), stablehlo.MeshAxisAttr
    else:
        mesh, axis_of = meshes[ir.FlatSymbolRefAttr(said.mesh).value], sdy.MeshAxisAttr
    sizes = {axis.name: axis.size for axis in map(axis_of, mesh.axes)}
    wanted: list[tuple[str, int, int]] = []  # axis, from which stride to which
    for axis in map(stablehlo.AxisRefAttr, said.axes):
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
