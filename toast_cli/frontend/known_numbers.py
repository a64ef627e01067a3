"""Integers that a program computes from constants and iotas alone, and what follows from them: branches that are
always taken, and gathers that pick one element for each position of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toast_cli.frontend.inline import moved_out, numbers, replace_operation
from toast_cli.program.ops import CASE, CONSTANT, IF, SELECT, WHILE
from toast_cli.xla import (
    PickedDimensions,
    attributes_of,
    ir,
    picked_dimensions,
    run_passes,
    splat_number,
    terminator,
    walk_ops,
    with_picked_dimensions,
)
from toast_cli.xla.build import Builder

# ---------------------------------------------------------------- known integers
# Evaluates integers that a program computes from constants and iotas alone.
#
# `arange(batch * beams) // beams`, with which beam searches index a batch, becomes twenty operations of JAX's floor
# division. Evaluating them shows the index's pattern.

# Limits: operations evaluated for one value, and elements of the largest array among them.
MOST_OPERATIONS = 64
MOST_ELEMENTS = 1 << 20

Array = NDArray[Any]
_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip


def known_numbers(value: Any, elements_of: Mapping[Any, Array] = MappingProxyType({})) -> Array | None:
    """The elements of a value of integers or booleans, in its shape; None if they are not known.

    Args:
        elements_of: elements of values that the caller knows, such as the counter of a loop.
    """
    makers: list[Any] = []  # an operation, or elements
    places: dict[Any, int] = {}
    waiting = [value]
    while waiting:  # dependences, the last first
        handle = waiting[-1]
        origin = before_loops(handle)
        maker = elements_of.get(origin, origin.owner)
        stated = isinstance(maker, np.ndarray)
        if not stated and (isinstance(maker, ir.Block) or maker.name not in _COMPUTED or _dtype(handle.type) is None):
            return None
        missing = [] if stated else [operand for operand in maker.operands if operand not in places]
        if missing:
            waiting += missing
        else:
            waiting.pop()
            if handle not in places:
                places[handle] = len(makers)
                makers.append(maker)
        if len(places) + len(waiting) > MOST_OPERATIONS:
            return None
    arrays: list[Array] = []
    with np.errstate(over="ignore"):  # integers wrap in StableHLO, too
        for maker in makers:
            array = maker
            if not isinstance(maker, np.ndarray):
                array = _COMPUTED[maker.name](maker, [arrays[places[operand]] for operand in maker.operands])
            if array is None:
                return None
            arrays.append(array)
    return arrays[-1]


def before_loops(value: Any) -> Any:
    """What a value is before the loops that pass it to their bodies unchanged; other values as they are."""
    while isinstance(value.owner, ir.Block):
        loop = value.owner.owner.operation
        if loop.name != WHILE:
            return value
        body, number = loop.regions[1].blocks[0], ir.BlockArgument(value).arg_number
        if terminator(body).operands[number] != body.arguments[number]:
            return value
        value = loop.operands[number]
    return value


def distinct(*arrays: Array) -> list[Array]:
    """Views of arrays, broadcast to one shape, with one element along dimensions in which all of them repeat."""
    alike = np.broadcast_arrays(*arrays)
    kept = tuple(slice(None if any(array.strides[dim] for array in alike) else 1) for dim in range(alike[0].ndim))
    return [array[kept] for array in alike]


def _is_small(shape: Sequence[int]) -> bool:
    """True if an array of a shape may be written to memory."""
    return prod(shape) <= MOST_ELEMENTS


def _dtype(kind: Any) -> np.dtype[Any] | None:
    """The element type of arrays that can be evaluated here; None for other types of values."""
    element = kind.element_type if isinstance(kind, ir.RankedTensorType) and kind.has_static_shape else None
    if not isinstance(element, ir.IntegerType) or element.width not in (1, 8, 16, 32, 64):
        return None
    if element.width == 1:
        return np.dtype(bool)
    return np.dtype(f"{'u' if element.is_unsigned else ''}int{element.width}")


def _shape(maker: Any) -> list[int]:
    return list(ir.RankedTensorType(maker.results[0].type).shape)


def _iota(maker: Any, _: Sequence[Array]) -> Array | None:
    shape, dim = _shape(maker), int(ir.IntegerAttr(maker.attributes["iota_dimension"]).value)
    if not _is_small(shape[dim : dim + 1]):
        return None
    along = np.arange(shape[dim]).astype(_dtype(maker.results[0].type))
    return np.broadcast_to(along.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)


def _constant(maker: Any, _: Sequence[Array]) -> Array | None:
    literal, dtype = maker.attributes["value"], _dtype(maker.results[0].type)
    if not isinstance(literal, ir.DenseIntElementsAttr):
        return None
    if literal.is_splat:
        return np.broadcast_to(np.array(literal.get_splat_value().value, dtype), _shape(maker))
    return np.array(list(literal), dtype).reshape(_shape(maker)) if _is_small(_shape(maker)) else None


def _broadcast(maker: Any, arrays: Sequence[Array]) -> Array:
    shape, places = _shape(maker), numbers(maker, "broadcast_dimensions")
    sizes = [1] * len(shape)
    for size, place in zip(arrays[0].shape, places, strict=True):
        sizes[place] = size
    order = np.argsort(places)
    return np.broadcast_to(arrays[0].transpose(order).reshape(sizes), shape)


def _slice(maker: Any, arrays: Sequence[Array]) -> Array:
    bounds = (numbers(maker, name) for name in ("start_indices", "limit_indices", "strides"))
    return arrays[0][tuple(slice(*bound) for bound in zip(*bounds, strict=True))]


def _dynamic_slice(maker: Any, arrays: Sequence[Array]) -> Array:
    """A slice at indices that StableHLO clamps, so that it lies within the array."""
    sizes = _shape(maker)
    starts = [min(max(int(start), 0), n - m) for start, n, m in zip(arrays[1:], arrays[0].shape, sizes, strict=True)]
    return arrays[0][tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]


def _reshape(maker: Any, arrays: Sequence[Array]) -> Array | None:
    before, after = arrays[0].shape, _shape(maker)
    is_view = [n for n in before if n > 1] == [n for n in after if n > 1]
    return arrays[0].reshape(after) if is_view or _is_small(after) else None


def _concatenate(maker: Any, arrays: Sequence[Array]) -> Array | None:
    if not _is_small(_shape(maker)):
        return None
    return np.concatenate(arrays, int(ir.IntegerAttr(maker.attributes["dimension"]).value))


def _compare(maker: Any, arrays: Sequence[Array]) -> Array | None:
    direction = str(maker.attributes["comparison_direction"]).removesuffix(">").split()[-1]
    return _elementwise(_COMPARISONS[direction])(maker, arrays)


def _divide(_: Any, arrays: Sequence[Array]) -> Array | None:
    """Division that rounds towards zero, as in StableHLO."""

    def divided(left: Array, right: Array) -> Array:
        return ((left - np.fmod(left, right)) // right).astype(left.dtype)

    return _elementwise(divided)(_, arrays) if distinct(arrays[1])[0].all() else None


def _remainder(_: Any, arrays: Sequence[Array]) -> Array | None:
    return _elementwise(np.fmod)(_, arrays) if distinct(arrays[1])[0].all() else None


def _convert(maker: Any, arrays: Sequence[Array]) -> Array | None:
    dtype = _dtype(maker.results[0].type)
    return _elementwise(lambda array: array.astype(dtype))(maker, arrays)


def _elementwise(function: Callable[..., Array]) -> Callable[[Any, Sequence[Array]], Array | None]:
    """Evaluates a function on the elements that differ."""

    def evaluated(maker: Any, arrays: Sequence[Array]) -> Array | None:
        few = distinct(*arrays)
        return np.broadcast_to(function(*few), _shape(maker)) if _is_small(few[0].shape) else None

    return evaluated


# Supported operation -> a function that evaluates it.
_COMPUTED: dict[str, Callable[[Any, Sequence[Array]], Array | None]] = {
    "stablehlo.iota": _iota,
    CONSTANT: _constant,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reshape": _reshape,
    "stablehlo.transpose": lambda maker, arrays: arrays[0].transpose(numbers(maker, "permutation")),
    "stablehlo.slice": _slice,
    "stablehlo.dynamic_slice": _dynamic_slice,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.convert": _convert,
    "stablehlo.compare": _compare,
    "stablehlo.select": _elementwise(np.where),
    "stablehlo.divide": _divide,
    "stablehlo.remainder": _remainder,
    "stablehlo.sign": _elementwise(np.sign),
    "stablehlo.negate": _elementwise(np.negative),
    "stablehlo.add": _elementwise(np.add),
    "stablehlo.subtract": _elementwise(np.subtract),
    "stablehlo.multiply": _elementwise(np.multiply),
    "stablehlo.minimum": _elementwise(np.minimum),
    "stablehlo.maximum": _elementwise(np.maximum),
    "stablehlo.and": _elementwise(np.bitwise_and),
    "stablehlo.or": _elementwise(np.bitwise_or),
    "stablehlo.not": _elementwise(np.invert),
}


# ---------------------------------------------------------------- branches that are always taken
# Removes conditionals with a constant predicate, which a `lax.cond` on a Python bool leaves (optax's `MultiSteps`
# decides that way whether to skip an update), and those whose branches are alike: in a `jax.export` for several
# platforms each `jnp.einsum` is one.
#
# XLA inlines the branch before it partitions, so its operations fuse with those around them; the cost model would
# count the conditional's results as separate arrays.

DROP_UNREAD = "func.func(trivial-dce)"
CONDITIONALS = frozenset({CASE, IF})
DECIDED = CONDITIONALS | {SELECT}


def take_known_branches(module: Any) -> None:
    """Inlines the known branches, inner conditionals first, since these may decide outer ones."""
    decided = 0
    for operation in walk_ops(module, *DECIDED, inner_first=True):
        number = predicate_number(operation.operands[0])
        if number is None and operation.name != SELECT:
            first, *others = (region.blocks[0] for region in operation.regions)
            number = 0 if all(_alike(first, other, {}) for other in others) else None
        if number is not None:
            replace_operation(operation, outcome(operation, number))
            decided += 1
    if decided:
        run_passes(module, DROP_UNREAD)


def _alike(first: Any, second: Any, same: dict[Any, Any]) -> bool:
    """Whether two blocks hold the same operations on the same values. same: value in the first -> its equal in the
    second; values from outside are their own."""
    lefts, rights = list(first.operations), list(second.operations)
    if len(lefts) != len(rights) or [a.type for a in first.arguments] != [b.type for b in second.arguments]:
        return False
    same.update(zip(first.arguments, second.arguments, strict=True))
    for left, right in zip(lefts, rights, strict=True):
        if left.name != right.name or attributes_of(left) != attributes_of(right):
            return False
        if [a.type for a in left.results] != [b.type for b in right.results]:
            return False
        if [same.get(value, value) for value in left.operands] != list(right.operands):
            return False
        blocks = [[block for region in op.regions for block in region.blocks] for op in (left, right)]
        if len(blocks[0]) != len(blocks[1]) or not all(_alike(a, b, same) for a, b in zip(*blocks, strict=True)):
            return False
        same.update(zip(left.results, right.results, strict=True))
    return True


def outcome(operation: Any, number: int) -> list[Any]:
    """Results of a conditional with the index, or predicate, `number`; moves the branch's operations in front of it."""
    if operation.name == SELECT:
        return [operation.operands[1 if number else 2]]
    branches = list(operation.regions)
    if operation.name == IF:
        branch = branches[0 if number else 1]
    else:  # an index out of range selects the last branch
        branch = branches[number if 0 <= number < len(branches) else -1]
    return moved_out(branch.blocks[0], operation)


def predicate_number(value: Any) -> int | None:
    """The value of a splat of integers or booleans, if the program states it; looks through conversions and the clamp
    of `lax.switch`."""
    stated = splat_number(value)
    if stated is not None:
        return int(stated)
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    if owner.name == "stablehlo.convert":
        inner = predicate_number(owner.operands[0])
        return inner if isinstance(value.type.element_type, ir.IntegerType) else None
    if owner.name == "stablehlo.clamp":
        low, number, high = (predicate_number(operand) for operand in owner.operands)
        return None if low is None or number is None or high is None else max(low, min(number, high))
    return None


# ---------------------------------------------------------------- indices that count the batch
# Rewrites gathers and scatters that pick element `b` of a batch for position `b`, so that they have a batching
# dimension.
#
# `take_along_axis` is written in two ways. JAX from 0.4.31 gives operand and indices a shared batching dimension.
# Older versions, PyTorch/XLA and TensorFlow concatenate an iota (0, 1, 2, … along the batch dimension) to the index.
# Devices then seem to gather rows from anywhere in the batch, so the loss of a language model, and everything after
# it, could not be split along the batch.

PICKS = ("stablehlo.gather", "stablehlo.scatter")

IndexPart = tuple[Any, int]  # a value, and its size along the index vector dimension


def share_batches(module: Any) -> None:
    """Rewrites every gather and scatter of which a component of the index is an iota."""
    with module.context, ir.Location.unknown():
        for operation in walk_ops(module, *PICKS):
            share_batch(operation)


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
        counted.popitem()
    if not counted:
        return
    remaining = [value for k, (value, _) in enumerate(parts) if k not in counted]
    pairs = sorted([*zip(picked.batching, picked.counted, strict=True), *counted.values()])
    after = replace(
        picked,
        single=tuple(d for d in picked.single if d not in {d for d, _ in counted.values()}),
        batching=tuple(d for d, _ in pairs),
        counted=tuple(d for _, d in pairs),
        mapped=tuple(d for k, d in enumerate(picked.mapped) if k not in counted),
    )
    operation.operands[place] = Builder.before(operation).concatenate(remaining, picked.vector)
    operation.attributes[name] = with_picked_dimensions(attribute, after)


def _counted(operation: Any, picked: PickedDimensions, parts: list[Any]) -> dict[int, tuple[int, int]]:
    """Index component (by number) -> the operand's dimension that it indexes, and the indices'
    dimension of its iota."""
    shape = ir.RankedTensorType(operation.operands[0].type).shape
    batching: dict[int, tuple[int, int]] = {}
    used = set(picked.counted)
    for k, (part, dim) in enumerate(zip(parts, picked.mapped, strict=True)):
        along = counts_along(part)
        if along is None or along in used or along == picked.vector or dim not in picked.single:
            continue
        if ir.RankedTensorType(part.type).shape[along] == shape[dim]:
            batching[k] = (dim, along)
            used.add(along)
    return batching


def _parts(indices: Any, vector: int) -> list[IndexPart]:
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
        actual, expected = distinct(elements, counted)
        if np.array_equal(actual, expected):
            return dim
    return None
