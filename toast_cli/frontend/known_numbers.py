"""Evaluates integers that a program computes from constants and iotas alone.

`arange(batch * beams) // beams`, with which beam searches index a batch, becomes twenty operations of JAX's floor
division. Evaluating them shows the index's pattern.

In: a value. Out: its elements, or None if it depends on an argument, is not of integers or booleans, is large,
or is made by an unsupported operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toast_cli.frontend.idle import numbers
from toast_cli.xla import ir

# Limits: operations evaluated for one value, and elements of the largest array among them.
MOST_OPERATIONS = 64
MOST_ELEMENTS = 1 << 20

Array = NDArray[Any]
_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip


def known_numbers(value: Any) -> Array | None:
    """The elements of a value of integers or booleans, in its shape; None if they are not known."""
    makers: list[Any] = []
    places: dict[Any, int] = {}
    waiting = [value]
    while waiting:  # dependences, the last first
        handle = waiting[-1]
        maker = before_loops(handle).owner
        if isinstance(maker, ir.Block) or maker.name not in _COMPUTED or not _is_known(handle.type):
            return None
        missing = [operand for operand in maker.operands if operand not in places]
        if missing:
            waiting += missing
        else:
            waiting.pop()
            if handle not in places:
                places[handle] = len(makers)
                makers.append(maker)
        if len(places) + len(waiting) > MOST_OPERATIONS:
            return None
    found: list[Array] = []
    with np.errstate(over="ignore"):  # integers wrap in StableHLO, too
        for maker in makers:
            made = _COMPUTED[maker.name](maker, [found[places[operand]] for operand in maker.operands])
            if made is None:
                return None
            found.append(made)
    return found[-1]


def before_loops(value: Any) -> Any:
    """What a value is before the loops that pass it to their bodies unchanged; other values as they are."""
    while isinstance(value.owner, ir.Block):
        loop = value.owner.owner.operation
        if loop.name != "stablehlo.while":
            return value
        body, number = loop.regions[1].blocks[0], ir.BlockArgument(value).arg_number
        if body.operations[len(body.operations) - 1].operands[number] != body.arguments[number]:
            return value
        value = loop.operands[number]
    return value


def distinct(*arrays: Array) -> list[Array]:
    """Views of arrays, broadcast to one shape, with one element along dimensions in which all of them repeat."""
    alike = np.broadcast_arrays(*arrays)
    kept = tuple(slice(None if any(one.strides[dim] for one in alike) else 1) for dim in range(alike[0].ndim))
    return [one[kept] for one in alike]


def _is_small(shape: Sequence[int]) -> bool:
    """True if an array of a shape may be written to memory."""
    return prod(shape) <= MOST_ELEMENTS


def _is_known(kind: Any) -> bool:
    """True for types of arrays that can be evaluated here."""
    shaped = isinstance(kind, ir.RankedTensorType) and kind.has_static_shape
    return shaped and _dtype(kind.element_type) is not None


def _dtype(element: Any) -> np.dtype[Any] | None:
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
    along = np.arange(shape[dim]).astype(_dtype(maker.results[0].type.element_type))
    return np.broadcast_to(along.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)


def _constant(maker: Any, _: Sequence[Array]) -> Array | None:
    literal, element = maker.attributes["value"], maker.results[0].type.element_type
    if not isinstance(literal, ir.DenseIntElementsAttr):
        return None
    if literal.is_splat:
        return np.broadcast_to(np.array(literal.get_splat_value().value, _dtype(element)), _shape(maker))
    return np.array(list(literal), _dtype(element)).reshape(_shape(maker)) if _is_small(_shape(maker)) else None


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
    kind = _dtype(maker.results[0].type.element_type)
    return _elementwise(lambda array: array.astype(kind))(maker, arrays)


def _elementwise(function: Callable[..., Array]) -> Callable[[Any, Sequence[Array]], Array | None]:
    """Evaluates a function on the elements that differ."""

    def evaluated(maker: Any, arrays: Sequence[Array]) -> Array | None:
        few = distinct(*arrays)
        return np.broadcast_to(function(*few), _shape(maker)) if _is_small(few[0].shape) else None

    return evaluated


# Supported operation -> a function that evaluates it.
_COMPUTED: dict[str, Callable[[Any, Sequence[Array]], Array | None]] = {
    "stablehlo.iota": _iota,
    "stablehlo.constant": _constant,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reshape": _reshape,
    "stablehlo.transpose": lambda maker, arrays: arrays[0].transpose(numbers(maker, "permutation")),
    "stablehlo.slice": _slice,
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
