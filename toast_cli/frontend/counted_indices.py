"""Rewrites gathers and scatters that pick element `b` of a batch for position `b`, so that they have a batching
dimension.

`take_along_axis` is written in two ways. JAX from 0.4.31 gives operand and indices a shared batching dimension. Older
versions, PyTorch/XLA and TensorFlow concatenate an iota (0, 1, 2, … along the batch dimension) to the index. Devices
then seem to gather rows from anywhere in the batch, so the loss of a language model, and everything after it, could not
be split along the batch.

XLA's own passes flatten all indices (`[32, 128, 3]` becomes `[4096, 3]`) and keep the picked dimensions of slices, of
size 1. For an index with an iota, both are undone first.

In: a module. Out: the same; such gathers and scatters have batching dimensions, and indices without the iotas.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from toast_cli.frontend.idle import numbers
from toast_cli.frontend.inline import replace_operation
from toast_cli.frontend.known_numbers import distinct, known_numbers
from toast_cli.xla import (
    PickedDimensions,
    attributes_of,
    create,
    ir,
    picked_dimensions,
    walk_ops,
    with_picked_dimensions,
)
from toast_cli.xla.build import Builder

PICKS = ("stablehlo.gather", "stablehlo.scatter")

Part = tuple[Any, int]  # a value, and its size along the index vector dimension


def share_batches(module: Any) -> None:
    """Rewrites every gather and scatter of which a component of the index is an iota."""
    with module.context, ir.Location.unknown():
        for operation in walk_ops(module, *PICKS):
            share_batch(spread(operation))


def spread(operation: Any) -> Any:
    """The gather or scatter with its indices in their shape before flattening, if a component of them is an iota; else
    the operation given."""
    name = "dimension_numbers" if operation.name == PICKS[0] else "scatter_dimension_numbers"
    attribute = operation.attributes[name]
    picked = picked_dimensions(attribute)
    gathers = operation.name == PICKS[0]
    place = 1 if gathers else len(operation.operands) // 2
    indices = operation.operands[place]
    arrays = list(operation.results) if gathers else list(operation.operands)[place + 1 :]
    row = indices.owner
    if isinstance(row, ir.Block) or row.name != "stablehlo.reshape" or picked.vector != 1 or picked.batching:
        return operation
    *batch, width = ir.RankedTensorType(row.operands[0].type).shape or [0]
    sizes = ir.RankedTensorType(arrays[0].type).shape[1:]
    if [prod(batch), width] != list(indices.type.shape) or picked.slices != tuple(range(1, len(sizes) + 1)):
        return operation
    if all(counts_along(part) is None for part, _ in _parts(row.operands[0], len(batch))):
        return operation
    sliced = [d for d in range(operation.operands[0].type.rank) if d not in picked.single]
    gone = [d for d, size in zip(sliced, sizes, strict=True) if size == 1 and d in picked.mapped]
    kept = [size for d, size in zip(sliced, sizes, strict=True) if d not in gone]
    after = replace(
        picked,
        slices=tuple(range(len(batch), len(batch) + len(kept))),
        single=tuple(sorted([*picked.single, *gone])),
        vector=len(batch),
    )
    kinds = [ir.RankedTensorType.get([*batch, *kept], array.type.element_type) for array in arrays]
    attributes, build = attributes_of(operation), Builder.before(operation)
    attributes[name] = with_picked_dimensions(attribute, after)
    if not gathers:
        operation.attributes[name] = attributes[name]
        operation.operands[place] = row.operands[0]
        for k, (array, kind) in enumerate(zip(arrays, kinds, strict=True)):
            operation.operands[place + 1 + k] = build.reshape(array, tuple(kind.shape))
        return operation
    (found,) = create(operation.name, [operation.operands[0], row.operands[0]], kinds, attributes, operation)
    replace_operation(operation, [build.reshape(found, tuple(arrays[0].type.shape))])
    return found.owner.operation


def share_batch(operation: Any) -> None:
    """Turns the iota components of the index into batching dimensions, in place."""
    name = "dimension_numbers" if operation.name == PICKS[0] else "scatter_dimension_numbers"
    attribute = operation.attributes[name]
    picked = picked_dimensions(attribute)
    place = 1 if operation.name == PICKS[0] else len(operation.operands) // 2
    indices = operation.operands[place]
    parts = _parts(indices, picked.vector)
    if len(parts) != len(picked.mapped) or any(width != 1 for _, width in parts):
        return
    counted = _counted(operation, picked, [value for value, _ in parts])
    if len(counted) == len(parts):  # not all compilers accept an index without components
        whole = _in_place(operation, picked, dict(counted.values())) if operation.name == PICKS[0] else None
        if whole is not None:
            replace_operation(operation, [whole])
            return
        counted.popitem()
    if not counted:
        return
    left = [value for k, (value, _) in enumerate(parts) if k not in counted]
    pairs = sorted([*zip(picked.batching, picked.counted, strict=True), *counted.values()])
    after = replace(
        picked,
        single=tuple(d for d in picked.single if d not in {d for d, _ in counted.values()}),
        batching=tuple(d for d, _ in pairs),
        counted=tuple(d for _, d in pairs),
        mapped=tuple(d for k, d in enumerate(picked.mapped) if k not in counted),
    )
    operation.operands[place] = Builder.before(operation).concatenate(left, picked.vector)
    operation.attributes[name] = with_picked_dimensions(attribute, after)


def _in_place(gather: Any, picked: PickedDimensions, along: dict[int, int]) -> Any | None:
    """A transpose of the operand that replaces a gather of which every index component is an iota. None if slices are
    not whole, and if the operand is an argument: the rows of a table of positions are those of a weight, whose gradient
    is scattered, and not the positions of a sequence.

    along: dimension of the operand -> the dimension of the indices whose iota indexes it.
    """
    source = gather.operands[0]
    while not isinstance(source.owner, ir.Block) and source.owner.name == "stablehlo.convert":
        source = source.owner.operands[0]
    if isinstance(source.owner, ir.Block):
        return None
    shape = list(ir.RankedTensorType(gather.operands[0].type).shape)
    result = ir.RankedTensorType(gather.results[0].type)
    slices, batch = iter(picked.slices), [d for d in range(result.rank) if d not in picked.slices]
    places = []
    for dim, (size, taken) in enumerate(zip(shape, numbers(gather, "slice_sizes"), strict=True)):
        if dim in along:
            places.append(batch[along[dim] - (along[dim] > picked.vector)])
        elif size == taken and dim not in picked.single + picked.batching:
            places.append(next(slices))
        else:
            return None
    return Builder.before(gather).broadcast(gather.operands[0], tuple(result.shape), places)


def _counted(operation: Any, picked: PickedDimensions, parts: list[Any]) -> dict[int, tuple[int, int]]:
    """Index component (by number) -> the operand's dimension that it indexes, and the indices'
    dimension of its iota."""
    shape = ir.RankedTensorType(operation.operands[0].type).shape
    found: dict[int, tuple[int, int]] = {}
    taken = set(picked.counted)
    for k, (part, dim) in enumerate(zip(parts, picked.mapped, strict=True)):
        along = counts_along(part)
        if along is None or along in taken or along == picked.vector or dim not in picked.single:
            continue
        if ir.RankedTensorType(part.type).shape[along] == shape[dim]:
            found[k] = (dim, along)
            taken.add(along)
    return found


def _parts(indices: Any, vector: int) -> list[Part]:
    """The pieces that are concatenated along the index vector dimension."""
    owner = indices.owner
    shape = ir.RankedTensorType(indices.type).shape
    if vector >= len(shape):
        return []
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.concatenate":
        return [(indices, shape[vector])]
    if int(ir.IntegerAttr(owner.attributes["dimension"]).value) != vector:
        return []
    return [part for piece in owner.operands for part in _parts(piece, vector)]


def counts_along(value: Any) -> int | None:
    """The dimension along which a value is an iota (0, 1, 2, …); None if there is none.

    A dimension of one element does not qualify.
    """
    elements = known_numbers(value)
    if elements is None or elements.dtype == bool:
        return None
    for dim, size in enumerate(elements.shape):
        if size < 2 or not elements.strides[dim]:  # all alike, and maybe too many to count
            continue
        counted = np.arange(size).reshape([-1 if d == dim else 1 for d in range(elements.ndim)])
        found, wanted = distinct(elements, counted)
        if np.array_equal(found, wanted):
            return dim
    return None
