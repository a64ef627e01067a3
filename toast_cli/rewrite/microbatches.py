"""Splits a step's batch into microbatches that run one after the other, in a loop around most of the program."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from toast_cli import xla
from toast_cli.emit.annotations import around
from toast_cli.frontend.attributes import is_splat, splat_of
from toast_cli.frontend.inline import numbers
from toast_cli.frontend.reader import Reader, read_arguments
from toast_cli.frontend.source import Source, made_by, read_from_outside, read_rewritten, retyped
from toast_cli.kernels.describe import run_on_part
from toast_cli.program.model import Program, Result
from toast_cli.program.ops import (
    BROADCAST_IN_DIM,
    CASE,
    CONSTANT,
    DYNAMIC_SLICE,
    GATHER,
    IF,
    IOTA,
    RESULT,
    SLICE,
    WHILE,
)
from toast_cli.program.roles import INPUTS, argument_roles
from toast_cli.rewrite.batch_split import SUM, Cut, Split, Statements, WholeBatchError, located, split_batch
from toast_cli.rewrite.block_graph import copied_module, replace_operands
from toast_cli.rewrite.loop_pairs import add_rows_in_place, body_of, yielded
from toast_cli.xla import ir
from toast_cli.xla.build import INDEX, Builder

_TRIED = 8  # dimensions


def batch_parts(source: Source) -> list[int] | str:
    """Numbers of microbatches to try: divisors of the batch, each the smallest that is at least twice the last. Or why
    there are none."""
    copy = copied_module(source)
    with copy.context:
        divided = _divide(source, copy, lambda size: next(n for n in range(2, size + 1) if size % n == 0))
    if isinstance(divided, str):
        return divided
    numbers = [1]
    for number in range(2, divided.size + 1):
        if divided.size % number == 0 and number >= 2 * numbers[-1]:
            numbers.append(number)
    return numbers[1:]


def with_microbatches(source: Source, parts: int) -> Source | str:
    """The program with its batch in `parts` microbatches, or why that is impossible, with the op concerned."""
    copy = copied_module(source)
    with copy.context, ir.Location.unknown():
        divided = _divide(source, copy, lambda _: parts)
        if isinstance(divided, str):
            return divided
        xla.remove_sharding_rules(copy)
        LoopWriter(xla.main_function(copy), divided.reader, divided.statements, divided.split).run()
        add_rows_in_place(copy)
        sums = any(divided.split.states[value] == SUM for value in divided.split.leaving)
    added = ", with their gradients added up" if sums else ""
    notice = f"the batch is run in {parts} microbatches one after the other{added}: the program has it"
    return read_rewritten(source, copy, notice, microbatches=parts)


@dataclass(frozen=True)
class _Divided:
    """A step whose batch of some size is split."""

    statements: Statements
    reader: Reader
    split: Split
    size: int


def _divide(source: Source, copy: Any, parts_of: Callable[[int], int]) -> _Divided | str:
    """The split of the first dimension that can be a batch, or why there is none. copy: of the source's module; it is
    changed. parts_of: size of a dimension -> number of parts."""
    if source.annotations:
        return "the program states shardings of its own, which are of arrays for the whole batch"
    for loop in xla.walk_ops(copy, WHILE):  # what a loop passes through unchanged is read from outside
        for k, value in enumerate(yielded(loop)):
            if value == body_of(loop).arguments[k]:
                loop.results[k].replace_all_uses_with(loop.operands[k])
    xla.run_passes(copy, "func.func(sdy-populate-op-sharding-rules)")
    statements, reader = _statements(copy)
    names, roles = argument_roles(source.program)
    # If inputs cannot be told from weights, any argument may have the batch.
    candidates = [n for n, role in enumerate(roles) if names[role] == INPUTS] or list(range(len(roles)))
    inputs = {statements.program.arguments[n].value for n in candidates}
    statements = replace(statements, inputs=frozenset(inputs))
    arrays = {n: source.program.values[source.program.arguments[n].value] for n in candidates}
    dims = [(n, dim) for n, array in arrays.items() for dim, size in enumerate(array.shape) if size > 1]
    whys = []
    # Leading dimensions first, the largest array first.
    for argument, dim in sorted(dims, key=lambda pair: (pair[1], -arrays[pair[0]].bytes))[:_TRIED]:
        value = arrays[argument]
        size, parts = value.shape[dim], parts_of(value.shape[dim])
        if size % parts:
            whys.append(f"{value} has no {parts} equal parts along dimension {dim}")
            continue
        try:
            split = split_batch(statements, argument, dim, parts)
        except WholeBatchError as error:
            op = statements.program.ops[error.op]
            place = replace(source, operations=reader.operations).location(error.op)
            whys.append(f"{op.name.partition('.')[2]}{f' at {place}' if place else ''} {error.why}")
            continue
        others = (n for n, a in enumerate(statements.program.arguments) if a.value in split.read_cut.keys() - inputs)
        other = next(others, None)
        if other is None:
            return _Divided(statements, reader, split, size)
        whys.append(f"argument {source.program.arguments[other].path or other} has the batch, too, and is no input")
    return whys[0] if whys else "no input has a batch"


def _statements(module: Any) -> tuple[Statements, Reader]:
    """The module as a program with every op, including those whose results are not needed."""
    function = xla.main_function(module)
    reader = Reader()
    reader.read(function.operation, function.entry_block)
    block = function.entry_block
    places = {view.operation: n for n, view in enumerate(block.operations)}

    def statement(operation: Any) -> int:
        return next((places[holder] for holder in around(operation) if holder in places), -1)

    ops = [
        replace(op, detail=_constant_detail(operation)) if op.name == CONSTANT else op
        for op, operation in zip(reader.ops, reader.operations, strict=True)
    ]
    outputs = tuple(Result(op.operands[0], "") for op in ops if op.name == RESULT)
    program = Program("", tuple(ops), tuple(reader.values), read_arguments(function), outputs, tuple(reader.loops))

    def read_directly(op: int, position: int) -> bool:
        operation, operand = reader.uses.get((op, position), (reader.operations[op], position))
        return bool(operation.operands[operand] == reader.definitions[ops[op].operands[position]])

    statements = Statements(program, [statement(operation) for operation in reader.operations], read_directly)
    for branch in xla.walk_ops(module, CASE, IF):
        statements.deciding[statement(branch)].append(reader.numbers[branch.operands[0]])
    return statements, reader


def _constant_detail(operation: Any) -> str:
    number = xla.constant_number(operation)
    if number is None:
        return ""
    parts = number.strip("()").split(",")  # two of a complex one
    zero = all(part == "false" or re.fullmatch(r"-?[0.]+(e[-+]\d+)?", part) for part in parts)
    return "zero" if zero else "splat"


# ---------------------------------------------------------------- the loop
# The loop reads one microbatch of each input, accumulates sums over the batch, and stacks outputs that have a batch
# dimension. Microbatch k has every N-th example from k on, so that each device runs a part of its own examples.

Shape = tuple[int, ...]
_NARROW = ("bf16", "f16", "f8")  # their sums are of f32


class LoopWriter:
    """Writes the loop."""

    def __init__(self, function: Any, reader: Reader, statements: Statements, split: Split) -> None:
        self._block = function.entry_block
        self._reader, self._program, self._split = reader, statements.program, split
        self._definitions = list(reader.definitions)
        views = list(self._block.operations)
        self._inside = [views[n].operation for n in sorted(split.inside)]
        self._after = [views[n].operation for n in sorted(split.after)][:-1]  # without the terminator
        self._end = views[-1].operation
        self._build = Builder.before(self._end)

    def run(self) -> None:
        """Reshapes arrays to microbatches, then moves statements into the loop and behind it."""
        # Operations are looked up before they change: their hash depends on their operands.
        statements = [[operation] for operation in self._inside]
        of_operation = {statement[0]: statement for statement in statements}
        remade = [
            (operation, operand, cut, of_operation.get(operation))  # None: in a region of a statement
            for use, cut in self._split.remade.items()
            for operation, operand in [self._reader.uses.get(use, (self._reader.operations[use[0]], use[1]))]
        ]
        for operation, operand, cut, statement in remade:  # an operand gets the size of one microbatch
            with self._build.at(ir.InsertionPoint(operation)):
                smaller = self._smaller(operation.operands[operand], cut)
            operation.operands[operand] = smaller
            if statement is not None:
                statement.insert(-1, smaller.owner)
        self._inside = [operation for statement in statements for operation in statement]
        inside = made_by(self._inside)  # an array that the loop reads in parts is whole in front of it
        for handle, value in list(self._reader.numbers.items()):
            state = self._split.states[value]
            if isinstance(state, Cut) and handle in inside:
                handle.set_type(retyped(handle.type, self._cut_shape(tuple(handle.type.shape), state)))
        self._loop()
        for operation in self._inside:
            for inner in xla.operations_in(operation):
                _adapt(inner)
        self._run_kernels_on_parts()

    def _run_kernels_on_parts(self) -> None:
        """Rewrites hand-written kernels for one microbatch."""
        program, parts = self._program, self._split.parts
        for number, op in enumerate(program.ops):
            for dims, value in zip(op.rule.operands, op.operands, strict=False) if op.kernel is not None else ():
                cut = self._split.states[value]
                shape, place = program.values[value].shape, None
                if isinstance(cut, Cut):
                    place = located(dims, op.rule.sizes, shape, cut, parts)
                if place is not None and op.kernel is not None:
                    run_on_part(self._reader.operations[number], op.kernel, {place[0]: parts})
                    break

    def _cut_shape(self, shape: Shape, cut: Cut) -> Shape:
        return (*shape[: cut.dim], shape[cut.dim] // self._split.parts, *shape[cut.dim + 1 :])

    def _smaller(self, handle: Any, cut: Cut) -> Any:
        """A broadcast or constant like `handle`, which repeats along the batch, with the size of one microbatch."""
        maker, shape = handle.owner, self._cut_shape(tuple(handle.type.shape), cut)
        if maker.name == BROADCAST_IN_DIM:
            return self._build.broadcast(maker.operands[0], shape, numbers(maker, "broadcast_dimensions"))
        return splat_of(xla.constant_number(maker) or "", retyped(handle.type, shape), self._build.ip)

    def _read_parts(self, index: Any) -> None:
        """Lets ops read one part of what the loop computes as a whole, and an iota count what is in the part."""
        inside = made_by(self._inside)
        for number in (n for n, op in enumerate(self._program.ops) if op.name == IOTA):
            operation, cut = self._reader.operations[number], self._split.states[self._program.ops[number].results[0]]
            if not isinstance(cut, Cut) or operation.result not in inside:
                continue
            if ir.IntegerAttr(operation.attributes["iota_dimension"]).value == cut.dim:
                self._count_in_part(operation, cut, index)
        for (number, position), cut in self._split.sliced.items():
            operation, operand = self._reader.uses.get((number, position), (self._reader.operations[number], position))
            handle = operation.operands[operand]
            shape = tuple(handle.type.shape)
            with self._build.at(ir.InsertionPoint(operation)):
                in_parts = self._build.reshape(handle, self._split_shape(shape, cut))
                piece = self._build.row(in_parts, index, cut.dim + 1)
                operation.operands[operand] = self._build.reshape(piece, self._cut_shape(shape, cut))

    def _count_in_part(self, iota: Any, cut: Cut, index: Any) -> None:
        """Replaces an iota along the batch by the numbers of one part's examples."""
        result, build = iota.results[0], self._build
        shape, dtype = tuple(result.type.shape), str(result.type.element_type)
        split_shape = (*shape[: cut.dim], shape[cut.dim] // cut.inner, cut.inner, *shape[cut.dim + 1 :])

        def scaled(counted: Any, by: int) -> Any:
            return build.binary("multiply", counted, build.constant(by, dtype, split_shape))

        with build.at(ir.InsertionPoint.after(iota)):
            first = scaled(build.broadcast(build.convert(index, dtype), split_shape), cut.inner)
            steps = scaled(build.iota(dtype, split_shape, cut.dim), self._split.parts * cut.inner)
            inner = build.iota(dtype, split_shape, cut.dim + 1)
            numbers = build.binary("add", build.binary("add", steps, first), inner)
            result.replace_all_uses_with(build.reshape(numbers, shape))

    # -- the loop -------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        split, build, point = self._split, self._build, ir.InsertionPoint(self._end)
        outer = read_from_outside(self._inside)
        sliced = {self._definitions[v]: cut for v, cut in split.read_cut.items() if self._definitions[v] in outer}
        # The loop and all other readers make constants and splats for themselves (see `copy_splats`).
        shared = [
            handle
            for handle in outer
            if handle not in sliced
            and (isinstance(handle, ir.BlockArgument) or not (handle.owner.name == CONSTANT or is_splat(handle.owner)))
        ]
        stacks = [self._in_front(handle, cut) for handle, cut in sliced.items()]
        leaving = [(self._definitions[v], split.states[v]) for v in split.leaving]
        kinds = [self._carried_type(handle, state) for handle, state in leaving]
        starts = [build.constant(0, INDEX)]
        starts += [build.broadcast(build.constant(0, str(kind.element_type)), tuple(kind.shape)) for kind in kinds]
        operands = [*starts, *shared, *stacks]
        types = [handle.type for handle in operands]
        place = self._end.location
        loop = ir.Operation.create(WHILE, results=types, operands=operands, regions=2, loc=place, ip=point)
        condition, body = (region.blocks.append(*types, arg_locs=[place] * len(types)) for region in loop.regions)
        with build.at(ir.InsertionPoint(condition)):
            build.make("return", [build.compare("LT", condition.arguments[0], build.constant(split.parts, INDEX))], [])
        with build.at(ir.InsertionPoint(body)):
            index, carried = body.arguments[0], list(body.arguments)[1 : len(starts)]
            twins = dict(zip(shared, list(body.arguments)[len(starts) :], strict=False))
            pieces = list(body.arguments)[len(starts) + len(shared) :]
            for (handle, cut), stack in zip(sliced.items(), pieces, strict=True):
                shape = self._cut_shape(tuple(handle.type.shape), cut)
                twins[handle] = build.reshape(build.row(stack, index, 0), shape)
            for handle in outer:
                if handle not in twins:
                    twins[handle] = handle.owner.operation.clone(ip=build.ip).results[0]
            following = build.binary("add", index, build.constant(1, INDEX))
            last = build.make("return", [], [])
            for operation in self._inside:
                operation.move_before(last)
                replace_operands(operation, twins)
            self._read_parts(index)
            with build.at(ir.InsertionPoint(last)):
                handed_on = [self._added(*of, value, index) for of, value in zip(leaving, carried, strict=True)]
                build.make("return", [following, *handed_on, *list(body.arguments)[len(starts) :]], [])
            last.erase()
        results = {
            handle: self._result(handle, state, result)
            for (handle, state), result in zip(leaving, list(loop.results)[1:], strict=False)
        }
        for operation in self._after:
            operation.move_before(self._end)
            replace_operands(operation, results)
        replace_operands(self._end, results)

    def _split_shape(self, shape: Shape, cut: Cut) -> Shape:
        """A shape with the cut dimension as three: steps, microbatches, and size within a step."""
        steps = shape[cut.dim] // (self._split.parts * cut.inner)
        return (*shape[: cut.dim], steps, self._split.parts, cut.inner, *shape[cut.dim + 1 :])

    def _in_front(self, handle: Any, cut: Cut) -> Any:
        """An array with the microbatches along its first dimension."""
        split_shape = self._split_shape(tuple(handle.type.shape), cut)
        order = [cut.dim + 1, *(d for d in range(len(split_shape)) if d != cut.dim + 1)]
        turned = self._build.transpose(self._build.reshape(handle, split_shape), order)
        return self._build.reshape(turned, (self._split.parts, *self._cut_shape(tuple(handle.type.shape), cut)))

    def _carried_type(self, handle: Any, state: Any) -> Any:
        shape = tuple(handle.type.shape)
        if isinstance(state, Cut):
            return retyped(handle.type, (self._split.parts, *shape))
        if state == SUM and str(handle.type.element_type).startswith(_NARROW):
            return ir.RankedTensorType.get(shape, ir.F32Type.get())
        return handle.type

    def _added(self, handle: Any, state: Any, carried: Any, index: Any) -> Any:
        """A carried value after an iteration: updated at this microbatch's index, summed, or replaced."""
        build, shape = self._build, tuple(handle.type.shape)
        if isinstance(state, Cut):
            zeros = [build.constant(0, INDEX)] * len(shape)
            row = build.reshape(handle, (1, *shape))
            return build.one("dynamic_update_slice", [carried, row, index, *zeros], carried.type)
        return build.binary("add", carried, self._as(handle, carried)) if state == SUM else handle

    def _result(self, handle: Any, state: Any, result: Any) -> Any:
        """The loop's result in the form of the value without a loop."""
        if not isinstance(state, Cut):
            return self._as(result, handle)
        part = tuple(handle.type.shape)
        shape = (*part[: state.dim], part[state.dim] * self._split.parts, *part[state.dim + 1 :])
        split_shape = self._split_shape(shape, state)
        front = (split_shape[state.dim + 1], *split_shape[: state.dim + 1], *split_shape[state.dim + 2 :])
        order = [*range(1, state.dim + 2), 0, *range(state.dim + 2, len(split_shape))]
        return self._build.reshape(self._build.transpose(self._build.reshape(result, front), order), shape)

    def _as(self, value: Any, other: Any) -> Any:
        return self._build.convert(value, str(other.type.element_type))


def _adapt(operation: Any) -> None:
    """Updates attributes of an op that state sizes, to match its arrays."""
    attributes, shape = operation.attributes, list(operation.results[0].type.shape) if operation.results else []
    if operation.name == SLICE:
        starts, strides = (ir.DenseI64ArrayAttr(attributes[key]) for key in ("start_indices", "strides"))
        sizes = zip(starts, shape, strides, strict=True)
        ends = [start + (size - 1) * stride + 1 if size else start for start, size, stride in sizes]
        attributes["limit_indices"] = ir.DenseI64ArrayAttr.get(ends)
    elif operation.name == DYNAMIC_SLICE:
        attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(shape)
    elif operation.name == GATHER:
        operand_shape = operation.operands[0].type.shape
        slice_sizes = [
            min(n, size) for n, size in zip(ir.DenseI64ArrayAttr(attributes["slice_sizes"]), operand_shape, strict=True)
        ]
        attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(slice_sizes)
