"""Divides scans over layers among pipeline stages: a loop over all layers becomes a loop over its own layers for each
stage, one after the other, and arrays with a row for each layer (weights, moments, gradients, what the backward pass
reads) become one array for each stage. Ops between them run on each stage's rows.

    while (i < 8) { row(weights, i) }  ->  while (i < 4) { row(weights_0, i) }; while (i < 8) { row(weights_1, i - 4) }

An op that needs all rows at once gets them joined again, so that the program stays the same. Ops that nothing reads any
more stay in the module.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial, reduce
from math import prod
from typing import Any

from toast_cli import xla
from toast_cli.emit.regions.site import starts_neutral
from toast_cli.emit.shardy import CONSTRAINT
from toast_cli.frontend.source import retyped
from toast_cli.frontend.trips import trip_count
from toast_cli.plan.sharding import Sharding
from toast_cli.program.ops import (
    BARRIER,
    BROADCAST_IN_DIM,
    CONVERT,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    REDUCE,
    RESHAPE,
    TRANSPOSE,
    kind_of,
)
from toast_cli.program.stack import Stack
from toast_cli.rewrite.loop_pairs import Index, counted, index_of
from toast_cli.rewrite.stage_files import refusal
from toast_cli.xla import ir
from toast_cli.xla.build import Builder

# Of each array its parts, one for each stage or a single one, and their dimension.
Arrays = list[tuple[list[Any], int]]
_WHILE = "stablehlo.while"


@dataclass(frozen=True)
class Divided:
    """A step that can be cut: its loop over microbatches, the parts of its arguments and results, and the stage of
    each weight of a layer."""

    loop: Any
    arguments: Arrays
    results: Arrays
    stage_of: dict[Any, int]


class LayerLoops:
    """One division of the step in a block. loop: over microbatches. shardings: of values; those of parts are added."""

    def __init__(self, block: Any, loop: Any, shardings: dict[Any, Sharding], stack: Stack, stages: int) -> None:
        self._block, self._loop, self._shardings = block, loop, shardings
        self._shapes, self._layers, self._stages = stack.shapes, stack.layers, stages
        self._parts: dict[Any, tuple[list[Any], int]] = {}
        self._sums = set[Any]()  # whole arrays that the loop carries

    def run(self) -> Divided:
        """Divides what has a row for each layer."""
        arguments = list(self._block.arguments)
        for argument in arguments:
            if tuple(argument.type.shape) in self._shapes:
                dim = self._shapes[tuple(argument.type.shape)]
                kind = self._part_type(argument.type, dim)
                added = [self._block.add_argument(kind, self._loop.location) for _ in range(self._stages)]
                self._note(argument, added, dim)
        for op in [op.operation for op in self._block.operations][:-1]:
            if op == self._loop:
                self._over_microbatches()
            else:
                self._op(op)
        results = list(xla.terminator(self._block).operands)
        stage_of = {part: stage for v in arguments if v in self._parts for stage, part in enumerate(self._parts[v][0])}
        first, last = ([self._parts.get(v, ([v], 0)) for v in values] for values in (arguments, results))
        return Divided(self._loop, first, last, stage_of)

    def _note(self, value: Any, parts: list[Any], dim: int) -> None:
        self._parts[value] = parts, dim
        sharding = self._shardings.get(value)
        if sharding is not None:  # rows of one layer are not divided further
            self._shardings.update(dict.fromkeys(parts, tuple(() if d == dim else a for d, a in enumerate(sharding))))

    def _part_type(self, kind: Any, dim: int) -> Any:
        return retyped(kind, tuple(n // self._stages if d == dim else n for d, n in enumerate(kind.shape)))

    def _apart(self, value: Any, dim: int, before: Any) -> list[Any]:
        """The parts of an array."""
        if value in self._parts and self._parts[value][1] == dim:
            return self._parts[value][0]
        value, rows, build = self._whole(value, before), value.type.shape[dim] // self._stages, Builder.before(before)
        return [build.slice_dim(value, dim, stage * rows, (stage + 1) * rows) for stage in range(self._stages)]

    def _whole(self, value: Any, before: Any) -> Any:
        """An array with the rows of all stages."""
        if value not in self._parts:
            return value
        parts, dim = self._parts[value]
        joined = Builder.before(before).concatenate(parts, dim)
        self._shardings[joined] = self._shardings.get(value, ((),) * value.type.rank)
        return joined

    def _join(self, op: Any, *, itself: bool) -> None:
        """Lets the ops in an op's regions, and the op itself, read whole arrays."""
        for inner, number, value in xla.outer_operands([op]):
            if value in self._parts and (itself or inner != op):
                inner.operands[number] = self._whole(value, op)

    def _op(self, op: Any) -> None:
        """Has each stage do its rows of an op, if that can be."""
        dims = {value: self._parts[value][1] for value in op.operands if value in self._parts}
        if op.name == CONSTRAINT and op.operands[0] in self._sums:
            self._sums.add(op.results[0])
        place = self._result_dim(op, dims) if dims and self._sums.isdisjoint(op.operands) else None
        if place is None:
            self._join(op, itself=True)
            return
        (dim,) = set(dims.values())
        operands = [self._apart(v, dim, op) if v.type.rank else [v] * self._stages for v in op.operands]
        parts = []
        for own in zip(*operands, strict=True):
            copy = op.clone(ip=ir.InsertionPoint(op))
            for number, value in enumerate(own):
                copy.operands[number] = value
            if place >= 0:
                copy.results[0].set_type(self._part_type(op.results[0].type, place))
            parts.append(copy.results[0])
        if place >= 0:
            self._note(op.results[0], parts, place)
            return
        name = op.regions[0].blocks[0].operations[0].operation.name.removeprefix("stablehlo.")
        op.results[0].replace_all_uses_with(reduce(partial(Builder.before(op).binary, name), parts))

    def _result_dim(self, op: Any, dims: dict[Any, int]) -> int | None:
        """The dimension of a result along which an op can be divided; -1 for a reduction over it; None for others."""
        if len(op.results) != 1 or len({*dims.values()}) > 1:
            return None
        dim, shape = next(iter(dims.values())), list(op.results[0].type.shape)
        if kind_of(op.name).elementwise or op.name in (CONSTRAINT, BARRIER):
            return dim
        if op.name in (BROADCAST_IN_DIM, TRANSPOSE):
            key = "broadcast_dimensions" if op.name == BROADCAST_IN_DIM else "permutation"
            order = list(ir.DenseI64ArrayAttr(op.attributes[key]))
            return int(order[dim] if op.name == BROADCAST_IN_DIM else order.index(dim))
        if op.name == RESHAPE:
            ahead = prod(list(op.operands[0].type.shape)[:dim])
            return next((d for d, n in enumerate(shape) if n == self._layers and prod(shape[:d]) == ahead), None)
        if op.name == REDUCE:
            removed = list(ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
            if dim not in removed:
                return int(dim - sum(other < dim for other in removed))
            return -1 if starts_neutral(op) else None  # each stage starts there
        return None

    # -- loops --------------------------------------------------------------------------------------------------------

    def _over_microbatches(self) -> None:
        """Lets the loop over microbatches carry parts, and divides what is in it."""
        old, last = self._loop, xla.terminator(self._loop.regions[1].blocks[0])
        before = [block for region in old.regions for block in region]
        last_operands = list(last.operands)
        for number, argument in enumerate(before[1].arguments):  # what it hands on unchanged is read from outside
            if last_operands[number] == argument:
                argument.replace_all_uses_with(old.operands[number])
                last.operands[number] = argument
        stacked = {k: dim for k, a in enumerate(before[1].arguments) if (dim := self._layers_of(a)) is not None}
        operands: list[Any] = []
        for number, value in enumerate(old.operands):
            operands += self._apart(value, stacked[number], old) if number in stacked else [self._whole(value, old)]
        types = [value.type for value in operands]
        point = ir.InsertionPoint(old)
        new = ir.Operation.create(_WHILE, results=types, operands=operands, regions=2, loc=old.location, ip=point)
        blocks = [region.blocks.append(*types, arg_locs=[old.location] * len(types)) for region in new.regions]
        pairs = [(b.arguments, n.arguments) for b, n in zip(before, blocks, strict=True)]
        for values, others in ((old.results, new.results), *pairs):
            rest = iter(list(others))
            for number, value in enumerate(values):
                if number in stacked:
                    self._note(value, [next(rest) for _ in range(self._stages)], stacked[number])
                else:
                    value.replace_all_uses_with(next(rest))
        for block, target in zip(before, blocks, strict=True):
            for op in [op.operation for op in block.operations]:
                target.append(op)
        self._loop = new
        self._sums.update(v for v in blocks[1].arguments if all(v not in parts for parts, _ in self._parts.values()))
        for op in [op.operation for op in blocks[1].operations][:-1]:
            if not (op.name == _WHILE and trip_count(op) == self._layers and self._over_layers(op)):
                self._op(op)
        handed: list[Any] = []
        for number, value in enumerate(last.operands):
            handed += self._apart(value, stacked[number], last) if number in stacked else [self._whole(value, last)]
        ir.Operation.create("stablehlo.return", operands=handed, ip=ir.InsertionPoint(last))
        last.erase()

    def _layers_of(self, argument: Any) -> int | None:
        """The dimension of an array that the loop carries which has a row for each layer."""
        alike = [argument]
        for use in (use for value in alike for use in value.uses):  # alike grows
            loop, rows = use.owner.operation, None
            if loop.name == CONSTRAINT:
                alike.append(loop.results[0])
            elif loop.name == _WHILE and trip_count(loop) == self._layers:
                rows = self._rows(loop.regions[1].blocks[0].arguments[use.operand_number])
            if rows is not None:
                return rows[0]
        return self._shapes.get(tuple(argument.type.shape))

    def _over_layers(self, loop: Any) -> bool:
        """Divides a loop over layers; False for a loop that reads and writes no row of an array in each trip. Raises
        UsageError, at `--pipeline`, if it takes the layers in another order than stages have them."""
        body, size = loop.regions[1].blocks[0], self._layers // self._stages
        counters = {k: numbers for k in range(len(body.arguments)) if (numbers := counted(Index(k, 1, 0), loop))}
        rows = {k: found for k, argument in enumerate(body.arguments) if (found := self._rows(argument)) is not None}
        if not counters or not any(loop.operands[k] in self._parts for k in rows):
            return False
        self._join(loop, itself=False)
        (counter, numbers), *_ = counters.items()
        last = xla.terminator(body).operands
        unchanged = {k for k, argument in enumerate(body.arguments) if last[k] == argument}
        places = [index_of(op.operands[n], loop) for _, uses, _ in rows.values() for op, n in uses]
        read = [None if place is None else counted(place, loop) for place in places]
        stages: list[int] = []  # of the chunks of trips
        for chunk in range(0, self._layers, size):
            owners = {number // size for row in read if row is not None for number in row[chunk : chunk + size]}
            if None in read or len(owners) != 1 or not owners <= set(range(self._stages)):
                raise refusal("a loop over layers does not take them one after the other", loop.location)
            stages += owners
        carried = [value if k in rows else self._whole(value, loop) for k, value in enumerate(loop.operands)]
        parts = {k: self._apart(carried[k], dim, loop) for k, (dim, _, _) in rows.items()}
        for chunk, stage in enumerate(stages):
            mine = numbers[chunk * size : chunk * size + size]
            carried[counter] = _constant(carried[counter].type, mine[0], loop)
            copy = loop.clone(ip=ir.InsertionPoint(loop))
            for k, value in enumerate(carried):
                copy.operands[k] = parts[k][stage] if k in rows else value
                self._shardings[copy.results[k]] = self._shardings.get(loop.results[k], ((),) * value.type.rank)
            self._narrow(copy, rows, stage * size)
            _limit(copy, counter, mine)
            carried = [v if k in unchanged else copy.results[k] for k, v in enumerate(carried)]
            for k in rows:
                parts[k] = [copy.results[k] if n == stage else part for n, part in enumerate(parts[k])]
        for k, result in enumerate(loop.results):
            if k in rows:
                self._note(result, parts[k], rows[k][0])
            else:
                result.replace_all_uses_with(carried[k])
        return True

    def _rows(self, argument: Any) -> tuple[int, list[tuple[Any, int]], list[Any]] | None:
        """(dimension, (op, operand) of each row's number, arrays like it) if a loop's body reads and writes an array by
        rows of one layer alone."""
        uses: dict[Any, tuple[int, int]] = {}  # op that reads or writes a row -> dimension, operand
        alike = [argument]
        for value in alike:  # grows in the loop
            for use in value.uses:
                op, shape = use.owner.operation, list(argument.type.shape)
                if op.name in (DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE) and use.operand_number == 0:
                    ahead = 1 if op.name == DYNAMIC_SLICE else 2
                    row = list((op.results[0] if ahead == 1 else op.operands[1]).type.shape)
                    dims = [d for d, (n, m) in enumerate(zip(shape, row, strict=True)) if n != m]
                    if [shape[d] for d in dims] != [self._layers] or row[dims[0]] != 1:
                        return None
                    uses[op] = dims[0], ahead + dims[0]
                    alike += [op.results[0]] if ahead == 2 else []
                elif op.name in (CONSTRAINT, CONVERT) or (op.name == BARRIER and len(op.operands) == 1):
                    alike.append(op.results[0])
                elif op.name != "stablehlo.return":
                    return None
        along = {dim for dim, _ in uses.values()}
        return (along.pop(), [(op, n) for op, (_, n) in uses.items()], alike) if len(along) == 1 else None

    def _narrow(self, loop: Any, rows: Collection[int], first: int) -> None:
        """Lets a loop have the rows of one stage. first: the number of its first row."""
        for k in rows:
            arguments = [region.blocks[0].arguments[k] for region in loop.regions]
            layer_rows = self._rows(arguments[1])
            assert layer_rows is not None
            dim, uses, alike = layer_rows
            for value in (loop.results[k], arguments[0], *alike):
                value.set_type(self._part_type(value.type, dim))
            for op, number in uses:
                index = op.operands[number]
                shift = _constant(index.type, first, op)
                op.operands[number] = Builder.before(op).binary("subtract", index, shift)


def _constant(kind: Any, number: int, before: Any) -> Any:
    return Builder.before(before).constant(number, str(kind.element_type), tuple(kind.shape))


def _limit(loop: Any, counter: int, numbers: range) -> None:
    """Lets a loop run while its counter has these numbers."""
    last = xla.terminator(loop.regions[0].blocks[0])
    argument = loop.regions[0].blocks[0].arguments[counter]
    end = _constant(argument.type, numbers.stop, last)
    last.operands[0] = Builder.before(last).compare("LT" if numbers.step > 0 else "GT", argument, end)
