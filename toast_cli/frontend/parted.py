"""Splits fused matrix products: a dimension that concatenates several arrays becomes two, parts and width; see
`toast_cli.program.fused_products`.

In: a `Source`. Out: another one that computes the same from the same arguments, with products on arrays of one
more dimension, or None if nothing is fused. Reshapes connect them to the rest of the program; a compiler treats them as
free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from toast_cli import xla
from toast_cli.frontend.idle import numbers
from toast_cli.frontend.inline import replace_operation
from toast_cli.frontend.rewritten import read_rewritten, retyped
from toast_cli.frontend.source import Source
from toast_cli.program.fused_products import Parts, Position, fused_parts
from toast_cli.program.ops import (
    BARRIER,
    BROADCAST_IN_DIM,
    CARRY,
    CONCATENATE,
    DOT_GENERAL,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    PAD,
    REDUCE,
    RESHAPE,
    SLICE,
    TRANSPOSE,
)
from toast_cli.xla import ir, operations_in
from toast_cli.xla.build import Builder

Shape = tuple[int, ...]
Widths = dict[int, int]  # dimension of an array -> elements of each of its parts
_BRANCHES = ("stablehlo.case", "stablehlo.if")


def with_parts(source: Source) -> Source | None:
    """The rewritten program; None if nothing is fused, or if the program states shardings, which would refer to the
    original arrays."""
    parts = None if source.annotations else fused_parts(source.program)
    if parts is None:
        return None
    copy = source.module.operation.clone().operation
    twins = dict(zip(operations_in(source.module.operation), operations_in(copy), strict=True))
    with copy.context, ir.Location.unknown():
        _Rewriter(source, parts, twins).run(xla.main_function(source.module).operation)
    return read_rewritten(source, copy, _notice(source, parts), parted=True)


def _notice(source: Source, parts: Parts) -> str:
    products = [n for n in parts.ops if source.program.ops[n].name == DOT_GENERAL]
    example = max(products, key=lambda n: source.program.ops[n].flops * source.program.ops[n].trips)
    count = "1 product is" if len(products) == 1 else f"{len(products)} products are"
    place = f" (most work: {source.location(example)})" if source.location(example) else ""
    return (
        f"{count} computed with what lies side by side in them as a dimension of its own{place}: the program written "
        "has it so, others need a reshape of the weight to [.., parts, width] there (--as-written: no such plan)"
    )


class _Rewriter:
    """Rewrites ops in place, in program order.

    `twins`: operation of the source -> the operation of the copy that is rewritten.
    """

    def __init__(self, source: Source, parts: Parts, twins: dict[Any, Any]) -> None:
        self._parts, self._twins = parts, twins
        self._positions: dict[Any, dict[Position, int]] = {}  # operation -> split ones of its operands and results
        self._passing: dict[Any, dict[int, Widths]] = defaultdict(dict)  # loop or barrier -> its split values
        self._parted: dict[Any, Any] = {}  # value with the dimension merged -> the same value split
        self._reshapes: list[Any] = []
        self._read = {v for number in parts.ops for v in source.program.ops[number].operands}
        self._numbers = source.numbers
        for number, positions in parts.ops.items():
            use = source.use(number, 0)
            if source.program.ops[number].name in (BARRIER, CARRY):
                self._passing[use.operation][use.operand] = _widths(positions, 0)
            else:
                self._positions[use.operation] = positions

    def run(self, function: Any) -> None:
        """Rewrites the copy of this function."""
        self._block(function.regions[0].blocks[0])
        for reshape in reversed(self._reshapes):
            if not list(reshape.results[0].uses):
                reshape.erase()

    def _block(self, block: Any) -> None:
        for view in block.operations:
            operation = view.operation
            if operation.name == "stablehlo.while":
                self._loop(operation)
            elif operation in self._passing:
                self._barrier(self._twins[operation], self._passing[operation])
            elif operation in self._positions:
                self._write(self._twins[operation], self._positions[operation])
            elif operation.name in _BRANCHES:
                for region in operation.regions:
                    self._block(region.blocks[0])

    def _write(self, operation: Any, positions: dict[Position, int]) -> None:
        handles = [*operation.operands, *operation.results]
        shapes = [tuple(handle.type.shape) for handle in handles]
        widths = [_widths(positions, array) for array in range(len(handles))]
        reads = len(operation.operands)
        for place in range(reads):
            self._read_parts(operation, place, widths[place])
        change = _CHANGES.get(operation.name)
        if change is not None:
            operation = change(operation, shapes, widths) or operation
        for result, wide in zip(operation.results, widths[reads:], strict=True):
            self._take_apart(result, wide, ir.InsertionPoint.after(operation))

    def _barrier(self, operation: Any, passing: dict[int, Widths]) -> None:
        for place, widths in passing.items():
            self._read_parts(operation, place, widths)
            self._take_apart(operation.results[place], widths, ir.InsertionPoint.after(operation))

    def _loop(self, original: Any) -> None:
        operation, passing = self._twins[original], self._passing[original]
        condition, body = (region.blocks[0] for region in original.regions)
        for place, yielded in enumerate(xla.terminator(body).operands):
            value = self._numbers.get(original.operands[place], -1)
            through = yielded == body.arguments[place]  # unchanged; it is read in the loop or behind it
            if through and value in self._parts.values and value in self._read:
                passing[place] = self._parts.values[value]
        inside = [region.blocks[0] for region in operation.regions]
        for place, widths in passing.items():
            self._read_parts(operation, place, widths)
            for block in inside:
                self._take_apart(block.arguments[place], widths, ir.InsertionPoint.at_block_begin(block))
            self._take_apart(operation.results[place], widths, ir.InsertionPoint.after(operation))
        self._block(condition)
        self._block(body)
        for place, widths in passing.items():
            self._read_parts(xla.terminator(inside[1]), place, widths)

    def _read_parts(self, operation: Any, place: int, widths: Widths) -> None:
        """Makes an operation read an operand with its dimensions split."""
        if not widths:
            return
        handle = operation.operands[place]
        shape = expanded(tuple(handle.type.shape), widths)
        known = self._parted.get(handle)
        if known is None or tuple(known.type.shape) != shape:
            known = self._reshape(handle, shape, ir.InsertionPoint(operation), operation.location)
        operation.operands[place] = known

    def _take_apart(self, handle: Any, widths: Widths, at: Any) -> None:
        """Splits dimensions of a value; its users read a reshape of it to the original shape."""
        if widths:
            shape = tuple(handle.type.shape)
            handle.set_type(retyped(handle.type, expanded(shape, widths)))
            whole = self._reshape(handle, shape, at, handle.location)
            handle.replace_all_uses_except(whole, whole.owner.operation)
            self._parted[whole] = handle

    def _reshape(self, handle: Any, shape: Shape, at: Any, location: Any) -> Any:
        made = ir.Operation.create(
            RESHAPE, results=[retyped(handle.type, shape)], operands=[handle], loc=location, ip=at
        )
        self._reshapes.append(made)
        return made.results[0]


def _widths(positions: dict[Position, int], array: int) -> Widths:
    return {dim: width for (at, dim), width in positions.items() if at == array}


def expanded(shape: Shape, widths: Widths) -> Shape:
    """A shape with two dimensions, parts and their width, for each split one."""
    return tuple(
        n for dim, size in enumerate(shape) for n in ((size // widths[dim], widths[dim]) if dim in widths else (size,))
    )


def places(dims: Sequence[int], widths: Widths) -> list[int]:
    """Indices of dimensions of an array after its `widths` dimensions are split in two."""
    first = {dim: dim + sum(parted < dim for parted in widths) for dim in dims}
    return [at for dim in dims for at in ((first[dim], first[dim] + 1) if dim in widths else (first[dim],))]


# -- attributes that name dimensions: each function is given the op, its shapes and its widths, operands before results;
# it returns the op that replaces it, if any

_Change = Callable[[Any, list[Shape], list[Widths]], Any]


def _set(operation: Any, **lists: Sequence[int]) -> None:
    for key, values in lists.items():
        operation.attributes[key] = ir.DenseI64ArrayAttr.get(list(values))


def _broadcast(operation: Any, shapes: list[Shape], widths: list[Widths]) -> None:
    """A dimension of one element is broadcast along the width."""
    target = numbers(operation, "broadcast_dimensions")
    of_operand = {dim: width for dim, width in widths[1].items() if dim in target and target.index(dim) in widths[0]}
    assert len(of_operand) == len(widths[0])
    found = []
    for dim, to in enumerate(target):
        at = places([to], widths[1])
        found += at if dim in widths[0] else at[-1:]
    _set(operation, broadcast_dimensions=found)


def _transpose(operation: Any, shapes: list[Shape], widths: list[Widths]) -> None:
    _set(operation, permutation=places(numbers(operation, "permutation"), widths[0]))


def _reduce(operation: Any, shapes: list[Shape], widths: list[Widths]) -> None:
    _set(operation, dimensions=places(numbers(operation, "dimensions"), widths[0]))


def _concatenate(operation: Any, shapes: list[Shape], widths: list[Widths]) -> None:
    dim = ir.IntegerAttr(operation.attributes["dimension"])
    operation.attributes["dimension"] = ir.IntegerAttr.get(dim.type, places([dim.value], widths[0])[0])


def _in_parts(numbers: list[int], shape: Shape, widths: Widths, rest: Callable[[int], int]) -> list[int]:
    """Per dimension a number of elements; for split dimensions, a number of parts, and `rest` of the width."""
    found: list[int] = []
    for dim in range(len(shape)):
        found += [numbers[dim] // widths[dim], rest(widths[dim])] if dim in widths else [numbers[dim]]
    return found


def _slice(operation: Any, shapes: list[Shape], widths: list[Widths]) -> None:
    starts, limits, strides = (numbers(operation, key) for key in ("start_indices", "limit_indices", "strides"))
    _set(
        operation,
        start_indices=_in_parts(starts, shapes[0], widths[0], lambda _: 0),
        limit_indices=_in_parts(limits, shapes[0], widths[0], lambda width: width),
        strides=[n for dim, n in enumerate(strides) for n in ([1, 1] if dim in widths[0] else [n])],
    )


def _pad(operation: Any, shapes: list[Shape], widths: list[Widths]) -> None:
    keys = ("edge_padding_low", "edge_padding_high", "interior_padding")
    _set(operation, **{key: _in_parts(numbers(operation, key), shapes[0], widths[0], lambda _: 0) for key in keys})


def _dynamic_slice(operation: Any, shapes: list[Shape], widths: list[Widths]) -> Any:
    read, *indices = operation.operands
    operation.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(list(expanded(shapes[-1], widths[-1])))
    return _with_operands(operation, [read, *_in_parts_from(operation, indices, widths[0])])


def _dynamic_update_slice(operation: Any, shapes: list[Shape], widths: list[Widths]) -> Any:
    read, update, *indices = operation.operands
    return _with_operands(operation, [read, update, *_in_parts_from(operation, indices, widths[0])])


def _in_parts_from(operation: Any, indices: list[Any], widths: Widths) -> list[Any]:
    """Start indices of a slice that is whole in every split dimension."""
    zero = Builder.before(operation).constant(0, str(indices[0].type.element_type))
    return [n for dim, index in enumerate(indices) for n in ([zero, zero] if dim in widths else [index])]


def _with_operands(operation: Any, operands: list[Any]) -> Any:
    """Replaces an op by the same op with other operands."""
    made = xla.like(operation, operands)
    replace_operation(operation, made)
    return made[0].owner.operation


def _dot(operation: Any, shapes: list[Shape], widths: list[Widths]) -> None:
    key = "dot_dimension_numbers"
    now = xla.dot_dimensions(operation.attributes[key])
    operation.attributes[key] = xla.dot_dimension_numbers(
        [places(dims, widths[side]) for dims, side in zip(now, (0, 1, 0, 1), strict=True)], operation.context
    )


_CHANGES: dict[str, _Change] = {
    BROADCAST_IN_DIM: _broadcast,
    TRANSPOSE: _transpose,
    REDUCE: _reduce,
    CONCATENATE: _concatenate,
    SLICE: _slice,
    PAD: _pad,
    DYNAMIC_SLICE: _dynamic_slice,
    DYNAMIC_UPDATE_SLICE: _dynamic_update_slice,
    DOT_GENERAL: _dot,
}
