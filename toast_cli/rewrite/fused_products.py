"""Fused products, rewritten so that they can be split: a dimension that concatenates several arrays becomes two, parts
and width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any

from toast_cli import xla
from toast_cli.frontend.inline import numbers, replace_operation
from toast_cli.frontend.source import Source, read_rewritten, retyped
from toast_cli.program.model import Op, Program, Rule, once
from toast_cli.program.ops import (
    ARGUMENT,
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
from toast_cli.program.quantities import format_plural
from toast_cli.xla import ir, operations_in
from toast_cli.xla.build import Builder

# ---------------------------------------------------------------- finding fused products
# Fused products: one product with a weight that computes several arrays side by side, which slices separate.
#
# Queries, keys and values of an attention layer, gate and value of a gated perceptron, the gates of a recurrence:
# their widths follow each other in one dimension of n parts, and no sharding of that dimension gives each device its
# share of every part. Written as two dimensions, parts and width, the width can be split like any other. In the
# backward pass, cotangents are concatenated (or padded) again for the product's own gradients.
#
# Arguments and results stay as they are; weights are reshaped where products read them.

Place = tuple[int, int]  # value, dimension
Position = tuple[int, int]  # of an op: array number (operands first, then results), dimension

# Ops that propagate parts; products and reductions can have parts but do not propagate them.
_PASSING = frozenset(
    [BARRIER, BROADCAST_IN_DIM, CARRY, CONCATENATE, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, PAD, RESHAPE, SLICE, TRANSPOSE]
)
_ENDS = frozenset([DOT_GENERAL, REDUCE])
_BODIES = frozenset(["stablehlo.map"])  # elementwise, with shapes in their regions


@dataclass(frozen=True)
class Parts:
    """values: value -> dimension -> elements of each part. ops: op to rewrite -> position -> elements of each part."""

    values: dict[int, dict[int, int]]
    ops: dict[int, dict[Position, int]]


@once
def fused_parts(program: Program) -> Parts | None:
    """The fused products of a program, None if there are none."""
    return _Search(program).parts()


class _Search:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._from_arguments = _made_of_arguments(program)

    def parts(self) -> Parts | None:
        width: dict[Place, int] = {}
        seen: set[Place] = set()
        for number, op in enumerate(self._program.ops):
            if op.name != SLICE:
                continue
            for place, _ in self._cuts(number):
                if place not in seen:
                    products = self._products_behind(place, seen)
                    for product in products:
                        if product not in width:
                            width.update(self._family(product))
        if not width:
            return None
        values: dict[int, dict[int, int]] = defaultdict(dict)
        ops = self._grown(width, values)
        return Parts(dict(values), ops) if ops else None

    # -- linked positions ------------------------------------------------------------------------------------------

    def _arrays(self, op: Op) -> tuple[int, ...]:
        return op.operands + op.results

    def _touching(self, value: int) -> Iterator[int]:
        yield self._program.producer[value]
        for number, _ in self._program.users[value]:
            yield number

    def _along(self, number: int, place: Place) -> list[Position]:
        """Positions of an op's arrays that share the dimension of a place."""
        op, (value, dim) = self._program.ops[number], place
        arrays = self._arrays(op)
        size = self._program.values[value].shape[dim]
        array_numbers = [array for array, other in enumerate(arrays) if other == value]
        for positions in alone(op.rule):
            if any((array, dim) in positions for array in array_numbers):
                return [(a, d) for a, d in positions if self._program.values[arrays[a]].shape[d] == size]
        return [(array, dim) for array in array_numbers]

    def _cuts(self, number: int) -> list[tuple[Place, int]]:
        """(array and dimension that an op slices, pads or concatenates to; common divisor of the pieces' sizes and
        offsets)."""
        op = self._program.ops[number]
        if op.name in (SLICE, PAD):
            array = op.operands[0] if op.name == SLICE else op.results[0]
            cuts = []
            for w in op.windows:
                sizes = (w.low, w.inputs, w.outputs) if w.stride == w.dilation == 1 else (1,)
                inside = w.low <= 0 if op.name == SLICE else 0 <= w.low <= w.outputs - w.inputs
                cuts.append(((array, w.operand_dim), gcd(*sizes) if inside else 1))
            return cuts
        if op.name == CONCATENATE:
            shapes = [self._program.values[v].shape for v in op.operands]
            result_shape = self._program.values[op.results[0]].shape
            return [
                ((op.results[0], dim), gcd(*(shape[dim] for shape in shapes)))
                for dim in range(len(result_shape))
                if shapes[0][dim] != result_shape[dim]
            ]
        return []

    # -- fused products --------------------------------------------------------------------------------------------

    def _products_behind(self, place: Place, seen: set[Place]) -> list[Place]:
        """Results of products with weights that a sliced array is computed from, element by element."""
        products: list[Place] = []
        waiting = [place]
        while waiting:
            current = waiting.pop()
            if current in seen:
                continue
            seen.add(current)
            number = self._program.producer[current[0]]
            op = self._program.ops[number]
            if op.name == DOT_GENERAL:
                if self._has_weight(op, current[1]):
                    products.append(current)
            elif self._passes(number, current):
                arrays = self._arrays(op)
                waiting += [(arrays[a], d) for a, d in self._along(number, current) if a < len(op.operands)]
        return products

    def _has_weight(self, product: Op, dim: int) -> bool:
        """Whether a dimension of a product's result is the first one that only the weight has."""
        result_factors = product.rule.results[0]
        for operand, other in ((0, 1), (1, 0)):
            shared = {f for factors in product.rule.operands[other] for f in factors}
            free = [f for f in product.rule.operands[operand] if not shared.intersection(f)]
            if product.operands[operand] in self._from_arguments and free and free[0] == result_factors[dim]:
                return len(result_factors[dim]) == 1
        return False

    def _family(self, start: Place) -> dict[Place, int]:
        """Every place that shares the dimension of this one -> size of the parts that all cuts of it allow; empty if
        there is none."""
        family, waiting, width = {start}, [start], 0
        while waiting:
            current = waiting.pop()
            for number in self._touching(current[0]):
                arrays = self._arrays(self._program.ops[number])
                for array, dim in self._along(number, current):
                    if (arrays[array], dim) not in family:
                        family.add((arrays[array], dim))
                        waiting.append((arrays[array], dim))
                for place, size in self._cuts(number):
                    if place == current:
                        width = gcd(width, size)
        size_of_all = self._program.values[start[0]].shape[start[1]]
        return dict.fromkeys(family, width) if width * width >= size_of_all else {}

    # -- ops to rewrite --------------------------------------------------------------------------------------------

    def _grown(self, width: dict[Place, int], values: dict[int, dict[int, int]]) -> dict[int, dict[Position, int]]:
        """Ops to rewrite: those that cut, and those that parts propagate to. Fills `values`."""
        passed: set[int] = set()
        waiting = [place for number in range(len(self._program.ops)) for place, _ in self._cuts(number)]
        waiting = [place for place in waiting if place in width]
        while waiting:
            value, dim = current = waiting.pop()
            if dim in values[value]:
                continue
            values[value][dim] = width[current]
            made_of_arguments = value in self._from_arguments
            for number in self._touching(value):
                op = self._program.ops[number]
                if made_of_arguments and value not in op.results and current not in dict(self._cuts(number)):
                    continue  # another reader of a weight or a bias: its update
                if self._passes(number, current):
                    passed.add(number)
                    arrays = self._arrays(op)
                    if current not in dict(self._cuts(number)):
                        waiting += [(arrays[a], d) for a, d in self._along(number, current)]
        ops: dict[int, dict[Position, int]] = {}
        for value, dims in values.items():
            for number in self._touching(value):
                if number in passed or self._program.ops[number].name in _ENDS:
                    self._write(number, (value, dims), ops)
        self._out_of_loops(values, ops)
        return ops

    def _write(self, number: int, parted: tuple[int, dict[int, int]], ops: dict[int, dict[Position, int]]) -> None:
        value, dims = parted
        for dim, size in dims.items():
            positions = self._positions(number, (value, dim))
            ops.setdefault(number, {}).update(dict.fromkeys(positions, size))

    def _out_of_loops(self, values: dict[int, dict[int, int]], ops: dict[int, dict[Position, int]]) -> None:
        """Moves the reshape of a loop-invariant weight before the loop."""
        program = self._program
        waiting = [number for number in ops if program.ops[number].loop >= 0]
        while waiting:
            number = waiting.pop()
            for place, value in enumerate(program.ops[number].operands):
                dims = {dim: size for (array, dim), size in ops[number].items() if array == place}
                maker, users = program.producer[value], program.users[value]
                inside = {user for user, _ in users if program.ops[user].loop >= 0}
                if not dims or value in values or not inside <= ops.keys() or value not in self._from_arguments:
                    continue
                if program.ops[maker].loop < 0:
                    values[value] = dims
                elif all(self._passes(maker, (value, dim)) for dim in dims) and program.ops[maker].name != CARRY:
                    values[value] = dims
                    self._write(maker, (value, dims), ops)
                    waiting.append(maker)

    def _positions(self, number: int, place: Place) -> list[Position]:
        if place in dict(self._cuts(number)):
            return [(array, place[1]) for array in self._with_dimensions(number)]
        return self._along(number, place)

    def _with_dimensions(self, number: int) -> list[int]:
        arrays = self._arrays(self._program.ops[number])
        return [array for array, value in enumerate(arrays) if self._program.values[value].shape]

    def _passes(self, number: int, place: Place) -> bool:
        """Whether an op can propagate the parts of a dimension to all its operands and results."""
        op = self._program.ops[number]
        if op.name == BROADCAST_IN_DIM or place in dict(self._cuts(number)):
            return True
        elementwise = op.kind.elementwise and op.name.startswith("stablehlo.") and op.name not in _BODIES
        return (op.name in _PASSING or elementwise) and {a for a, _ in self._along(number, place)}.issuperset(
            self._with_dimensions(number)
        )


@lru_cache(maxsize=10_000)
def alone(rule: Rule) -> tuple[tuple[Position, ...], ...]:
    """Per factor, the positions of dimensions that consist of this factor only."""
    positions: dict[int, list[Position]] = defaultdict(list)
    for array, dims in enumerate(rule.operands + rule.results):
        for dim, factors in enumerate(dims):
            if len(factors) == 1:
                positions[factors[0]].append((array, dim))
    return tuple(map(tuple, positions.values()))


def _made_of_arguments(program: Program) -> set[int]:
    """Values that are only conversions, rearrangements or concatenations of arguments and constants."""
    values: set[int] = set()
    for op in program.ops:
        plain = op.kind.rearranges or op.kind.identity or op.name in (ARGUMENT, "stablehlo.convert")
        read = op.operands[:1] if op.kind.takes_part else op.operands
        if op.results and plain and all(v in values for v in read):
            values.update(op.results)
    return values


# ---------------------------------------------------------------- parting them
# A dimension that concatenates several arrays becomes two, parts and width. Reshapes connect these arrays to
# the rest of the program; a compiler treats them as free.

Shape = tuple[int, ...]
Widths = dict[int, int]  # dimension of an array -> elements of each of its parts
_BRANCHES = ("stablehlo.case", "stablehlo.if")


def with_parts(source: Source) -> Source:
    """The rewritten program. It must have fused products, and state no shardings: these would refer to the original
    arrays."""
    parts = fused_parts(source.program)
    assert parts is not None
    copy = source.module.operation.clone().operation
    twins = dict(zip(operations_in(source.module.operation), operations_in(copy), strict=True))
    with copy.context, ir.Location.unknown():
        _Rewriter(source, parts, twins).run(xla.main_function(source.module).operation)
    return read_rewritten(source, copy, _parted_notice(source, parts), parted=True)


def _parted_notice(source: Source, parts: Parts) -> str:
    products = [n for n in parts.ops if source.program.ops[n].name == DOT_GENERAL]
    example = max(products, key=lambda n: source.program.ops[n].flops * source.program.ops[n].trips)
    place = f" (most work: {source.location(example)})" if source.location(example) else ""
    return (
        f"in {format_plural(len(products), 'product')} the parts that lie side by side in a weight (queries, keys and "
        f"values; gates) are a dimension of their own{place}: the program written has it so, others need a reshape of "
        "that weight to [.., parts, width] (--as-written makes no such plan)"
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
        parted = self._parted.get(handle)
        if parted is None or tuple(parted.type.shape) != shape:
            parted = self._reshape(handle, shape, ir.InsertionPoint(operation), operation.location)
        operation.operands[place] = parted

    def _take_apart(self, handle: Any, widths: Widths, point: Any) -> None:
        """Splits dimensions of a value; its users read a reshape of it to the original shape."""
        if widths:
            shape = tuple(handle.type.shape)
            handle.set_type(retyped(handle.type, expanded(shape, widths)))
            merged = self._reshape(handle, shape, point, handle.location)
            handle.replace_all_uses_except(merged, merged.owner.operation)
            self._parted[merged] = handle

    def _reshape(self, handle: Any, shape: Shape, point: Any, location: Any) -> Any:
        reshape = ir.Operation.create(
            RESHAPE, results=[retyped(handle.type, shape)], operands=[handle], loc=location, ip=point
        )
        self._reshapes.append(reshape)
        return reshape.results[0]


def _widths(positions: dict[Position, int], array: int) -> Widths:
    return {dim: width for (a, dim), width in positions.items() if a == array}


def expanded(shape: Shape, widths: Widths) -> Shape:
    """A shape with two dimensions, parts and their width, for each split one."""
    return tuple(
        n for dim, size in enumerate(shape) for n in ((size // widths[dim], widths[dim]) if dim in widths else (size,))
    )


def places(dims: Sequence[int], widths: Widths) -> list[int]:
    """Indices of dimensions of an array after its `widths` dimensions are split in two."""
    first = {dim: dim + sum(parted < dim for parted in widths) for dim in dims}
    return [d for dim in dims for d in ((first[dim], first[dim] + 1) if dim in widths else (first[dim],))]


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
    dims = []
    for dim, to in enumerate(target):
        split = places([to], widths[1])
        dims += split if dim in widths[0] else split[-1:]
    _set(operation, broadcast_dimensions=dims)


def _transpose(operation: Any, shapes: list[Shape], widths: list[Widths]) -> None:
    _set(operation, permutation=places(numbers(operation, "permutation"), widths[0]))


def _concatenate(operation: Any, shapes: list[Shape], widths: list[Widths]) -> None:
    dim = ir.IntegerAttr(operation.attributes["dimension"])
    operation.attributes["dimension"] = ir.IntegerAttr.get(dim.type, places([dim.value], widths[0])[0])


def _in_parts(numbers: list[int], shape: Shape, widths: Widths, rest: Callable[[int], int]) -> list[int]:
    """Per dimension a number of elements; for split dimensions, a number of parts, and `rest` of the width."""
    split_numbers: list[int] = []
    for dim in range(len(shape)):
        split_numbers += [numbers[dim] // widths[dim], rest(widths[dim])] if dim in widths else [numbers[dim]]
    return split_numbers


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
    results = xla.like(operation, operands)
    replace_operation(operation, results)
    return results[0].owner.operation


def _dot(operation: Any, shapes: list[Shape], widths: list[Widths]) -> None:
    key = "dot_dimension_numbers"
    now = xla.dot_dimensions(operation.attributes[key])
    operation.attributes[key] = xla.dot_dimension_numbers(
        [places(dims, widths[side]) for dims, side in zip(now, (0, 1, 0, 1), strict=True)], operation.context
    )


_CHANGES: dict[str, _Change] = {
    BROADCAST_IN_DIM: _broadcast,
    TRANSPOSE: _transpose,
    REDUCE: lambda op, _, widths: _set(op, dimensions=places(numbers(op, "dimensions"), widths[0])),
    CONCATENATE: _concatenate,
    SLICE: _slice,
    PAD: _pad,
    DYNAMIC_SLICE: _dynamic_slice,
    DYNAMIC_UPDATE_SLICE: _dynamic_update_slice,
    DOT_GENERAL: _dot,
}
