"""Splits a step's batch into microbatches that run one after the other; see `toast_cli.levers.batch_split`.

In: a `Source` and a number of microbatches. Out: another one that computes the same from the same arguments, in
a loop around most of the program (`microbatch_loop`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from toast_cli import xla
from toast_cli.frontend.reader import Reader, read_arguments
from toast_cli.frontend.rewritten import read_rewritten
from toast_cli.frontend.source import Source
from toast_cli.kernels.describe import describe_kernels
from toast_cli.levers.batch_cut import CONSTANT, SUM, WholeBatchError
from toast_cli.levers.batch_split import Split, Statements, split_batch
from toast_cli.levers.microbatch_loop import LoopWriter
from toast_cli.program.model import Program, Result
from toast_cli.program.ops import RESULT
from toast_cli.program.roles import INPUTS, argument_roles
from toast_cli.xla import ir

_BRANCHES = ("stablehlo.case", "stablehlo.if")
_TRIED = 8  # dimensions


def batch_dimensions(source: Source) -> list[tuple[int, int]]:
    """(argument, dimension) candidates for a batch dimension: leading dimensions of inputs first, the largest array
    first. If inputs cannot be told from weights, any argument may be one."""
    program = source.program
    inputs = _inputs(source)
    values = {n: program.values[program.arguments[n].value] for n in inputs}
    found = [(n, dim) for n in inputs for dim in range(len(values[n].shape)) if values[n].own_shape[dim] > 1]
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
        size, parts = value.own_shape[dim], parts_of(value.own_shape[dim])
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
