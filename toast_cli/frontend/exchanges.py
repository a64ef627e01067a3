"""Reads the communication in a manual region from the attributes of its collective ops.

In: the ops of a region, with their MLIR operations. Out: `Exchange`s.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np

from toast_cli.frontend.annotations import meshes_of, value_shardings
from toast_cli.hardware.device_groups import Groups
from toast_cli.program.model import Exchange, Op
from toast_cli.xla import ir, sdy

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
