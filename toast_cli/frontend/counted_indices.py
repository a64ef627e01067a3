"""Gathers and scatters that pick element `b` of a batch for position `b`, as ones that have the batch in common.

`take_along_axis` is written in two ways. JAX has said since 0.4.31 that operand and indices share a batching dimension.
Before, and in PyTorch/XLA and TensorFlow still, the index has a part for each batch dimension, and that counts: 0, 1,
2, … along the dimension. Devices then seem to look up rows anywhere in the batch, so that nothing that comes after the
loss of a language model could be split along it.

XLA's own passes lay all indices in a row (`[32, 128, 3]` becomes `[4096, 3]`) and keep the picked dimensions of slices,
of size 1. Where the index counts, both are undone first.

Enters: a module. Leaves: the same, its gathers and scatters with batching dimensions, and with indices that have the
other parts only.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toast_cli.frontend.idle import numbers, splat_value
from toast_cli.frontend.inline import replace_operation
from toast_cli.frontend.known_numbers import known_numbers
from toast_cli.xla import PickedDimensions, ir, picked_dimensions, walk_ops, with_picked_dimensions

PICKS = ("stablehlo.gather", "stablehlo.scatter")
# As many steps back from an index as its making takes; constants of as many elements are looked at.
_STEPS = 16
_MOST_COUNTED = 1 << 20

Part = tuple[Any, int]  # a value, and its width along the dimension of the parts


def share_batches(module: Any) -> None:
    """Rewrites every gather and scatter of which a part of the index counts."""
    with module.context, ir.Location.unknown():
        for operation in walk_ops(module, *PICKS):
            share_batch(spread(operation))


def spread(operation: Any) -> Any:
    """The gather or scatter with its indices as they were before they were laid in a row, where a part of them counts;
    else the one given."""
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
    attributes = {one: operation.attributes[one] for one in operation.attributes}
    attributes[name] = with_picked_dimensions(attribute, after)
    if not gathers:
        operation.attributes[name] = attributes[name]
        operation.operands[place] = row.operands[0]
        for k, (array, kind) in enumerate(zip(arrays, kinds, strict=True)):
            operation.operands[place + 1 + k] = _as(array, kind, operation)
        return operation
    found = ir.Operation.create(
        operation.name,
        results=kinds,
        operands=[operation.operands[0], row.operands[0]],
        attributes=attributes,
        loc=operation.location,
        ip=ir.InsertionPoint(operation),
    )
    replace_operation(operation, [_as(found.results[0], arrays[0].type, operation)])
    return found


def _as(array: Any, kind: Any, before: Any) -> Any:
    """A reshape in front of an operation."""
    where = ir.InsertionPoint(before)
    return ir.Operation.create(
        "stablehlo.reshape", results=[kind], operands=[array], loc=before.location, ip=where
    ).results[0]


def share_batch(operation: Any) -> None:
    """Turns the parts of the index that count into batching dimensions, in place."""
    name = "dimension_numbers" if operation.name == PICKS[0] else "scatter_dimension_numbers"
    attribute = operation.attributes[name]
    picked = picked_dimensions(attribute)
    place = 1 if operation.name == PICKS[0] else len(operation.operands) // 2
    indices = operation.operands[place]
    parts = _parts(indices, picked.vector)
    if len(parts) != len(picked.mapped) or any(width != 1 for _, width in parts):
        return
    counted = _counted(operation, picked, [value for value, _ in parts])
    if len(counted) == len(parts):  # an index of no parts is not for all compilers
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
    operation.operands[place] = _joined(left, picked.vector, indices.type, operation)
    operation.attributes[name] = with_picked_dimensions(attribute, after)


def _in_place(gather: Any, picked: PickedDimensions, along: dict[int, int]) -> Any | None:
    """What is gathered where every part of the index counts: the operand, its dimensions in other places. None where
    slices are not of all there is, and where the operand is an argument: the rows of a table of positions are those of
    a weight, whose gradient is scattered, and not the positions of a sequence.

    along: dimension of the operand -> that of the indices that counts it.
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
    return ir.Operation.create(
        "stablehlo.broadcast_in_dim",
        results=[result],
        operands=[gather.operands[0]],
        attributes={"broadcast_dimensions": ir.DenseI64ArrayAttr.get(places)},
        loc=gather.location,
        ip=ir.InsertionPoint(gather),
    ).results[0]


def _counted(operation: Any, picked: PickedDimensions, parts: list[Any]) -> dict[int, tuple[int, int]]:
    """Part (by number) -> the operand's dimension that it speaks of, and that of the indices along which it counts."""
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
    """The pieces that were put together along the dimension of the parts."""
    owner = indices.owner
    shape = ir.RankedTensorType(indices.type).shape
    if vector >= len(shape):
        return []
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.concatenate":
        return [(indices, shape[vector])]
    if int(ir.IntegerAttr(owner.attributes["dimension"]).value) != vector:
        return []
    return [part for piece in owner.operands for part in _parts(piece, vector)]


def _joined(parts: list[Any], dim: int, whole: Any, before: Any) -> Any:
    """The parts side by side, in front of an operation. whole: type of all the parts there were."""
    if len(parts) == 1:
        return parts[0]
    kind = ir.RankedTensorType(whole)
    shape = list(kind.shape)
    shape[dim] = len(parts)
    return ir.Operation.create(
        "stablehlo.concatenate",
        results=[ir.RankedTensorType.get(shape, kind.element_type)],
        operands=parts,
        attributes={"dimension": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), dim)},
        loc=before.location,
        ip=ir.InsertionPoint(before),
    ).results[0]


def counts_along(value: Any) -> int | None:
    """The dimension along which each element says its own place (0, 1, 2, …); None where there is none.

    A dimension of one element does not count.
    """
    found = _seen_to_count(value, _STEPS)
    return _computed_to_count(value) if found is None else found


def _computed_to_count(value: Any) -> int | None:
    """The same of an array that is computed from nothing, whatever it is computed with."""
    elements = known_numbers(value)
    if elements is None or elements.dtype == bool:
        return None
    sizes = enumerate(elements.shape)
    return next((d for d, size in sizes if size > 1 and bool((elements == _places(elements.shape, d)).all())), None)


def _places(shape: tuple[int, ...], dim: int) -> NDArray[np.int64]:
    """[shape] each element's place along one of the dimensions."""
    return np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])


def _seen_to_count(value: Any, steps: int) -> int | None:
    """The same as far as it can be seen without computing: of arrays of any size."""
    owner = value.owner
    if isinstance(owner, ir.Block) or not steps:
        return None
    shape = list(ir.RankedTensorType(value.type).shape)
    dim: int | None = None
    match owner.name:
        case "stablehlo.iota":
            dim = int(ir.IntegerAttr(owner.attributes["iota_dimension"]).value)
        case "stablehlo.constant" if len(shape) == 1 and 1 < shape[0] <= _MOST_COUNTED:
            literal = owner.attributes["value"]
            counts = isinstance(literal, ir.DenseIntElementsAttr) and not literal.is_splat
            dim = 0 if counts and list(literal) == list(range(shape[0])) else None
        case "stablehlo.convert" if isinstance(ir.RankedTensorType(value.type).element_type, ir.IntegerType):
            dim = _seen_to_count(owner.operands[0], steps - 1)
        case "stablehlo.broadcast_in_dim":
            inner = _seen_to_count(owner.operands[0], steps - 1)
            dim = None if inner is None else numbers(owner, "broadcast_dimensions")[inner]
        case "stablehlo.transpose":
            inner = _seen_to_count(owner.operands[0], steps - 1)
            dim = None if inner is None else numbers(owner, "permutation").index(inner)
        case "stablehlo.reshape":
            inner = _seen_to_count(owner.operands[0], steps - 1)
            dim = None if inner is None else _reshaped(list(owner.operands[0].type.shape), shape, inner)
        case "stablehlo.select":
            dim = _wrapped(owner, steps)
    return dim if dim is not None and shape[dim] > 1 else None


def _reshaped(before: list[int], after: list[int], dim: int) -> int | None:
    """The dimension that becomes of one that stays what it is in a reshape."""
    outer, size = prod(before[:dim]), before[dim]
    return next((d for d, s in enumerate(after) if s == size and prod(after[:d]) == outer), None)


def _wrapped(select: Any, steps: int) -> int | None:
    """Of `x < 0 ? x + n : x`, as Python's negative indices are written, what x is: places are not negative."""
    asked, _, value = select.operands
    question = asked.owner
    if isinstance(question, ir.Block) or question.name != "stablehlo.compare":
        return None
    less = "LT" in str(question.attributes["comparison_direction"])
    if not less or question.operands[0] != value or splat_value(question.operands[1]) != 0:
        return None
    return _seen_to_count(value, steps - 1)
