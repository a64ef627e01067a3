"""Splits a step's batch into microbatches that run one after the other, in a loop around most of the program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from toast_cli import xla
from toast_cli.frontend.attributes import is_splat, splat_of
from toast_cli.frontend.reader import Reader, read_arguments
from toast_cli.frontend.source import Source, made_by, read_from_outside, read_rewritten, retyped
from toast_cli.kernels.describe import describe_kernels, run_on_part
from toast_cli.program.model import Program, Result
from toast_cli.program.ops import (
    ADD,
    BROADCAST_IN_DIM,
    CONVERT,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    IOTA,
    RESHAPE,
    RESULT,
    SLICE,
    TRANSPOSE,
    kind_of,
)
from toast_cli.program.roles import INPUTS, argument_roles
from toast_cli.rewrite.batch_split import CONSTANT, SUM, Cut, CutRules, Split, Statements, WholeBatchError, split_batch
from toast_cli.xla import ir

_BRANCHES = ("stablehlo.case", "stablehlo.if")
_TRIED = 8  # dimensions


def batch_dimensions(source: Source) -> list[tuple[int, int]]:
    """(argument, dimension) candidates for a batch dimension: leading dimensions of inputs first, the largest array
    first. If inputs cannot be told from weights, any argument may be one."""
    program = source.program
    inputs = _inputs(source)
    values = {n: program.values[program.arguments[n].value] for n in inputs}
    found = [(n, dim) for n in inputs for dim in range(len(values[n].shape)) if values[n].shape[dim] > 1]
    return sorted(found, key=lambda it: (it[1], -values[it[0]].bytes))


def _inputs(source: Source) -> list[int]:
    names, roles = argument_roles(source.program)
    return [n for n, role in enumerate(roles) if names[role] == INPUTS] or list(range(len(roles)))


def batch_parts(source: Source) -> list[int] | str:
    """Numbers of microbatches to try: divisors of the batch, each the smallest that is at least twice the last. Or why
    there are none."""
    copy = _copy(source)
    with copy.context:
        found = _divide(source, copy, lambda size: next(n for n in range(2, size + 1) if size % n == 0))
    if isinstance(found, str):
        return found
    numbers = [1]
    for number in range(2, found.size + 1):
        if found.size % number == 0 and number >= 2 * numbers[-1]:
            numbers.append(number)
    return numbers[1:]


def with_microbatches(source: Source, parts: int) -> Source | str:
    """The program with its batch in `parts` microbatches, or why that is impossible, with the op concerned."""
    copy = _copy(source)
    with copy.context, ir.Location.unknown():
        found = _divide(source, copy, lambda _: parts)
        if isinstance(found, str):
            return found
        xla.remove_sharding_rules(copy)
        LoopWriter(xla.main_function(copy), found.reader, found.statements, found.split).run()
        sums = any(found.split.states[value] == SUM for value in found.split.leaving)
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


def _copy(source: Source) -> Any:
    copy = xla.parse_module(source.module.context, xla.write_bytecode(source.module))
    describe_kernels(copy, source.kernels)
    return copy


def _divide(source: Source, copy: Any, parts_of: Callable[[int], int]) -> _Divided | str:
    """The split of the first dimension that can be a batch, or why there is none. copy: of the source's module; it is
    changed. parts_of: size of a dimension -> number of parts."""
    if source.annotations:
        return "the program states shardings of its own, which are of arrays for the whole batch"
    _read_from_outside(copy)
    xla.run_passes(copy, "func.func(sdy-populate-op-sharding-rules)")
    statements, reader = _statements(copy)
    inputs = {statements.program.arguments[n].value for n in _inputs(source)}
    statements = replace(statements, inputs=frozenset(inputs))
    whys = []
    for argument, dim in batch_dimensions(source)[:_TRIED]:
        value = source.program.values[source.program.arguments[argument].value]
        size, parts = value.shape[dim], parts_of(value.shape[dim])
        if size % parts:
            whys.append(f"{value} has no {parts} equal parts along dimension {dim}")
            continue
        try:
            split = split_batch(statements, argument, dim, parts)
        except WholeBatchError as whole:
            op = statements.program.ops[whole.op]
            place = replace(source, operations=reader.operations).location(whole.op)
            whys.append(f"{op.name.partition('.')[2]}{f' at {place}' if place else ''} {whole.why}")
            continue
        others = (n for n, it in enumerate(statements.program.arguments) if it.value in split.read_cut.keys() - inputs)
        other = next(others, None)
        if other is None:
            return _Divided(statements, reader, split, size)
        whys.append(f"argument {source.program.arguments[other].path or other}, which is no input, has it too")
    return whys[0] if whys else "no input has a batch"


def _read_from_outside(module: Any) -> None:
    """Makes users of a loop result that the loop passes through unchanged read the loop's operand instead."""
    for operation in xla.walk_ops(module, "stablehlo.while"):
        body = operation.regions[1].blocks[0]
        yielded = body.operations[len(body.operations) - 1].operands
        for k, value in enumerate(yielded):
            if value == body.arguments[k]:
                operation.results[k].replace_all_uses_with(operation.operands[k])


def _statements(module: Any) -> tuple[Statements, Reader]:
    """The module as a program with every op, including those whose results are not needed."""
    function = xla.main_function(module)
    reader = Reader()
    reader.function(function)
    block = function.entry_block
    places = {view.operation: n for n, view in enumerate(block.operations)}

    def statement(operation: Any) -> int:
        while operation not in places:
            if operation.name == "func.func":
                return -1
            operation = operation.parent.operation
        return places[operation]

    ops = [
        replace(op, detail=_constant_detail(operation)) if op.name == CONSTANT else op
        for op, operation in zip(reader.ops, reader.operations, strict=True)
    ]
    outputs = tuple(Result(op.operands[0], "") for op in ops if op.name == RESULT)
    program = Program("", tuple(ops), tuple(reader.values), read_arguments(function), outputs, tuple(reader.loops))

    def read_directly(op: int, position: int) -> bool:
        operation, operand = reader.uses.get((op, position), (reader.operations[op], position))
        return bool(operation.operands[operand] == reader.definitions[ops[op].operands[position]])

    found = Statements(program, [statement(operation) for operation in reader.operations], read_directly)
    for branch in xla.walk_ops(module, *_BRANCHES):
        found.deciding[statement(branch)].append(reader.number(branch.operands[0]))
    return found, reader


def _constant_detail(operation: Any) -> str:
    number = xla.constant_number(operation)
    if number is None:
        return ""
    parts = number.strip("()").split(",")  # two of a complex one
    zero = all(part == "false" or re.fullmatch(r"-?[0.]+(e[-+]\d+)?", part) for part in parts)
    return "zero" if zero else "splat"


# ---------------------------------------------------------------- the loop
# Writes the loop over microbatches around a step.
#
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
            made = self._smaller(operation.operands[operand], cut, {}, ir.InsertionPoint(operation))
            operation.operands[operand] = made
            if statement is not None:
                statement.insert(-1, made.owner)
        self._inside = [operation for statement in statements for operation in statement]
        inside = made_by(self._inside)  # an array that the loop reads in parts is whole in front of it
        for handle, value in self._reader.handles():
            state = self._split.states[value]
            if isinstance(state, Cut) and handle in inside:
                handle.set_type(retyped(handle.type, self._cut_shape(tuple(handle.type.shape), state)))
        self._loop()
        for operation in self._inside:
            _walk(operation, _adapt)
        self._run_kernels_on_parts()

    def _run_kernels_on_parts(self) -> None:
        """Rewrites hand-written kernels for one microbatch."""
        program, parts = self._program, self._split.parts
        rules = CutRules(program, parts, [], {}, lambda *_: None)
        for number, op in enumerate(program.ops):
            for dims, value in zip(op.rule.operands, op.operands, strict=False) if op.kernel is not None else ():
                cut = self._split.states[value]
                place = (
                    rules.located(dims, op.rule.sizes, program.values[value].shape, cut)
                    if isinstance(cut, Cut)
                    else None
                )
                if place is not None and op.kernel is not None:
                    run_on_part(self._reader.operations[number], op.kernel, {place[0]: parts})
                    break

    def _cut_shape(self, shape: Shape, cut: Cut) -> Shape:
        return (*shape[: cut.dim], shape[cut.dim] // self._split.parts, *shape[cut.dim + 1 :])

    def _smaller(self, handle: Any, cut: Cut, twins: dict[Any, Any], at: Any) -> Any:
        """An array like `handle`, which repeats along the batch, with the size of one microbatch. twins: replacements
        for operands that `handle` is made from."""
        maker, kind = handle.owner, retyped(handle.type, self._cut_shape(tuple(handle.type.shape), cut))
        operands = [
            twins.get(source, source) if own is None else self._smaller(source, replace(cut, dim=own), twins, at)
            for source, own in _along(handle, cut.dim) or ()
        ]
        if maker.name == CONSTANT:
            return splat_of(xla.constant_number(maker) or "", kind, at)
        attributes = {name: maker.attributes[name] for name in maker.attributes if name != "sdy.sharding_rule"}
        return self._create(maker.name, operands, kind, at, attributes)

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
            handle, at = operation.operands[operand], ir.InsertionPoint(operation)
            shape = tuple(handle.type.shape)
            apart = self._create(RESHAPE, [handle], retyped(handle.type, self._split_shape(shape, cut)), at)
            zero = self._constant(index.type, 0, at)
            row = tuple(1 if d == cut.dim + 1 else size for d, size in enumerate(apart.type.shape))
            starts = [index if d == cut.dim + 1 else zero for d in range(len(row))]
            sizes = {"slice_sizes": ir.DenseI64ArrayAttr.get(row)}
            piece = self._create(DYNAMIC_SLICE, [apart, *starts], retyped(handle.type, row), at, sizes)
            part = retyped(handle.type, self._cut_shape(shape, cut))
            operation.operands[operand] = self._create(RESHAPE, [piece], part, at)

    def _count_in_part(self, iota: Any, cut: Cut, index: Any) -> None:
        """Replaces an iota along the batch by the numbers of one part's examples."""
        result = iota.results[0]
        shape, at = tuple(result.type.shape), ir.InsertionPoint.after(iota)
        apart = (*shape[: cut.dim], shape[cut.dim] // cut.inner, cut.inner, *shape[cut.dim + 1 :])
        kind = retyped(result.type, apart)

        def scaled(counted: Any, by: int) -> Any:
            factor = self._constant(kind, by, at)
            return self._create("stablehlo.multiply", [counted, factor], kind, at)

        def along(dim: int) -> Any:
            attribute = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), dim)
            return self._create(IOTA, [], kind, at, {"iota_dimension": attribute})

        own = self._create(CONVERT, [index], ir.RankedTensorType.get([], kind.element_type), at)
        none = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get([])}
        first = scaled(self._create(BROADCAST_IN_DIM, [own], kind, at, none), cut.inner)
        steps = self._create(ADD, [scaled(along(cut.dim), self._split.parts * cut.inner), first], kind, at)
        numbers = self._create(ADD, [steps, along(cut.dim + 1)], kind, at)
        result.replace_all_uses_with(self._create(RESHAPE, [numbers], result.type, at))

    # -- the loop -------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        split, at = self._split, ir.InsertionPoint(self._end)
        number_type = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
        zero, one, count = (_splat(number_type, n) for n in (0, 1, split.parts))
        outer = read_from_outside(self._inside)
        read_cut = {self._definitions[v]: cut for v, cut in split.read_cut.items() if self._definitions[v] in outer}
        repeated = {handle: cut for handle, cut in read_cut.items() if _is_repeated(handle, cut.dim)}
        sliced = {handle: cut for handle, cut in read_cut.items() if handle not in repeated}
        within = ([it] if it not in repeated else _repeats(it, repeated[it].dim) for it in outer)
        outer = list(dict.fromkeys(handle for handles in within for handle in handles))
        # The loop and all other readers make constants and splats for themselves (see `copy_splats`).
        shared = [
            handle
            for handle in outer
            if handle not in sliced
            and (isinstance(handle, ir.BlockArgument) or not (handle.owner.name == CONSTANT or is_splat(handle.owner)))
        ]
        stacks = [self._in_front(handle, cut, at) for handle, cut in sliced.items()]
        leaving = [(self._definitions[v], split.states[v]) for v in split.leaving]
        starts = [self._create(CONSTANT, [], number_type, at, {"value": zero})]
        starts += [self._zeros(self._carried_type(*it), at) for it in leaving]
        operands = [*starts, *shared, *stacks]
        types = [handle.type for handle in operands]
        place = self._end.location
        loop = ir.Operation.create("stablehlo.while", results=types, operands=operands, regions=2, loc=place, ip=at)
        condition, body = (it.blocks.append(*types, arg_locs=[place] * len(types)) for it in loop.regions)
        self._condition(condition, count)
        with ir.InsertionPoint(body):
            end = ir.InsertionPoint(body)
            index, known = body.arguments[0], list(body.arguments)[1 : len(starts)]
            twins = dict(zip(shared, list(body.arguments)[len(starts) :], strict=False))
            zero_index = self._create(CONSTANT, [], number_type, end, {"value": zero})
            pieces = list(body.arguments)[len(starts) + len(shared) :]
            for (handle, cut), stack in zip(sliced.items(), pieces, strict=True):
                twins[handle] = self._piece(handle, cut, stack, index, zero_index, end)
            for handle in outer:
                if handle not in twins:
                    twins[handle] = handle.owner.operation.clone(ip=end).results[0]
            for handle, cut in repeated.items():
                twins[handle] = self._smaller(handle, cut, twins, end)
            step = self._create(CONSTANT, [], number_type, end, {"value": one})
            following = self._create(ADD, [index, step], number_type, end)
            last = ir.Operation.create("stablehlo.return", operands=[], ip=end)
            for operation in self._inside:
                operation.move_before(last)
                _walk(operation, lambda it: _replace_operands(it, twins))
            self._read_parts(index)
            end = ir.InsertionPoint(last)
            yielded = [
                self._added(handle, state, held, index, zero_index, end)
                for (handle, state), held in zip(leaving, known, strict=True)
            ]
            passed = list(body.arguments)[len(starts) :]
            ir.Operation.create("stablehlo.return", operands=[following, *yielded, *passed], ip=end)
            last.erase()
        results = {
            handle: self._result(handle, state, result, ir.InsertionPoint(self._end))
            for (handle, state), result in zip(leaving, list(loop.results)[1:], strict=False)
        }
        for operation in self._after:
            operation.move_before(self._end)
            _walk(operation, lambda it: _replace_operands(it, results))
        _replace_operands(self._end, results)

    def _condition(self, block: Any, count: Any) -> None:
        at = ir.InsertionPoint(block)
        limit = self._create(CONSTANT, [], block.arguments[0].type, at, {"value": count})
        less = {
            "comparison_direction": ir.Attribute.parse("#stablehlo<comparison_direction LT>"),
            "compare_type": ir.Attribute.parse("#stablehlo<comparison_type SIGNED>"),
        }
        kind = ir.RankedTensorType.get([], ir.IntegerType.get_signless(1))
        goes_on = self._create("stablehlo.compare", [block.arguments[0], limit], kind, at, less)
        ir.Operation.create("stablehlo.return", operands=[goes_on], ip=at)

    def _split_shape(self, shape: Shape, cut: Cut) -> Shape:
        """A shape with the cut dimension as three: steps, microbatches, and size within a step."""
        steps = shape[cut.dim] // (self._split.parts * cut.inner)
        return (*shape[: cut.dim], steps, self._split.parts, cut.inner, *shape[cut.dim + 1 :])

    def _in_front(self, handle: Any, cut: Cut, at: Any) -> Any:
        """An array with the microbatches along its first dimension."""
        apart = self._split_shape(tuple(handle.type.shape), cut)
        order = [cut.dim + 1, *(d for d in range(len(apart)) if d != cut.dim + 1)]
        split = self._create(RESHAPE, [handle], retyped(handle.type, apart), at)
        turned = self._create(
            TRANSPOSE, [split], retyped(handle.type, tuple(apart[d] for d in order)), at,
            {"permutation": ir.DenseI64ArrayAttr.get(order)},
        )  # fmt: skip
        shape = (self._split.parts, *self._cut_shape(tuple(handle.type.shape), cut))
        return self._create(RESHAPE, [turned], retyped(handle.type, shape), at)

    def _piece(self, handle: Any, cut: Cut, stack: Any, index: Any, zero: Any, at: Any) -> Any:
        shape = self._cut_shape(tuple(handle.type.shape), cut)
        piece = self._create(
            DYNAMIC_SLICE, [stack, index, *[zero] * len(shape)], retyped(handle.type, (1, *shape)), at,
            {"slice_sizes": ir.DenseI64ArrayAttr.get([1, *shape])},
        )  # fmt: skip
        return self._create(RESHAPE, [piece], retyped(handle.type, shape), at)

    def _carried_type(self, handle: Any, state: Any) -> Any:
        shape = tuple(handle.type.shape)
        if isinstance(state, Cut):
            return retyped(handle.type, (self._split.parts, *shape))
        if state == SUM and str(handle.type.element_type).startswith(_NARROW):
            return ir.RankedTensorType.get(shape, ir.F32Type.get())
        return handle.type

    def _added(self, handle: Any, state: Any, held: Any, index: Any, zero: Any, at: Any) -> Any:
        """A carried value after an iteration: updated at this microbatch's index, summed, or replaced."""
        if isinstance(state, Cut):
            shape = tuple(handle.type.shape)
            one = self._create(RESHAPE, [handle], retyped(handle.type, (1, *shape)), at)
            return self._create(DYNAMIC_UPDATE_SLICE, [held, one, index, *[zero] * len(shape)], held.type, at)
        if state != SUM:
            return handle
        term = handle if handle.type == held.type else self._create(CONVERT, [handle], held.type, at)
        return self._create(ADD, [held, term], held.type, at)

    def _result(self, handle: Any, state: Any, result: Any, at: Any) -> Any:
        """The loop's result in the form of the value without a loop."""
        if isinstance(state, Cut):
            part = tuple(handle.type.shape)
            whole = (*part[: state.dim], part[state.dim] * self._split.parts, *part[state.dim + 1 :])
            apart = self._split_shape(whole, state)
            front = (apart[state.dim + 1], *apart[: state.dim + 1], *apart[state.dim + 2 :])
            order = [*range(1, state.dim + 2), 0, *range(state.dim + 2, len(apart))]
            split = self._create(RESHAPE, [result], retyped(result.type, front), at)
            turned = self._create(
                TRANSPOSE, [split], retyped(result.type, apart), at, {"permutation": ir.DenseI64ArrayAttr.get(order)}
            )
            return self._create(RESHAPE, [turned], retyped(result.type, whole), at)
        return result if result.type == handle.type else self._create(CONVERT, [result], handle.type, at)

    def _zeros(self, kind: Any, at: Any) -> Any:
        scalar = ir.RankedTensorType.get([], kind.element_type)
        zero = self._constant(scalar, 0, at)
        if not kind.rank:
            return zero
        return self._create(BROADCAST_IN_DIM, [zero], kind, at, {"broadcast_dimensions": ir.DenseI64ArrayAttr.get([])})

    def _constant(self, kind: Any, number: int, at: Any) -> Any:
        if isinstance(kind.element_type, ir.ComplexType):
            return splat_of(f"({number}.0,0.0)", kind, at)
        return self._create(CONSTANT, [], kind, at, {"value": _splat(kind, number)})

    def _create(
        self, name: str, operands: list[Any], kind: Any, at: Any, attributes: dict[str, Any] | None = None
    ) -> Any:
        return ir.Operation.create(
            name, results=[kind], operands=operands, attributes=attributes or {}, loc=self._end.location, ip=at
        ).results[0]


def _walk(operation: Any, visit: Any) -> None:
    def each(found: Any) -> Any:
        visit(found)
        return ir.WalkResult.ADVANCE

    operation.walk(each, ir.WalkOrder.PRE_ORDER)


def _replace_operands(operation: Any, twins: dict[Any, Any]) -> None:
    for k, operand in enumerate(operation.operands):
        if operand in twins:
            operation.operands[k] = twins[operand]


def _along(handle: Any, dim: int) -> list[tuple[Any, int | None]] | None:
    """The operands of a broadcast or an elementwise op, each with its dimension that becomes dimension `dim` of the
    result, or None if the operand is the same along it. None for any other op."""
    maker = handle.owner
    if maker.name == BROADCAST_IN_DIM:
        (source,) = maker.operands
        places = list(ir.DenseI64ArrayAttr(maker.attributes["broadcast_dimensions"]))
        own = places.index(dim) if dim in places else None
        return [(source, None if own is None or source.type.shape[own] == 1 else own)]
    if kind_of(maker.name).elementwise:
        return [(source, dim if source.type.rank else None) for source in maker.operands]
    return None


def _is_repeated(handle: Any, dim: int) -> bool:
    """True if an array is constant along a dimension: it is broadcast along it, or computed from such arrays."""
    if isinstance(handle, ir.BlockArgument):
        return False
    read = _along(handle, dim)
    if read is None:
        return is_splat(handle.owner)
    return all(own is None or _is_repeated(source, own) for source, own in read)


def _repeats(handle: Any, dim: int) -> Iterator[Any]:
    """The arrays from which such an array is broadcast."""
    for source, own in _along(handle, dim) or ():
        yield from [source] if own is None else _repeats(source, own)


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
        whole = operation.operands[0].type.shape
        taken = [min(n, size) for n, size in zip(ir.DenseI64ArrayAttr(attributes["slice_sizes"]), whole, strict=True)]
        attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(taken)


def _splat(kind: Any, number: int) -> Any:
    element = kind.element_type
    attribute = ir.IntegerAttr.get if isinstance(element, ir.IntegerType) else ir.FloatAttr.get
    return ir.DenseElementsAttr.get_splat(kind, attribute(element, number))
