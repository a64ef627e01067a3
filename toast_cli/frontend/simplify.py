"""Rewrites that let a dimension be split where its form in the program does not: shifts and rolls become pads, tuples
become their arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from toast_cli.frontend.inline import numbers
from toast_cli.program.ops import BROADCAST_IN_DIM, CONCATENATE, CONSTANT, CONVERT, PAD, SLICE
from toast_cli.xla import attributes_of, create, ir, operations_in, walk_ops
from toast_cli.xla.build import INDEX, Builder

# ---------------------------------------------------------------- shifts
# Rewrites slices that are padded or concatenated again as pads of the whole array; the padding may be negative.
#
# `jnp.roll`, causal shifts and sliding buffers move an array along a dimension: they slice it into pieces of odd
# lengths and concatenate these with others. No mesh splits a dimension of 61 of 64 elements, so each piece would be
# gathered. As pads, all arrays have 64 elements, and devices send each other only the elements that cross (a halo
# exchange, see `plan.reshard`):
#
#     slice(pad(x))                 a pad of x
#     pad(slice(x))                 a pad of x, if the elements that the slice removes are not visible
#     concatenate(zeros, slice(x))  a pad of x
#     concatenate(slice(x, 61..64), slice(x, 0..61))
#         select(position < 3, pad(x, -61, +61), pad(x, +3, -3))
#
# Results are the same, bit by bit. Without this, steps of stencils by `jnp.roll` take 5 to 16 times as long on 16
# chips, and token shifts along one long sequence three times.

SHIFTED = frozenset({CONCATENATE, PAD, SLICE})
_OWN = frozenset(
    {
        "dimension", "edge_padding_high", "edge_padding_low", "interior_padding", "limit_indices", "start_indices",
        "strides",
    }
)  # fmt: skip


class ElementRange(NamedTuple):
    """Elements of an array along one dimension, first to last (excluded); all other dimensions are whole."""

    array: Any
    first: int
    last: int


def rewrite_shifts(module: Any) -> None:
    """Rewrites each slice, pad and concatenation that is one of the above, operands before their users. One with a
    sharding stays, because the sharding refers to this very array."""
    operations = [operation for operation in walk_ops(module, *SHIFTED) if _OWN.issuperset(operation.attributes)]
    with module.context, ir.Location.unknown():
        for operation in operations:
            pad = _REWRITES[operation.name](operation)
            if pad is not None:
                operation.results[0].replace_all_uses_with(pad)
        for operation in reversed(operations):
            if not list(operation.results[0].uses):
                operation.erase()


def _of_slice(operation: Any) -> Any | None:
    """Rewrites a slice that removes only padding."""
    padding = _made_by(operation.operands[0], PAD)
    if padding is None or any(n != 1 for n in numbers(operation, "strides")):
        return None
    low, high = _edges(padding)
    padded = _shape(operation.operands[0])
    starts, limits = numbers(operation, "start_indices"), numbers(operation, "limit_indices")
    cut = [dim for dim, n in enumerate(padded) if (starts[dim], limits[dim]) != (0, n)]
    if not cut or any((low[dim], high[dim]) == (0, 0) for dim in cut):
        return None
    edges = [low[dim] - starts[dim] for dim in range(len(padded))]
    return _pad(operation, padding.operands[0], padding.operands[1], edges, numbers(padding, "interior_padding"))


def _of_padding(operation: Any) -> Any | None:
    """Rewrites a pad of a slice that removed nothing on the padded sides of the dimension."""
    low, high = _edges(operation)
    interior = numbers(operation, "interior_padding")
    cut = _made_by(operation.operands[0], SLICE)
    if cut is None or any(n != 1 for n in numbers(cut, "strides")):
        return None
    starts, limits, whole = numbers(cut, "start_indices"), numbers(cut, "limit_indices"), _shape(cut.operands[0])
    for dim, size in enumerate(whole):
        first, rest = starts[dim], size - limits[dim]
        if (first or rest) and (interior[dim] or low[dim] == high[dim] == 0):
            return None  # the array would be padded where it is only sliced
        if (first and low[dim] > 0) or (rest and high[dim] > 0):
            return None
    if list(whole) == list(_shape(operation.operands[0])):
        return None
    edges = [low[dim] - starts[dim] for dim in range(len(whole))]
    return _pad(operation, cut.operands[0], operation.operands[1], edges, interior)


def _of_concatenation(operation: Any) -> Any | None:
    """Rewrites a shifted array beside a constant, or two shifted arrays beside each other."""
    dim = ir.IntegerAttr(operation.attributes["dimension"]).value
    if not isinstance(operation.results[0].type.element_type, ir.FloatType | ir.IntegerType):
        return None
    total = _shape(operation.results[0])[dim]
    pieces = [_piece(handle, dim) for handle in operation.operands]
    moving = [p for p, piece in enumerate(pieces) if _shape(piece.array)[dim] == total != piece.last - piece.first]
    if len(pieces) != 2 or not moving:
        return None
    if len(moving) == 1:
        return _beside_constant(operation, dim, pieces[moving[0]], operation.operands[1 - moving[0]], moving[0])
    lengths = [piece.last - piece.first for piece in pieces]
    if lengths[0] == lengths[1]:  # halves of a head's width, which rotary embeddings exchange
        return None
    build = Builder.before(operation)
    zero = build.constant(0, str(operation.results[0].type.element_type))  # padding that no element of the result shows
    begins = [0, lengths[0]]
    shifted = [
        _moved(operation, piece, zero, dim, begin - piece.first) for piece, begin in zip(pieces, begins, strict=True)
    ]
    shape = _shape(operation.results[0])
    places, first = build.iota(INDEX, (total,), 0), build.constant(lengths[0], INDEX, (total,))
    return build.select(build.broadcast(build.compare("LT", places, first), shape, [dim]), *shifted)


def _beside_constant(operation: Any, dim: int, piece: ElementRange, other: Any, place: int) -> Any | None:
    """place: operand number of the piece; the other is the constant. None if more than the piece would be visible."""
    element = _element(other, operation)
    missing = piece.first if place == 1 else _shape(piece.array)[dim] - piece.last
    if element is None or missing:
        return None
    begin = _shape(other)[dim] if place == 1 else 0
    return _moved(operation, piece, element, dim, begin - piece.first)


_REWRITES = {SLICE: _of_slice, PAD: _of_padding, CONCATENATE: _of_concatenation}


# -- recognition ------------------------------------------------------------------------------------------------------


def _made_by(handle: Any, name: str) -> Any | None:
    owner = handle.owner
    if isinstance(owner, ir.Block) or owner.name != name or not _OWN.issuperset(owner.attributes):
        return None
    return owner


def _piece(handle: Any, dim: int) -> ElementRange:
    """The slice of an array, along this dimension only, that a value is; the whole value if it is no such slice."""
    shape = _shape(handle)
    cut = _made_by(handle, SLICE)
    if cut is not None and all(n == 1 for n in numbers(cut, "strides")):
        array = cut.operands[0]
        if all(d == dim or n == shape[d] for d, n in enumerate(_shape(array))):
            first = numbers(cut, "start_indices")[dim]
            return ElementRange(array, first, first + shape[dim])
    return ElementRange(handle, 0, shape[dim])


def _element(handle: Any, before: Any) -> Any | None:
    """The scalar that every element of a value equals; None if they may differ."""
    owner = handle.owner
    if isinstance(owner, ir.Block):
        return None
    if owner.name == BROADCAST_IN_DIM and not _shape(owner.operands[0]):
        return owner.operands[0]
    if owner.name == CONVERT:
        inner, build = _element(owner.operands[0], before), Builder.before(before)
        return None if inner is None else build.one("convert", [inner], build.like(handle, ()))
    if owner.name != CONSTANT:
        return None
    value = owner.attributes["value"]
    if not isinstance(value, ir.DenseElementsAttr) or not value.is_splat:
        return None
    build = Builder.before(before)
    kind = build.like(handle, ())
    return build.one("constant", [], kind, value=ir.DenseElementsAttr.get_splat(kind, value.get_splat_value()))


def _edges(padding: Any) -> tuple[list[int], list[int]]:
    return numbers(padding, "edge_padding_low"), numbers(padding, "edge_padding_high")


def _shape(handle: Any) -> tuple[int, ...]:
    return tuple(handle.type.shape)


# -- rewriting --------------------------------------------------------------------------------------------------------


def _pad(operation: Any, array: Any, element: Any, low: Sequence[int], interior: Sequence[int]) -> Any:
    """The array padded by these amounts in front, and behind so that it gets the result's shape."""
    result = operation.results[0].type
    inside = [n + max(n - 1, 0) * holes for n, holes in zip(_shape(array), interior, strict=True)]
    high = [total - n - first for total, n, first in zip(result.shape, inside, low, strict=True)]
    if not any(low) and not any(high) and not any(interior):
        return array
    return Builder.before(operation).pad(array, element, low, high, interior)


def _moved(operation: Any, piece: ElementRange, element: Any, dim: int, by: int) -> Any:
    """The piece's array, shifted by this many elements along a dimension of the operation's result."""
    rank = len(_shape(piece.array))
    return _pad(operation, piece.array, element, [by if d == dim else 0 for d in range(rank)], [0] * rank)


# ---------------------------------------------------------------- tuples
# Flattens tuples: HLO passes several arrays as one value; the result has only arrays.

# Attributes that describe one argument's buffer and do not apply to each array of a tuple.
PER_BUFFER = frozenset({"tf.aliasing_output", "mhlo.sharding", "sdy.sharding"})


def flatten_tuples(module: Any, *, inside: bool) -> None:
    """Removes every tuple. Call this after `legalize`: then no operation with regions takes or returns one.

    inside: True if any operation returns a tuple; function signatures are checked here.
    """
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    boundary = [
        function for function in functions if any(map(is_tuple, (*function.type.inputs, *function.type.results)))
    ]
    if not boundary and not inside:
        return
    with module.context, ir.Location.unknown():
        for function in boundary:
            flatten_boundary(function)
        for function in functions:
            flatten_body(function)


def is_tuple(kind: Any) -> bool:
    return isinstance(kind, ir.TupleType)


def leaf_types(kind: Any) -> list[Any]:
    """The array types in a type, depth first."""
    if not is_tuple(kind):
        return [kind]
    return [leaf for k in range(kind.num_types) for leaf in leaf_types(kind.get_type(k))]


def tuple_operations(function: Any) -> list[Any]:
    """Operations that take or return a tuple, in program order."""
    return [
        operation
        for operation in operations_in(function)
        if any(is_tuple(value.type) for value in (*operation.results, *operation.operands))
    ]


def flatten_boundary(function: Any) -> None:
    """Flattens arguments and results of a function; inside, tuples are rebuilt from them and taken apart again."""
    kind = function.type
    inputs = [leaf_types(entry) for entry in kind.inputs]
    results = [leaf_types(entry) for entry in kind.results]
    split_attributes(function, "arg_attrs", inputs)
    split_attributes(function, "res_attrs", results)
    flat = ir.FunctionType.get([t for leaves in inputs for t in leaves], [t for leaves in results for t in leaves])
    function.operation.attributes["function_type"] = ir.TypeAttr.get(flat)
    if function.is_external:
        return
    block = function.entry_block
    old = list(block.arguments)
    start = block.operations[0].operation
    for argument, leaves in zip(old, inputs, strict=True):
        fresh = [block.add_argument(leaf, argument.location) for leaf in leaves]
        argument.replace_all_uses_with(packed(argument.type, fresh, start))
    for _ in old:
        block.erase_argument(0)


def split_attributes(function: Any, name: str, leaves: list[list[Any]]) -> None:
    """Gives each array of an argument (or result) the attributes of the whole."""
    attributes = function.operation.attributes
    if name not in attributes:
        return
    split = []
    for entry, arrays in zip(attributes[name], leaves, strict=True):
        kept = {item.name: item.attr for item in entry if len(arrays) == 1 or item.name not in PER_BUFFER}
        split += [ir.DictAttr.get(kept)] * len(arrays)
    attributes[name] = ir.ArrayAttr.get(split)


def packed(kind: Any, arrays: list[Any], before: Any) -> Any:
    """Builds a value of type `kind` from its arrays, which it removes from the front of the list."""
    if not is_tuple(kind):
        return arrays.pop(0)
    parts = [packed(kind.get_type(k), arrays, before) for k in range(kind.num_types)]
    return create("stablehlo.tuple", parts, [kind], {}, before)[0]


def flatten_body(function: Any) -> None:
    """Replaces tuples by their arrays everywhere in a function, definitions before uses."""
    arrays: dict[Any, list[Any]] = {}  # tuple value -> its arrays
    dead: list[Any] = []

    def leaves(value: Any) -> list[Any]:
        return arrays[value] if is_tuple(value.type) else [value]

    for operation in tuple_operations(function):
        operands = [leaf for value in operation.operands for leaf in leaves(value)]
        if operation.name in ("stablehlo.tuple", "mhlo.copy"):
            outcome = operands
        elif operation.name == "stablehlo.get_tuple_element":
            outcome = element(operation, operands)
        else:
            outcome = rebuilt(operation, operands)
        for result in operation.results:
            leaf_values = [outcome.pop(0) for _ in leaf_types(result.type)]
            if is_tuple(result.type):
                arrays[result] = leaf_values
            else:
                result.replace_all_uses_with(leaf_values[0])
        dead.append(operation)
    for operation in reversed(dead):
        operation.erase()


def element(operation: Any, arrays: list[Any]) -> list[Any]:
    """The arrays of one element of a tuple."""
    kind = operation.operands[0].type
    index = ir.IntegerAttr(operation.attributes["index"]).value
    before = sum(len(leaf_types(kind.get_type(k))) for k in range(index))
    return arrays[before : before + len(leaf_types(kind.get_type(index)))]


def rebuilt(operation: Any, operands: list[Any]) -> list[Any]:
    """Rebuilds an operation (a custom call, a call, a return) with arrays for tuples; returns its results."""
    types = [leaf for result in operation.results for leaf in leaf_types(result.type)]
    attributes = attributes_of(operation)
    attributes.pop("xla_shape", None)
    return create(operation.name, operands, types, attributes, operation)
